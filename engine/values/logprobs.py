"""Log-probabilities of tokens. Those of a whole prompt stay packed from the device over the wire to the API.

    position    0    1    2    3  ...         token p is scored by the logits after token p - 1,
    scored           p    p    p              so position 0 has none

A record is little endian and has 8 + 8 * num_top bytes. A prompt of 32k tokens with five alternatives takes 1.5
MB, a twelfth of what Python's numbers and tuples would take:

    log-probability f32 | rank u32 | num_top times: token id u32, log-probability f32
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Sequence

from engine.base.structs import Struct


class TokenLogprobs(Struct, frozen=True, array_like=True, omit_defaults=True, gc=False):
    """Natural log-probabilities at one position, before temperature and penalties."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    """The most likely alternatives as (token id, log-probability), best first."""
    rank: int = 0
    """One more than the number of tokens that are more likely; 0 where they were not counted."""


class PackedLogprobs(Struct, frozen=True, array_like=True, gc=False):
    """The records of consecutive prompt tokens. Raises ValueError if the bytes are no whole number of records."""

    start: int
    """Position of the first token in its prompt, at least 1."""
    num_top: int
    """Alternatives per token."""
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

    def since(self, position: int) -> PackedLogprobs | None:
        """Return the records from `position` on; None if there are none."""
        if position <= self.start:
            return self
        if position >= self.end:
            return None
        return PackedLogprobs(position, self.num_top, self.records[(position - self.start) * self._size :])

    def beginning(self, num_bytes: int) -> PackedLogprobs:
        """Return as many of the first records as fit in `num_bytes`; at least one."""
        count = max(1, num_bytes // self._size)
        return PackedLogprobs(self.start, self.num_top, self.records[: count * self._size])

    def then(self, later: PackedLogprobs) -> PackedLogprobs:
        """Append `later`, which begins where these end. Raises ValueError if it does not."""
        if (later.start, later.num_top) != (self.end, self.num_top):
            raise ValueError(f"records from {later.start} on do not continue those up to {self.end}")
        return PackedLogprobs(self.start, self.num_top, self.records + later.records)

    def read(self, token_ids: Sequence[int]) -> list[TokenLogprobs]:
        """Unpack the records, which belong to `token_ids`. Raises ValueError if their numbers differ."""
        rows = struct.iter_unpack(_layout(self.num_top), self.records)
        return [
            TokenLogprobs(token, row[0], tuple(zip(row[2::2], row[3::2], strict=True)), row[1])
            for token, row in zip(token_ids, rows, strict=True)
        ]


def joined(earlier: PackedLogprobs | None, later: PackedLogprobs | None) -> PackedLogprobs | None:
    """Join two runs of records, either of which may be missing."""
    if earlier is None or later is None:
        return earlier or later
    return earlier.then(later)


@functools.cache
def _layout(num_top: int) -> str:
    return "<fI" + "If" * num_top
