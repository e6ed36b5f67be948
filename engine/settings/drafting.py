"""Settings of speculative decoding: `engine.speculation` in `deployments.yaml`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

Method = Literal["ngram", "draft_model", "mtp"]


@dataclass(frozen=True, slots=True)
class Speculation:
    """The drafter and its limits. Raises ValueError when a value is out of range."""

    method: Method = "ngram"
    """"ngram": tokens that followed the same ones earlier in the request. "draft_model": a smaller model. "mtp":
    the model's own layer for multi-token prediction."""
    model: str | None = None
    """Draft model, named as in `EngineConfig.model`, with the same vocabulary. Only with "draft_model"."""
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
    """"draft_model", "mtp": maximum number of prompt tokens it computes between two steps, for new requests.
    "mtp": also the number of a request's last tokens from whose hidden states it can begin."""
    kv_pages: int | None = None
    """"draft_model", "mtp": number of its own KV pages; None for as many as the model has."""

    def __post_init__(self) -> None:
        if self.method not in get_args(Method):
            names = ", ".join(get_args(Method))
            raise ValueError(f"speculation.method must be one of {names}; got {self.method!r}")
        if (self.method == "draft_model") != (self.model is not None):
            expected = "name a draft model" if self.model is None else "leave it out"
            raise ValueError(
                f'speculation.model belongs to the method "draft_model"; the method is {self.method!r}: {expected}'
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
