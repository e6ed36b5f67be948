"""Torch's operations that some code calls: on a GPU each one that computes is a launch."""

from __future__ import annotations

from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

VIEWS = {"aten.slice.Tensor", "aten.alias.default", "aten.view.default", "aten.select.int"}
"""Operations that compute nothing."""


class Operations(TorchDispatchMode):
    """Within it, the names of all operations are noted."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.add(str(func))
        return func(*args, **(kwargs or {}))
