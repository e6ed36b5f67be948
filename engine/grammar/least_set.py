"""Computes least sets that are defined by rules, such as the rules of a grammar that can end."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterable


def least_set(names: Iterable[str], holds: Callable[[str, Callable[[str], bool]], bool]) -> set[str]:
    """Return the least set of names for which `holds` is true.

    `holds` gets a name and a test whether another is in the set, and must never become false as the set grows. A
    name is tested again when a name that it asked for enters the set.
    """
    found: set[str] = set()
    waiting: defaultdict[str, set[str]] = defaultdict(set)
    todo = deque(names)
    while todo:
        name = todo.popleft()

        def is_in(other: str, name: str = name) -> bool:
            if other not in found:
                waiting[other].add(name)
            return other in found

        if name not in found and holds(name, is_in):
            found.add(name)
            todo.extend(waiting.pop(name, ()))
    return found
