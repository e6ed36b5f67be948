"""Inlines recording rules into expressions, because Grafana's Prometheus may not have loaded them."""

from __future__ import annotations

import re
from collections.abc import Mapping

STEP, LONG_STEP = "1m", "5m"
"""Prometheus's default recording interval; and a longer one for days, which would have too many points."""

# Only names of recording rules contain a colon.
_RECORDED = re.compile(
    r"(?P<name>\b[a-zA-Z_]\w*:[\w:]+)(?P<matchers>\{[^}]*\})?(?P<range>\[[^\]]*\])?(?P<offset>\s+offset\b)?"
)
_SELECTOR = re.compile(r"\b(?P<name>raydix_\w+)(?P<matchers>\{[^}]*\})?")


def written_out(expr: str, recorded: Mapping[str, str]) -> str:
    """Return `expr` with every recorded name replaced by its expression, recursively.

    A condition on a recorded series moves to all series that it is computed from, so it must be on a label that
    they keep. A range of a recorded series becomes a subquery. Raises ValueError for a name that is not
    recorded, and for an offset without a range, which PromQL cannot express.
    """

    def replacement(found: re.Match[str]) -> str:
        name, matchers, window, offset = found.group("name", "matchers", "range", "offset")
        if name not in recorded:
            raise ValueError(f"{name} is not a recording rule of the same file")
        if offset and not window:
            raise ValueError(f"{name} offset …: give it a range, or record it with its offset")
        inner = written_out(recorded[name], recorded)
        if matchers and matchers != "{}":
            inner = _SELECTOR.sub(lambda each: _narrowed(each, matchers[1:-1]), inner)
        step = LONG_STEP if window and window[-2] in "dwy" else STEP
        return f"({inner})" + (f"[{window[1:-1]}:{step}]{offset or ''}" if window else "")

    return _RECORDED.sub(replacement, expr)


def _narrowed(selector: re.Match[str], conditions: str) -> str:
    own = (selector["matchers"] or "{}")[1:-1].strip().rstrip(",")
    return f"{selector['name']}{{{own + ', ' if own else ''}{conditions}}}"
