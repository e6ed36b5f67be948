"""What all attackers have in common: rounds drawn from a seed, and counts of what came of them."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable
from typing import ClassVar

from benchmarks.siege_app import Target


class Attacker(ABC):
    """One kind of attacker. Its rounds follow each other; other kinds attack at the same time."""

    name: ClassVar[str]

    def __init__(self, target: Target, seed: int) -> None:
        self.target = target
        self.draw = random.Random(f"{seed} {self.name}")
        self.num_rounds = 0
        self.counts: Counter[str] = Counter()
        """What was tried, and how it was answered."""
        self.wrong: list[str] = []
        """Answers that break a promise."""

    @abstractmethod
    async def round(self) -> None:
        """Attack once; at the end, nothing of it is open on the attacker's side."""

    async def attack(self, is_over: Callable[[Attacker], bool]) -> None:
        """Attack until `is_over`."""
        while not is_over(self):
            await self.round()
            self.num_rounds += 1
