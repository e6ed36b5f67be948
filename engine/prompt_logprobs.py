"""Log-probabilities of a prompt's own tokens, packed as they travel: from the device over the wire to the API.

    position    0    1    2    3  ...         token p is scored by the logits after token p - 1,
    scored           p    p    p              so position 0 has no score

One record per position, little endian, 8 + 8 * num_top bytes; a prompt of 32k tokens with five alternatives is
1.5 MB, where Python's own numbers and tuples would take forty:

    log-probability f32 | rank u32 | num_top token ids u32 | their log-probabilities f32
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec


@dataclass(frozen=True, slots=True)
class PromptLogprob:
    """Natural log-probabilities at one position of a prompt."""

    token_id: int
    """The prompt's token."""
    logprob: float
    rank: int
    """One more than the number of tokens that are more likely."""
    top: tuple[tuple[int, float], ...] = ()
    """The most likely (token id, log-probability), best first."""


class PromptLogprobs(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The records of consecutive prompt tokens. Raises ValueError when the bytes are no whole number of them."""

    start: int
    """Position of the first token, at least 1."""
    num_top: int
    """Alternatives per position."""
    records: bytes

    def __post_init__(self) -> None:
        if self.start < 1 or self.num_top < 0 or len(self.records) % self._size:
            raise ValueError(
                f"{len(self.records)} bytes from position {self.start} on are no records of {self.num_top} "
                "alternatives each"
            )

    @property
    def _size(self) -> int:
        return 8 + 8 * self.num_top

    @property
    def end(self) -> int:
        """Position after the last token."""
        return self.start + len(self.records) // self._size

    def since(self, position: int) -> PromptLogprobs | None:
        """Those at `position` and after it; None when there are none."""
        if position <= self.start:
            return self
        if position >= self.end:
            return None
        return PromptLogprobs(position, self.num_top, self.records[(position - self.start) * self._size :])

    def then(self, later: PromptLogprobs) -> PromptLogprobs:
        """These, and `later`, which begins where they end. Raises ValueError when it does not."""
        if (later.start, later.num_top) != (self.end, self.num_top):
            raise ValueError(f"records from {later.start} on do not continue those up to {self.end}")
        return PromptLogprobs(self.start, self.num_top, self.records + later.records)

    def read(self, prompt_ids: Sequence[int]) -> list[PromptLogprob]:
        """What is known of each token; `prompt_ids` is the whole prompt."""
        top = self.num_top
        rows = struct.iter_unpack(f"<fI{top}I{top}f", self.records)
        return [
            PromptLogprob(
                token, logprob, rank, tuple(zip(numbers[:top], numbers[top:], strict=True)) if top else ()
            )
            for token, (logprob, rank, *numbers) in zip(prompt_ids[self.start : self.end], rows, strict=True)
        ]


def joined(earlier: PromptLogprobs | None, later: PromptLogprobs | None) -> PromptLogprobs | None:
    """Both in one, either of which may be missing."""
    if earlier is None or later is None:
        return earlier or later
    return earlier.then(later)
