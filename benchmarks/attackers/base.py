"""What all attackers have in common: rounds drawn from a seed, and counts of what came of them."""

from __future__ import annotations

import itertools
import random
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from typing import ClassVar

from benchmarks.siege_app import Target

Kind = Callable[[], Awaitable[None]]
"""Attacks once; at the end, nothing of it is open on the attacker's side."""


class Attacker(ABC):
    """One kind of attacker, with several kinds of attacks, each in turn. Others attack at the same time."""

    name: ClassVar[str]

    def __init__(self, target: Target, seed: int) -> None:
        self.target = target
        self.draw = random.Random(f"{seed} {self.name}")
        self.num_rounds = 0
        self.counts: Counter[str] = Counter()
        """What was tried, and how it was answered."""
        self.wrong: list[str] = []
        """Answers that break a promise."""
        self.doing = ""
        """The kind of attack that is under way."""
        kinds = list(self.kinds().items())
        self._coming = itertools.cycle(self.draw.sample(kinds, len(kinds)))
        self.num_kinds = len(kinds)

    @abstractmethod
    def kinds(self) -> Mapping[str, Kind]:
        """Return its kinds of attacks by name."""

    async def attack(self, is_over: Callable[[Attacker], bool]) -> None:
        """Attack until `is_over`."""
        while not is_over(self):
            self.doing, attack = next(self._coming)
            await attack()
            self.counts[self.doing] += 1
            self.num_rounds += 1
        self.doing = ""
