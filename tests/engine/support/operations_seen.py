"""Torch's operations that some code calls: on a GPU each one that computes is a launch."""

from __future__ import annotations

from collections import Counter
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

VIEWS = {"aten.slice.Tensor", "aten.alias.default", "aten.view.default", "aten.select.int"}
"""Operations that compute nothing."""
FOR_THE_HOST = {"aten.bincount.default", "aten.nonzero.default", "aten._local_scalar_dense.default"}
"""Operations whose results the host reads, for which no graph can wait."""


class Operations(TorchDispatchMode):
    """Within it, the names of all operations are noted."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = Counter[str]()

    @property
    def seen(self) -> set[str]:
        """The names of the operations so far."""
        return set(self.counts)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[str(func)] += 1
        return func(*args, **(kwargs or {}))
