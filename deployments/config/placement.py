"""Where the stages of an engine run. The ranks of one stage are always on one machine.

pack      all stages on one machine
stages    as many stages on each machine as there is room for
spread    each stage on a machine of its own
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

Placement = Literal["pack", "stages", "spread"]
IN_WORDS = {
    "pack": "all on one machine",
    "stages": "each on one machine",
    "spread": "each on a machine of its own",
}


def num_engines(room: Sequence[int], num_stages: int, placement: Placement) -> int:
    """Return the number of engines that fit. `room`: how many stages have room on each machine."""
    if placement == "pack":
        return sum(each // num_stages for each in room)
    count = sum(room) // num_stages
    if placement == "spread":
        while sum(min(each, count) for each in room) < count * num_stages:
            count -= 1
    return count


def strategy(num_stages: int, placement: Placement) -> str:
    """Return the strategy of Ray's placement group whose bundles are the stages."""
    if num_stages == 1 or placement == "pack":
        return "STRICT_PACK"
    return "PACK" if placement == "stages" else "STRICT_SPREAD"
