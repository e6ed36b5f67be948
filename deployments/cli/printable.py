"""Makes untrusted text safe for a terminal."""

from __future__ import annotations

import re

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def printable(text: str) -> str:
    """Remove control characters, so that the text of a model or a server cannot control the terminal."""
    return _CONTROL.sub("", text)
