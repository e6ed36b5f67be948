"""Versions of a model, the weights that divide its traffic among them, and how a new one is rolled out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated, Self

from pydantic import Field, StringConstraints, model_validator

from deployments.config.section import Section

VersionLabel = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]
"""The name of a version: it is part of a header, of metrics and of its deployment's name."""


class AbortSettings(Section):
    """Limits of a new version. Where one is exceeded, the version is rolled back."""

    error_rate: float | None = Field(default=None, ge=0, lt=1)
    """Largest share of its requests that may fail with a status of 500 or more. None: any."""
    ttft_p95: float | None = Field(default=None, gt=0)
    """Most seconds to the first token, in 95 of 100 requests. None: any."""
    tpot_p95: float | None = Field(default=None, gt=0)
    """Most seconds for each token after the first, in 95 of 100 answers. None: any."""

    @property
    def limits(self) -> dict[str, float]:
        """The limits that are set, by their names."""
        return {name: limit for name, limit in self if limit is not None}


class RolloutSettings(Section):
    """How a new version gets its traffic: in steps, each of which it has to pass."""

    steps: tuple[Annotated[float, Field(gt=0, le=100)], ...] = (1, 10, 50, 100)
    """The version's share of the sessions in percent, ascending to 100."""
    hold_s: float = Field(default=600.0, gt=0)
    """Least seconds at each step before the next."""
    min_requests: int = Field(default=20, ge=1)
    """Requests that the version must have answered at a step before it is judged; while it has fewer, the step
    lasts longer."""
    abort_on: AbortSettings = AbortSettings()
    """Limits, checked as long as the rollout lasts, for the requests since its last step began."""

    @model_validator(mode="after")
    def _steps_ascend_to_all(self) -> Self:
        steps = list(self.steps)
        if not steps or steps[-1] != 100 or any(a >= b for a, b in pairwise(steps)):
            shown = [f"{step:g}" for step in steps]
            raise ValueError(f"steps must be percentages that ascend to 100, got [{', '.join(shown)}]")
        if not self.abort_on.limits:
            raise ValueError("abort_on has no limit, so nothing would stop a bad version: set at least error_rate")
        return self


@dataclass(frozen=True, slots=True)
class VersionPlan:
    """The versions of one model."""

    model: str
    """The model's name in requests."""
    weights: Mapping[str, float]
    """By version; 0 for the one that is rolled out."""
    new: str | None = None
    """The version that is rolled out; None: none is."""
    rollout: RolloutSettings | None = None

    def weights_at(self, percent: float) -> dict[str, float]:
        """Return the weights where the new version has this share; they sum to 1."""
        total, share = sum(self.weights.values()), percent / 100
        weights = {version: weight / total * (1 - share) for version, weight in self.weights.items()}
        return weights if self.new is None else weights | {self.new: share}


def label_of(model: str, version: str | None) -> str:
    """Return the name that distinguishes a version from the model's others, in metrics, logs and paths."""
    return model if version is None else f"{model}@{version}"


@dataclass(frozen=True, slots=True)
class VersionEntry:
    """The part of an entry of `models` that concerns its version."""

    model: str
    version: str | None
    weight: float | None
    rollout: RolloutSettings | None


def version_plans(entries: Sequence[VersionEntry]) -> tuple[VersionPlan, ...]:
    """Return the plans of the models that have versions. Raises ValueError, whose message names the model."""
    return tuple(
        _plan(name, [entry for entry in entries if entry.model == name])
        for name in dict.fromkeys(entry.model for entry in entries)
        if any(
            entry.version or entry.weight is not None or entry.rollout for entry in entries if entry.model == name
        )
    )


def _plan(name: str, entries: Sequence[VersionEntry]) -> VersionPlan:
    weights: dict[str, float] = {}
    for entry in entries:
        if entry.version is None:
            raise ValueError(f"an entry of the model {name!r} has no version; give each of its entries a version")
        if entry.rollout is not None and entry.weight is not None:
            raise ValueError(
                f"version {entry.version!r} of the model {name!r} has a rollout, which sets its weight: "
                "remove weight"
            )
        weights[entry.version] = (
            0.0 if entry.rollout is not None else 1.0 if entry.weight is None else entry.weight
        )
    rollouts = [(entry.version, entry.rollout) for entry in entries if entry.rollout is not None]
    if len(rollouts) > 1:
        raise ValueError(f"{len(rollouts)} versions of the model {name!r} have a rollout; give it to one of them")
    if not any(weights.values()):
        other = "version besides the one that is rolled out" if rollouts else "version"
        raise ValueError(
            f"the model {name!r} has no {other} with a weight above 0, so no version would serve its requests"
        )
    return VersionPlan(name, weights, *(rollouts[0] if rollouts else ()))
