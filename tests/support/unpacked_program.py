"""Programs of Debian whose packages were only unpacked."""

from __future__ import annotations

import os
from pathlib import Path


def libraries_of(program: str) -> dict[str, str]:
    """Return the environment in which a program finds its libraries, which lie next to it where Debian's package
    was only unpacked.
    """
    libraries = ":".join(map(str, Path(program).parents[1].glob("lib/*-linux-gnu")))
    return {"LD_LIBRARY_PATH": ":".join(filter(None, (os.environ.get("LD_LIBRARY_PATH"), libraries)))}
