"""The connections of a rank to those of the neighbouring stages, in a ring: NCCL's on GPUs, gloo's on CPUs.

stage 0 ──▶ stage 1 ──▶ stage 2 ─┐      each arrow is a process group of two ranks, so what is on its way in one
   ▲                             │      does not delay what goes through another
   └─────────────────────────────┘
"""

from __future__ import annotations

from collections import deque
from typing import Any

import torch


class StageLink:
    """One rank's end of an arrow. Tensors arrive in the order in which they were sent."""

    def __init__(self, group: Any) -> None:
        """`group`: a process group of torch; rank 0 sends, rank 1 receives."""
        self._group = group
        self._sent: deque[tuple[Any, torch.Tensor]] = deque()

    def send(self, tensor: torch.Tensor) -> None:
        """Send a tensor, which must not change afterwards. Does not wait until it has been received."""
        while self._sent and self._sent[0][0].is_completed():
            self._sent.popleft()[0].wait()  # raises the error of a transfer that failed
        self._sent.append((self._group.send([tensor], 1, 0), tensor))

    def receive(self, into: torch.Tensor) -> torch.Tensor:
        """Wait for the next tensor, which has the shape and the type of `into`."""
        self._group.recv([into], 0, 0).wait()
        return into

    def abort(self) -> None:
        """End transfers that wait for a lost rank, from any thread."""
        self._group.abort()
