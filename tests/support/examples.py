"""How many examples tests of properties try: as many as each run has time for, or a multiple of them."""

from __future__ import annotations

import os


def examples(count: int) -> int:
    """Return so many, times RAYDIX_TEST_EXAMPLES, by which a search takes as long as it may."""
    return count * int(os.environ.get("RAYDIX_TEST_EXAMPLES", "1"))
