"""Settings of speculative decoding: `engine.speculation` in `deployments.yaml`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

Method = Literal["ngram", "draft_model", "mtp", "eagle3"]

_WITH_FILES = {
    "draft_model": "name a draft model",
    "eagle3": "name the directory or hub id of an EAGLE-3 checkpoint that was trained for the model",
}
"""Methods whose drafter has files of its own, and what `model` must then do."""


@dataclass(frozen=True, slots=True)
class Speculation:
    """The drafter and its limits. Raises ValueError when a value is out of range."""

    method: Method = "ngram"
    """"ngram": tokens that followed the same ones earlier in the request. "draft_model": a smaller model. "mtp":
    the model's own layer for multi-token prediction. "eagle3": a layer that was trained for the model later."""
    model: str | None = None
    """With "draft_model" a smaller model with the same vocabulary, with "eagle3" the files of the layer; named as
    in `EngineConfig.model`. None with other methods."""
    max_drafts: int = 4
    """Maximum number of draft tokens of a request in one step, 1 to 64."""
    adaptive: bool = True
    """Whether drafts are only as long as pays, by measured cost and acceptance. Turn off only to measure."""
    min_match: int = 2
    """"ngram": minimum number of equal tokens, 1 to `max_match`."""
    max_match: int = 8
    """"ngram": maximum number of tokens compared, up to 64; the longest match is used."""
    window: int = 16_384
    """"ngram": how many of a request's last tokens are searched; each takes 8 bytes."""
    max_prefill_tokens: int = 512
    """All but "ngram": maximum number of prompt tokens it computes between two steps, for new requests. "mtp",
    "eagle3": also the number of a request's last tokens from whose hidden states it can begin."""
    kv_pages: int | None = None
    """All but "ngram": number of its own KV pages; None for as many as the model has."""

    def __post_init__(self) -> None:
        if self.method not in get_args(Method):
            names = ", ".join(get_args(Method))
            raise ValueError(f"speculation.method must be one of {names}; got {self.method!r}")
        if (self.method in _WITH_FILES) != (self.model is not None):
            expected = _WITH_FILES.get(self.method, "leave it out")
            raise ValueError(
                f'speculation.model belongs to the methods "draft_model" and "eagle3"; the method is '
                f"{self.method!r}: {expected}"
            )
        for name, low, high in (
            ("max_drafts", 1, 64),
            ("max_match", 1, 64),
            ("min_match", 1, self.max_match),
            ("window", 16, 2**24),
            ("max_prefill_tokens", 1, 2**40),
            ("kv_pages", 1, 2**40),
        ):
            value = getattr(self, name)
            if value is not None and not low <= value <= high:
                raise ValueError(f"speculation.{name} must be in [{low}, {high}], got {value}")

    @property
    def reads_hidden(self) -> bool:
        """Whether a layer drafts from the model's hidden states."""
        return self.method in ("mtp", "eagle3")
