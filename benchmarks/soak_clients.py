"""The clients of a soaked engine and their requests, drawn from a seed so that prefixes are shared and collide.

Conversations form trees, so that requests share prefixes that end anywhere:

    system prompt ─┬─ user ─ answer ─┬─ user ─ answer       the whole history, and more
                   │                 └─ user ─ answer       the same again, or from a point within
                   └─ user ─ answer
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

from cache.eviction import STRATEGIES
from engine.host_tier.swap import MODES
from engine.scheduling.queue_policy import POLICIES
from engine.values.beam_search import BeamParams, EarlyStopping
from engine.values.sampling_params import SamplingParams
from tests.engine.support.draft_sources import ScriptedDrafts
from tests.engine.support.hash_model import VOCABULARY, alone

_REMEMBERED = 40
TOKEN_SECONDS = 1e-3
"""Seconds of a step per token, when steps are limited by time."""
Options = dict[str, Any]
"""Options of a request: arguments of `Script.arrive`."""


def draw_engine(rng: random.Random) -> dict[str, Any]:
    """Draw arguments of a `Script`, with memory for hardly one request up to more than all of them need."""
    page_size = rng.choice([1, 2, 3, 4, 8, 16])
    num_pages = max(2, rng.choice([24, 60, 120, 250, 600]) // page_size)
    max_running = rng.choice([1, 2, 4, 8, 16])
    overlap = rng.random() < 0.5
    return {
        "num_pages": num_pages,
        "page_size": page_size,
        "limits": {
            "max_running": max_running,
            "max_step_tokens": max_running + rng.choice([0, 3, 16, 64, 500]),
            "max_waiting": rng.choice([3, 12, 40]),
            "max_waiting_tokens": rng.choice([200, 10**6]),
            "policy": rng.choice(sorted(POLICIES)),
            "priority_half_life_s": rng.choice([3.0, 30.0, 1e6]),
            "fair_quantum_tokens": rng.choice([1, 20, 256]),
            # A clock that another thread reads does not return the same times in a repeated run.
            "max_step_ms": None if overlap else rng.choice([None, 4e3 * TOKEN_SECONDS, 4e4 * TOKEN_SECONDS]),
            "max_step_stretch": None if overlap else rng.choice([None, 0.75, 5.0]),
        },
        "prefix_cache": rng.random() < 0.85,
        "eviction": rng.choice(sorted(STRATEGIES)),
        "overlap": overlap,
        "host_pages": int(num_pages * rng.choice([0, 0.3, 2])),
        "preemption": rng.choice(sorted(MODES)),
        "host_min_uses": rng.choice([1, 2]),
        "drafter": rng.choice([None, ScriptedDrafts(right=rng.choice([0.0, 0.5, 0.9, 1.0]))]),
        "max_drafts": rng.randint(1, 8),
        "is_adaptive": rng.random() < 0.3,
    }


@dataclass(frozen=True)
class Weather:
    """Probabilities per step of arrivals, aborts, failures and migrations."""

    arrival: float
    abort: float
    failure: float
    move: float
    """Probability that a stream is cut off and resumes after its last sent token, as after a replica's loss."""

    @classmethod
    def draw(cls, rng: random.Random) -> Weather:
        return cls(
            arrival=rng.choice([0.05, 0.2, 0.4, 0.7]),
            abort=rng.choice([0, 0.02, 0.1]),
            failure=rng.choice([0, 0, 0.03]),
            move=rng.choice([0, 0.05]),
        )


@dataclass
class Clients:
    """Draws prompts and request options."""

    rng: random.Random
    capacity: int
    """Number of tokens that the engine has memory for."""
    histories: list[list[int]] = field(default_factory=list)
    """Recent prompts with their answers."""

    def __post_init__(self) -> None:
        self._alphabet = self.rng.choice([3, VOCABULARY - 1])
        self._systems = [self._text(self.capacity // 3) for _ in range(3)]

    def heard(self, history: list[int]) -> None:
        """Record an ended request's prompt and answer, which later prompts may continue."""
        self.histories.append(history)
        del self.histories[:-_REMEMBERED]

    def draw(self) -> tuple[list[int], list[Options]]:
        """Draw a prompt, and the options of each request that arrives with it at once."""
        rng, prompt = self.rng, self._prompt()
        max_tokens = rng.choice([1, 2, rng.randint(1, 12), rng.randint(1, 60)])
        if rng.random() < 0.97:  # otherwise it may be too long to ever fit
            prompt = prompt[: max(1, self.capacity // rng.choice([1, 3, 6]) - 1)]
            max_tokens = min(max_tokens, self.capacity - len(prompt))
        seed = rng.choice([7, 7, 7, rng.randrange(100)])
        options: Options = {
            "max_tokens": max_tokens,
            "priority": rng.choice([0, 0, 0, -1, 1, 5]),
            "tenant": rng.choice(["", "red", "blue"]),
            "salt": rng.choice(["", "", "", "pepper"]),
        } | self._stops(prompt, seed, max_tokens)
        kind = rng.random()
        if kind < 0.07:
            return prompt, [options | {"seed": seed, "beams": self._beams()}]
        if kind < 0.14:
            options["prompt_logprobs"] = rng.choice([0, 1, 3])
        if rng.random() < 0.07:
            return prompt, [options | {"seed": seed, "output_ids": self._generated(prompt, seed, options)}]
        return prompt, [options | {"seed": seed + number} for number in range(rng.choice([1, 1, 1, 1, 1, 5]))]

    def _prompt(self) -> list[int]:
        rng = self.rng
        base = rng.choice(self.histories) if self.histories and rng.random() < 0.6 else rng.choice(self._systems)
        if rng.random() < 0.3:
            base = base[: rng.randint(0, len(base))]
        more = [] if base and rng.random() < 0.2 else [rng.randint(1, self._alphabet), *self._text(20)]
        return [*base, *more]

    def _text(self, most: int) -> list[int]:
        return [self.rng.randint(1, self._alphabet) for _ in range(self.rng.randint(0, most))]

    def _stops(self, prompt: list[int], seed: int, max_tokens: int) -> Options:
        """Draw options that may end an output early, and those that delay it."""
        rng, stops = self.rng, Options()
        if rng.random() < 0.15:
            stops["eos_after"] = rng.randint(0, max_tokens)
        if rng.random() < 0.15:
            coming = alone(prompt, seed, SamplingParams(max_tokens=max_tokens))[0]
            stops["stop_token_ids"] = (rng.choice(coming),)
        if rng.random() < 0.15:
            stops["min_tokens"] = rng.randint(0, max_tokens)
        if rng.random() < 0.1:
            stops["ignore_eos"] = True
        return stops

    def _beams(self) -> BeamParams:
        rng = self.rng
        width = rng.randint(1, 6)
        early: EarlyStopping = rng.choice([False, True, "never"])
        return BeamParams(width, rng.randint(1, width), rng.choice([-0.5, 0.0, 1.0, 2.0]), early)

    def _generated(self, prompt: list[int], seed: int, options: Options) -> list[int]:
        """Return the output that another engine sent: some of it, or all but the finish reason."""
        names = {"max_tokens", "min_tokens", "stop_token_ids", "ignore_eos"}
        params = SamplingParams(**{key: value for key, value in options.items() if key in names})
        tokens, _ = alone(prompt, seed, params, options.get("eos_after"))
        return tokens[: self.rng.randint(1, len(tokens))]
