"""What a result says of the machine that it was measured on."""

from __future__ import annotations

import os
import platform
from typing import Any


def described() -> dict[str, Any]:
    """Return the number of processors, the platform and Python's version."""
    return {
        "cpus": os.cpu_count(),
        "platform": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
    }
