"""A queue of blocks in the order of their arrival, which can be swept a piece at a time."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence

PIECE = 128
"""Most blocks in a piece."""


class BlockQueue:
    """A queue of 64-bit numbers, 8 bytes each.

    head, reversed   pieces
    [ 2 1 0 ]        [ 3 4 5 ] [ 6 7 8 ] [ 9 ]
    └────── not swept ───────┘ └── swept ────┘      a sweep begins with the newest piece
    """

    def __init__(self) -> None:
        self._head = array("Q")
        self._pieces: list[array[int]] = []
        self.num_blocks = 0
        """Number of blocks."""
        self._num_unswept = 0  # leading pieces, including the head, that the current sweep has not looked through

    def extend(self, blocks: Sequence[int]) -> None:
        """Add blocks as the newest."""
        done = 0
        while done < len(blocks):
            if not self._pieces or len(self._pieces[-1]) >= PIECE:
                self._pieces.append(array("Q"))
            part = blocks[done : done + PIECE - len(self._pieces[-1])]
            self._pieces[-1].extend(part)
            done += len(part)
        self.num_blocks += done

    def popleft(self) -> int:
        """Remove and return the oldest block. Raises IndexError when there is none."""
        while not self._head:
            self._head = self._pieces.pop(0)
            self._head.reverse()
            self._num_unswept = max(self._num_unswept - 1, 0)
        self.num_blocks -= 1
        return self._head.pop()

    # Sweeping

    @property
    def is_swept(self) -> bool:
        """Whether the last sweep has looked through all that was in the queue when it began."""
        return not self._num_unswept

    def begin_sweep(self) -> None:
        """Begin to look through all blocks."""
        self._num_unswept = 1 + len(self._pieces)

    def sweep_piece(self, survivors: Callable[[array[int]], array[int]]) -> int:
        """Replace the next piece by those of its blocks that `survivors` returns; return how many it had."""
        self._num_unswept -= 1
        if self._num_unswept:
            at = self._num_unswept - 1
            piece = self._pieces[at]
            left = survivors(piece)
            self._pieces[at : at + 1] = [left] if left else []
        else:
            piece = self._head
            left = self._head = survivors(piece)
        self.num_blocks -= len(piece) - len(left)
        return len(piece)
