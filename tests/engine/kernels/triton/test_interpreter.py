"""The interpreter of these tests refuses shapes as Triton's own does."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton")
import triton
import triton.language as tl
from triton.runtime.interpreter import InterpreterError

if torch.cuda.is_available():
    pytest.skip("there is no interpreter where there is a GPU", allow_module_level=True)


@triton.jit
def _add(out: Any, LEFT: tl.constexpr, RIGHT: tl.constexpr) -> None:
    found = tl.arange(0, LEFT)[:, None] + tl.arange(0, RIGHT).reshape(2, RIGHT // 2)
    tl.store(out + found, found)


@pytest.mark.parametrize(("left", "right", "why"), [(2, 6, "power of 2"), (4, 8, "incompatible dimensions")])
def test_wrong_shapes_are_errors(left: int, right: int, why: str) -> None:
    out = torch.zeros(16, dtype=torch.int32)
    _add[1,](out, 2, 8)
    assert out.tolist() == [0, 1, 2, 3, 0, 5, 6, 7, 8, *[0] * 7]
    with pytest.raises(InterpreterError, match=why):
        _add[1,](out, left, right)
