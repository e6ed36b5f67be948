"""Divides a model's sessions among its versions by weight.

Each version draws a number for each session, and the smallest draw divided by the weight wins (rendezvous
hashing). So shares are as the weights, all ingresses agree, and a version whose weight rises takes sessions from
the others and gives none away.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from hashlib import blake2b

from deployments.config.versions import VersionPlan, label_of

_MOST = 1 << 64


class Versions:
    """The versions of one model, with their present weights."""

    def __init__(self, plan: VersionPlan) -> None:
        """Begin with the weights before a rollout."""
        self._model = plan.model
        self.weights: Mapping[str, float] = plan.weights_at(0)
        """By version, each at least 0, and one above. Only new requests see a change."""

    @property
    def labels(self) -> list[str]:
        """The names of all versions among all models."""
        return [label_of(self._model, version) for version in self.weights]

    def choose(self, session: str | None) -> str:
        """Return the label of the version for a session; None: the one with most of them."""
        weights = {version: weight for version, weight in self.weights.items() if weight > 0}
        if session is None or len(weights) == 1:
            return label_of(self._model, max(weights, key=weights.__getitem__))
        key = blake2b(f"{self._model}\0{session}".encode("utf-8", "surrogatepass"), digest_size=16).digest()
        return label_of(self._model, min(weights, key=lambda version: _draw(key, version) / weights[version]))


def _draw(key: bytes, version: str) -> float:
    """Return an exponentially distributed number, at random by key and version."""
    digest = blake2b(version.encode(), key=key, digest_size=8).digest()
    return -math.log((int.from_bytes(digest, "little") + 1) / (_MOST + 1))
