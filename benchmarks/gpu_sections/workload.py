"""The workload of an engine: how many rows, how long, how often. Sizes are real for a GPU, tiny for any device."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

from engine.settings.config import GPU_DEFAULTS

_OFFLINE_TOKENS = 133_966
"""Output tokens of the offline workload, as nano-vllm and mini-sglang draw it."""


@dataclass(frozen=True, slots=True)
class Offline:
    """Requests handed in at once, sampled with temperature 0.6, which end by their length alone."""

    prompts: list[list[int]]
    outputs: list[int]


@dataclass(frozen=True, slots=True)
class Workload:
    """Lengths are in tokens."""

    batches: tuple[int, ...] = (1, 8, 32, 64, 128, 256)
    context: int = 1024
    """Context in the middle of the decoded tokens."""
    decoded: int = 128
    """Tokens decoded by each row."""
    prefills: tuple[int, ...] = (1024, 4096, 8192, 16_384, 32_768)
    repeats: int = 3
    prefix: int = 8192
    suffix: int = 64
    requests: int = 256
    shortest: int = 100
    longest: int = 1024
    anatomy: tuple[int, ...] = (1, 8, 32, 128, 256)
    """Rows of the decode steps whose parts (products, attention, sampling) are timed one by one."""
    burst: int = 16
    """Prompts that come together."""
    burst_length: int = 1024
    decoding: int = 16
    """Rows that decode when these come, for some steps before and for some meanwhile."""
    steps_before: int = 20
    steps_beside: int = 400
    step_tokens: tuple[int, ...] = (8192, 2048)
    """Most tokens of a step, where prompts come."""
    long: int = 130_000
    long_decoded: int = 32
    copied: int = 512
    """Pages that are copied to host memory and back."""
    max_step_tokens: int = GPU_DEFAULTS["max_step_tokens"]
    max_token_id: int = 10_000

    @property
    def max_model_len(self) -> int:
        """Room for the longest."""
        return max(*self.prefills, self.prefix + self.suffix, self.context + self.decoded, 2 * self.longest) + 64

    def offline(self) -> Offline:
        """The same requests in every run. Raises RuntimeError when they are not those that others measure with."""
        draw = random.Random(0)
        prompts = [
            [draw.randint(0, self.max_token_id) for _ in range(draw.randint(self.shortest, self.longest))]
            for _ in range(self.requests)
        ]
        outputs = [draw.randint(self.shortest, self.longest) for _ in range(self.requests)]
        if self == FULL and sum(outputs) != _OFFLINE_TOKENS:
            raise RuntimeError(f"the workload has {sum(outputs)} output tokens, expected {_OFFLINE_TOKENS}")
        return Offline(prompts, outputs)

    def prompt(self, seed: int, length: int) -> list[int]:
        """Random tokens; another seed, another prompt."""
        draw = random.Random(f"prompt {seed}")
        return [draw.randint(0, self.max_token_id) for _ in range(length)]


FULL = Workload()
MIXTURE = replace(FULL, batches=(1, 32, 128), prefills=(4096,))
"""For a model that is slow to measure."""
EIGHT_BITS = replace(FULL, batches=(1, 32, 128, 256), prefills=(8192,))
SEVERAL = replace(FULL, batches=(1, 32, 128), prefills=(8192,))
TINY = Workload(
    batches=(1, 3),
    context=40,
    decoded=16,
    prefills=(32, 96),
    repeats=1,
    prefix=64,
    suffix=8,
    requests=5,
    shortest=4,
    longest=24,
    anatomy=(1, 3),
    burst=3,
    burst_length=40,
    decoding=2,
    steps_beside=10,
    step_tokens=(96, 64),
    long=300,
    copied=8,
    max_step_tokens=64,
)
