"""The machine's limits: the least time that its memory and its matrix units need for a piece of work.

    decode    t = max(W / bandwidth, 2 P B / rate) + KV / bandwidth
    prefill   t = (2 P n + 4 A (1 + 2 + ... + n)) / rate, at least W / bandwidth

W bytes of weights that are read, P those that a token is multiplied with, B rows, KV bytes of keys and values that
are read, n tokens, A query heads times their size over all layers. Both rates are measured in the same run. A
share of what they allow depends on how well they were measured, so there is one of the data sheet's rates too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from benchmarks.gpu_sections.shapes import Size


@dataclass(frozen=True, slots=True)
class Rates:
    """Rates of one machine."""

    bandwidth: float
    """Bytes a second, of reads alone."""
    matmul: float
    """Operations a second of a large product of matrices, in the type of the weights."""
    sheet_bandwidth: float | None = None
    """The same by the GPU's data sheet; None if it is not known."""
    sheet_matmul: float | None = None

    @property
    def sheet(self) -> Rates | None:
        """The rates of the data sheet."""
        if self.sheet_bandwidth is None or self.sheet_matmul is None:
            return None
        return Rates(self.sheet_bandwidth, self.sheet_matmul)

    def least(self, num_bytes: float, operations: float = 0.0) -> float:
        """Return the least seconds for so many bytes that are read, and so many operations meanwhile."""
        return max(num_bytes / self.bandwidth, operations / self.matmul)

    def shares(self, least: Callable[[Rates], float], seconds: float) -> dict[str, Any]:
        """Return both shares of a `Measurement` that took so long. `least`: the least seconds at some rates."""
        sheet = self.sheet
        return {
            "limit_share": least(self) / seconds,
            "sheet_share": None if sheet is None else least(sheet) / seconds,
        }


class Bytes(NamedTuple):
    """Bytes of one number."""

    matrices: float = 2
    """In the layers' matrices."""
    head: int = 2
    """In the output projection."""
    kv: int = 2


@dataclass(frozen=True, slots=True)
class Limits:
    """The least seconds in which a model's work can be done."""

    size: Size
    rates: Rates
    bytes: Bytes

    def shares(self, least: Callable[[Limits], float], seconds: float) -> dict[str, Any]:
        """Return both shares of a `Measurement` that took so long. `least`: the least seconds at some limits."""
        return self.rates.shares(lambda rates: least(replace(self, rates=rates)), seconds)

    def decode(self, rows: int, kv_tokens: float) -> float:
        """A step that decodes `rows` tokens, which attend to `kv_tokens` positions in all."""
        weights = self.size.multiplied + self.size.head
        weight_bytes = self.size.read(rows) * self.bytes.matrices + self.size.head * self.bytes.head
        reading = weight_bytes / self.rates.bandwidth
        kv = kv_tokens * self.size.kv_per_token * self.bytes.kv / self.rates.bandwidth
        return max(reading, 2 * weights * rows / self.rates.matmul) + kv

    def prefill(self, start: int, end: int) -> float:
        """A prompt's positions `start` .. `end`, those before it being cached."""
        pairs = (end * (end + 1) - start * (start + 1)) / 2
        operations = 2 * self.size.multiplied * (end - start) + 4 * self.size.attention_width * pairs
        kv = start * self.size.kv_per_token * self.bytes.kv / self.rates.bandwidth
        reading = self.size.read(end - start) * self.bytes.matrices / self.rates.bandwidth
        return max(operations / self.rates.matmul, reading) + kv

    def prefills(self, lengths: Sequence[int]) -> float:
        """Prompts one after another, of which no token is cached."""
        return sum(self.prefill(0, length) for length in lengths)

    def offline(self, prompts: Sequence[int], outputs: Sequence[int]) -> float:
        """All requests at once, by their lengths: every prompt, then decodes of all that are not done."""
        seconds = self.prefills(prompts)
        for step in range(1, max(outputs)):
            contexts = [prompt + step for prompt, output in zip(prompts, outputs, strict=True) if output > step]
            seconds += self.decode(len(contexts), sum(contexts))
        return seconds
