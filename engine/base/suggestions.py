"""Suggests the known name that is nearest to an unknown one."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def unknown_setting(names: Iterable[object], known: Iterable[str]) -> str | None:
    """Return a message about the first of `names` that is not among the known settings; None if all are."""
    settings = list(known)
    unknown = min((str(name) for name in names if name not in settings), default=None)
    if unknown is None:
        return None
    nearest = difflib.get_close_matches(unknown[:64], settings, n=1)
    hint = f"did you mean {nearest[0]}?" if nearest else "docs/tuning.md lists all settings"
    return f"unknown setting {unknown!r}; {hint}"
