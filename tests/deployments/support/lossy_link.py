"""Links that lose, change, repeat or note messages on their way between ingresses and replicas."""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from deployments.wire import messages
from deployments.wire.handshake import Context
from deployments.wire.link import DealerLink, Link
from router.addresses import ReplicaAddress

Rule = Callable[[Any], Iterable[Any]]
"""Returns the messages that arrive instead of one: none, the same one, another one, or several."""


def lose(message: Any) -> Iterable[Any]:
    """Lose every message."""
    return ()


class Noted:
    """Notes the messages for which `where` holds, and loses the first `num_lost` of them."""

    def __init__(self, where: Callable[[Any], bool], num_lost: float = 0) -> None:
        self._where, self._num_lost = where, num_lost
        self.messages: list[Any] = []

    def __call__(self, message: Any) -> Iterable[Any]:
        if not self._where(message):
            return (message,)
        self.messages.append(message)
        return (message,) if len(self.messages) > self._num_lost else ()


class Lost(Noted):
    """Notes and loses all messages for which `where` holds."""

    def __init__(self, where: Callable[[Any], bool]) -> None:
        super().__init__(where, math.inf)


@dataclass(slots=True)
class Path:
    """The rules for messages between all ingresses and one replica; None: they arrive as they are."""

    to_replica: Rule | None = None
    to_ingress: Rule | None = None


class LossyLink:
    """A real link to a replica, to whose messages the rules of a path apply."""

    def __init__(self, link: Link, path: Path) -> None:
        self._link, self._path = link, path
        self._arrived: deque[bytes] = deque()

    @property
    def is_closed(self) -> bool:
        return self._link.is_closed

    def send(self, data: bytes) -> bool:
        if (rule := self._path.to_replica) is None:
            return self._link.send(data)
        return all(self._link.send(each) for each in _changed(rule, messages.decode_to_replica(data), data))

    def receive(self) -> bytes | None:
        while not self._arrived and (data := self._link.receive()) is not None:
            if (rule := self._path.to_ingress) is None:
                return data
            self._arrived.extend(_changed(rule, messages.decode_to_ingress(data), data))
        return self._arrived.popleft() if self._arrived else None

    def reconnect(self) -> None:
        self._arrived.clear()
        self._link.reconnect()

    def close(self) -> None:
        self._arrived.clear()
        self._link.close()


class LossyLinks:
    """Opens links to replicas, and has the rules for each: `links["r0"].to_ingress = lose`."""

    def __init__(self) -> None:
        self._paths: defaultdict[str, Path] = defaultdict(Path)

    def __getitem__(self, replica: str) -> Path:
        return self._paths[replica]

    def open(self, context: Context, address: ReplicaAddress, on_readable: Callable[[], None]) -> LossyLink:
        """Open a link, as `RemoteEngines` wants it."""
        return LossyLink(DealerLink(context, address, on_readable), self[address.replica])


def _changed(rule: Rule, message: Any, data: bytes) -> list[bytes]:
    return [data if each is message else messages.encode(each) for each in rule(message)]
