"""Deficit round robin: who has its turn, when several share what is computed.

    a   credit  -500 ──┐   a turn: credit += quantum * weight; go on while credit > 0
    b   credit  1100   │   what is taken beyond the credit is a debt of later turns
    c   credit  -27k ◀─┘

M. Shreedhar, G. Varghese, "Efficient Fair Queueing using Deficit Round Robin", 1995; with debts instead of saved
credit, as what something really costs may be known only after it was let go (`charge` corrects it).

- While two take part, what they were charged, each divided by its weight, differs by at most one quantum and what
  was charged at once.
- Who does not take part saves nothing: it comes back with no credit. Its debt shrinks by the turns it did not
  take, and is gone when nobody takes part any more.
- Who comes back without debt, and has taken no turn for a round, goes first (as in FQ-CoDel, RFC 8290): who asks
  for less than its share hardly waits.
- A turn leads to a charge or pays a quantum of debt: n charges of t tokens take at most n + t / quantum turns.

Pure: no clock. Tenants take turns by it at the ingress (`admission/fair_queue.py`) and in an engine's steps.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Collection, Container, Mapping
from dataclasses import dataclass


@dataclass(eq=False, slots=True)
class _Account:
    """What one may take."""

    grant: float
    """Tokens of credit per turn."""
    credit: float = 0.0
    has_turn: bool = False
    last_turn: float = -math.inf
    """The round in which its last turn began."""
    left_at: float = 0.0
    """The round in which it last left."""


class DeficitRoundRobin:
    """Turns among names, in tokens. Belongs to one thread."""

    def __init__(self, quantum: int, weights: Mapping[str, float] | None = None) -> None:
        """`quantum` is what the name of the least weight gets per turn, in tokens; unknown names weigh 1."""
        self._weights = dict(weights or {})
        self._grant = quantum / min([*self._weights.values(), 1.0])
        self._accounts: dict[str, _Account] = {}
        self._active: OrderedDict[str, _Account] = OrderedDict()  # the first has its turn or is next
        self._round = 0.0
        self.num_turns = 0
        """Turns given since the start."""

    def join(self, name: str) -> None:
        """It takes part from now on: before all others when it owes nothing and took no turn for a round."""
        account = self._accounts.get(name)
        if account is None:
            account = self._accounts[name] = _Account(self._grant * self.weight(name))
        missed = self._round - account.left_at
        account.credit = min(account.credit + missed * account.grant, 0.0)
        self._active[name] = account
        if account.credit == 0 and self._round - account.last_turn >= 1:
            self._active.move_to_end(name, last=False)

    def leave(self, name: str) -> None:
        """It takes part no more: what credit it has is gone."""
        account = self._active.pop(name)
        account.has_turn = False
        account.credit = min(account.credit, 0.0)
        account.left_at = self._round
        if not self._active:
            self._accounts.clear()  # debts too: they are owed to those who take part

    def take_part(self, names: Collection[str]) -> None:
        """These take part from now on, and nobody else."""
        for name in names:
            if name not in self._active:
                self.join(name)
        for name in [name for name in self._active if name not in names]:
            self.leave(name)

    def turn(self, among: Container[str] | None = None) -> str | None:
        """Whose turn it is, of all or `among` some (others keep theirs for later); None when nobody takes part."""
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
        """Tokens it may still take in this turn; 0 or less when it has none."""
        return self._active[name].credit

    def charge(self, name: str, tokens: float) -> None:
        """It took so many tokens, or so many more (or less) than it was charged for before."""
        account = self._accounts.get(name)
        if account is None:
            return
        account.credit -= tokens
        if name not in self._active:
            account.credit = min(account.credit, 0.0)
        elif account.has_turn and account.credit <= 0:
            self._end_turn(name, account)

    def weight(self, name: str) -> float:
        """Its share beside that of another one."""
        return self._weights.get(name, 1.0)

    @property
    def num_known(self) -> int:
        """Names that take part, or took part while others did and still do."""
        return len(self._accounts)

    def _end_turn(self, name: str, account: _Account) -> None:
        account.has_turn = False
        self._active.move_to_end(name)
