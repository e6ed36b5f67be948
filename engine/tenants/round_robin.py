"""Deficit round robin: chooses which name has its turn when several share computed tokens.

    a   credit  -500 ──┐   a turn: credit += quantum * weight; lasts while credit > 0
    b   credit  1100   │   tokens beyond the credit are paid by later turns
    c   credit  -27k ◀─┘

M. Shreedhar, G. Varghese, "Efficient Fair Queueing using Deficit Round Robin", 1995; with debts instead of saved
credit, because the cost of work may be known only after it was let through (`charge` corrects it).

- While two names take part, their charges, each divided by its weight, differ by at most one quantum and the
largest single charge.
- A name that does not take part saves nothing: it returns with no credit. Its debt shrinks by the turns that it
  skipped, and is gone when no name takes part any more.
- A name that returns without debt and has taken no turn for a round goes first (as in FQ-CoDel, RFC 8290): one
that
  asks for less than its share hardly waits.
- A turn leads to a charge or pays a quantum of debt: n charges of t tokens take at most n + t / quantum turns.

It needs no clock. The ingress (`admission/fair_queue.py`) and an engine's steps let tenants take turns by it.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Collection, Container, Mapping
from dataclasses import dataclass


@dataclass(eq=False, slots=True)
class _Account:
    """The credit of one name."""

    grant: float
    """Tokens of credit per turn."""
    credit: float = 0.0
    has_turn: bool = False
    last_turn: float = -math.inf
    """The round in which its last turn began."""
    left_at: float = 0.0
    """The round in which it last left."""


class DeficitRoundRobin:
    """Gives turns to names, in tokens. Not thread-safe."""

    def __init__(self, quantum: int, weights: Mapping[str, float] | None = None) -> None:
        """`quantum`: tokens per turn of the name with the least weight. Other names weigh 1."""
        self._accounts: dict[str, _Account] = {}
        self.weigh(quantum, weights)
        self._active: OrderedDict[str, _Account] = OrderedDict()  # the first has its turn or is next
        self._round = 0.0
        self.num_turns = 0
        """Turns given since the start."""

    def weigh(self, quantum: int, weights: Mapping[str, float] | None = None) -> None:
        """Give turns by these numbers from now on. Credits and debts stay."""
        self._weights = dict(weights or {})
        self._grant = quantum / min([*self._weights.values(), 1.0])
        for name, account in self._accounts.items():
            account.grant = self._grant * self.weight(name)

    def join(self, name: str) -> None:
        """Let a name take part from now on, first in line if it owes nothing and took no turn for a round."""
        account = self._accounts.get(name)
        if account is None:
            account = self._accounts[name] = _Account(self._grant * self.weight(name))
        missed = self._round - account.left_at
        account.credit = min(account.credit + missed * account.grant, 0.0)
        self._active[name] = account
        if account.credit == 0 and self._round - account.last_turn >= 1:
            self._active.move_to_end(name, last=False)

    def leave(self, name: str) -> None:
        """Stop giving a name turns. Its credit is lost, its debt stays."""
        account = self._active.pop(name)
        account.has_turn = False
        account.credit = min(account.credit, 0.0)
        account.left_at = self._round
        if not self._active:
            self._accounts.clear()  # including debts, which are owed to active names

    def take_part(self, names: Collection[str]) -> None:
        """Let exactly these names take part from now on."""
        for name in names:
            if name not in self._active:
                self.join(name)
        for name in [name for name in self._active if name not in names]:
            self.leave(name)

    def turn(self, among: Container[str] | None = None) -> str | None:
        """Return the name whose turn it is, of all or `among` some; None if there is none."""
        while True:
            name = next((name for name in self._active if among is None or name in among), None)
            if name is None:
                return None
            account = self._active[name]
            if not account.has_turn:
                account.has_turn, account.last_turn = True, self._round
                account.credit += account.grant
                self.num_turns += 1
                self._round += 1 / len(self._active)
            if account.credit > 0:
                return name
            self._end_turn(name, account)

    def credit(self, name: str) -> float:
        """Return the tokens that a name may still take in this turn; 0 or less when it has none."""
        return self._active[name].credit

    def charge(self, name: str, tokens: float) -> None:
        """Charge a name for tokens that it took; a negative number is a refund."""
        account = self._accounts.get(name)
        if account is None:
            return
        account.credit -= tokens
        if name not in self._active:
            account.credit = min(account.credit, 0.0)
        elif account.has_turn and account.credit <= 0:
            self._end_turn(name, account)

    def weight(self, name: str) -> float:
        """Return the weight of a name; its share is proportional to it."""
        return self._weights.get(name, 1.0)

    @property
    def num_known(self) -> int:
        """Number of names that take part, or have an account because they did."""
        return len(self._accounts)

    def _end_turn(self, name: str, account: _Account) -> None:
        account.has_turn = False
        self._active.move_to_end(name)
