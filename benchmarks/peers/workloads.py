"""The jobs of every engine: prompts as token ids and lengths of answers, the same for all engines.

Prompts are drawn anew for every round, so that no cache holds them, except for "shared prefix warm": its prompts
begin like those of "shared prefix cold", which ran just before.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

from benchmarks.peers.protocol import Job


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much is asked; lengths in tokens."""

    requests: int = 32
    prompt: int = 256
    answer: int = 64
    prefix: int = 1024
    own: int = 32
    single: int = 128
    prefills: int = 4
    mixed_prompt: tuple[int, int] = (16, 512)
    mixed_answer: tuple[int, int] = (8, 128)

    @property
    def kv_tokens(self) -> int:
        """Tokens of the largest workload if no prompts share KV."""
        longest = max(self.prompt + self.answer, self.prefix + 2 * self.own, sum(map(max, self._mixed)))
        return self.requests * longest

    @property
    def max_len(self) -> int:
        """Tokens of the longest request."""
        return max(
            self.prefix + 2 * self.own, self.prompt + self.answer, 2 * self.single, sum(map(max, self._mixed))
        )

    @property
    def _mixed(self) -> tuple[tuple[int, int], tuple[int, int]]:
        return self.mixed_prompt, self.mixed_answer


FULL = Sizes()
QUICK = Sizes(8, prompt=64, answer=16, prefix=256, own=16, single=32, prefills=2, mixed_prompt=(8, 128))


def make_jobs(sizes: Sizes, ids: range, seed: int) -> dict[str, Job]:
    """The workloads by name, in the order in which they are to run; prompt ids are drawn from `ids`.

    "offline", "shared prefix cold" and "warm", "mixed" and "single" are measured in output tokens per second,
    "first token" in seconds, "prefill" in prompt tokens per second.
    """
    draw = random.Random(seed)

    def prompt(length: int) -> list[int]:
        return draw.choices(ids, k=length)

    prefix = prompt(sizes.prefix)
    num = sizes.requests
    lengths = [
        (_log_uniform(draw, *sizes.mixed_prompt), _log_uniform(draw, *sizes.mixed_answer)) for _ in range(num)
    ]
    return {
        "offline": Job([prompt(sizes.prompt) for _ in range(num)], [sizes.answer] * num),
        "shared prefix cold": Job([prefix + prompt(sizes.own) for _ in range(num)], [sizes.own] * num),
        "shared prefix warm": Job([prefix + prompt(sizes.own) for _ in range(num)], [sizes.own] * num),
        "mixed": Job([prompt(given) for given, _ in lengths], [asked for _, asked in lengths]),
        "single": Job([prompt(sizes.single)], [sizes.single]),
        "first token": Job([prompt(sizes.single)], [1]),
        "prefill": Job([prompt(sizes.prefix) for _ in range(sizes.prefills)], [1] * sizes.prefills),
    }


def make_warm_up(sizes: Sizes, ids: range) -> list[Job]:
    """Return the jobs before the measurements: a batch, a long prompt, a single stream."""
    draw = random.Random(-1)
    lengths = [(sizes.requests, sizes.own), (1, sizes.prefix), (1, sizes.own)]
    return [Job([draw.choices(ids, k=length) for _ in range(num)], [8] * num) for num, length in lengths]


def _log_uniform(draw: random.Random, low: int, high: int) -> int:
    return round(math.exp(draw.uniform(math.log(low), math.log(high))))
