"""Writes a table into docs/upgrade.md: what a change of each setting restarts, from the code.

python -m tests.docs.support.upgrade_table
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from deployments.config.args import AppArgs
from deployments.config.live import AT_START, COUNTS, LIVE

PAGE = Path(__file__).resolve().parents[3] / "docs/upgrade.md"
_MARKED = re.compile(r"(<!-- settings: [^>]*-->\n).*?(<!-- end of settings -->)", re.DOTALL)


def main() -> None:
    """Write the page."""
    PAGE.write_text(page(), encoding="utf-8")


def page() -> str:
    """Return the text that docs/upgrade.md should have."""
    text, found = _MARKED.subn(lambda match: match[1] + table() + match[2], PAGE.read_text(encoding="utf-8"))
    if found != 1:
        raise ValueError(f"{PAGE.name} must mark once where the table goes, not {found} times")
    return text


def table() -> str:
    """Return the table. Every section of an application's `args` is in it, with the settings in it that differ."""
    rows = "".join(f"| {effect} | {', '.join(settings)} |\n" for effect, settings in effects().items())
    return f"| A change restarts | Settings |\n| --- | --- |\n{rows}"


def effects() -> dict[str, list[str]]:
    """Return the settings by the effect of a change."""
    return {
        "nothing: requests that come from then on have it": [_but(name, AT_START) for name in LIVE],
        "nothing: Serve starts or stops as many replicas as differ, unless they are scaled": [
            f"`{name}`" for name in COUNTS
        ],
        "all replicas, in turn": [
            *(f"`{name}`" for name in AT_START),
            *(_but(name, (*LIVE, *COUNTS)) for name in AppArgs.model_fields if name not in LIVE),
        ],
    }


def _but(section: str, others: Sequence[str]) -> str:
    """Name a section, and those of `others` that are in it."""
    inside = [path.removeprefix(f"{section}.") for path in others if path.startswith(f"{section}.")]
    return f"`{section}`" + (f" (but not {', '.join(f'`{path}`' for path in inside)})" if inside else "")


if __name__ == "__main__":
    main()
