"""Text from elsewhere, made safe for a terminal."""

from __future__ import annotations

import re

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def printable(text: str) -> str:
    """Text without control characters: what a model or a server writes must not drive the terminal."""
    return _CONTROL.sub("", text)
