"""The machine's limits: the least time that its memory and its matrix units need for a piece of work.

    decode    t = max(W / bandwidth, 2 P B / rate) + KV / bandwidth
    prefill   t = (2 P n + 4 A (1 + 2 + ... + n)) / rate, at least W / bandwidth

W bytes of weights that are read, P those that a token is multiplied with, B rows, KV bytes of keys and values that
are read, n tokens, A query heads times their size over all layers. Both rates are measured in the same run: a
share is of this machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from benchmarks.gpu_sections.shapes import Size


@dataclass(frozen=True, slots=True)
class Rates:
    """Rates of one machine."""

    bandwidth: float
    """Bytes a second, of reads alone."""
    matmul: float
    """Operations a second of a large product of matrices, in the type of the weights."""


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

    def offline(self, prompts: Sequence[int], outputs: Sequence[int]) -> float:
        """All requests at once, by their lengths: every prompt, then decodes of all that are not done."""
        seconds = sum(self.prefill(0, prompt) for prompt in prompts)
        for step in range(1, max(outputs)):
            contexts = [prompt + step for prompt, output in zip(prompts, outputs, strict=True) if output > step]
            seconds += self.decode(len(contexts), sum(contexts))
        return seconds
