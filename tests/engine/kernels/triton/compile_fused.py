"""Compiles the fused operations and the sampler for a GPU that is not there, as they are launched for models.

To be used in a process of its own, in which nobody has told Triton to interpret: see test_fused_compiled.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from triton import compile as compile_kernel
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from engine.kernels.triton.norm import add_norm
from engine.kernels.triton.rope import rotate_into, rotation
from engine.kernels.triton.sample import Choices, change, choose
from engine.kernels.triton.silu import silu_mul

HOPPER = 90
_POINTERS = {
    torch.float64: "*fp64",
    torch.float32: "*fp32",
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float8_e4m3fn: "*fp8e4nv",
    torch.int64: "*i64",
    torch.int32: "*i32",
    torch.uint8: "*u8",
    torch.bool: "*i1",
}
_OPTIONS = ("num_warps", "num_stages")


@contextmanager
def compiled(capability: int = HOPPER) -> Iterator[set[str]]:
    """Launches within compile their kernel, as a GPU's would, and do not run it. Gives the kernels' names."""
    names: set[str] = set()

    def compile_launched(kernel: JITFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        options = {name: kwargs.pop(name) for name in _OPTIONS if name in kwargs}
        given = dict(zip(kernel.arg_names, args, strict=False)) | kwargs
        source = ASTSource(kernel, *_specialised(kernel, given))
        assert compile_kernel(source, target=GPUTarget("cuda", capability, 32), options=options).asm["cubin"]
        names.add(kernel.__name__)

    with patch.object(JITFunction, "run", compile_launched):
        yield names


def _specialised(
    kernel: JITFunction, given: dict[str, Any]
) -> tuple[dict[str, str], dict[Any, Any], dict[Any, Any]]:
    """What a launch compiles for: types of arguments, those that are constants, and those known to be aligned."""
    signature, constants, attributes = {}, {}, {}
    for at, parameter in enumerate(kernel.params):
        value = given[parameter.name]
        if parameter.is_constexpr or value is None or (type(value) is int and value == 1):
            signature[parameter.name], constants[at,] = "constexpr", value
            continue
        signature[parameter.name], address = _type(value)
        if address % 16 == 0:
            attributes[at,] = [["tt.divisibility", 16]]
    return signature, constants, attributes


def _type(value: Any) -> tuple[str, int]:
    """An argument's type, and what has to be a multiple of 16 for it to count as aligned."""
    if isinstance(value, torch.Tensor):
        return _POINTERS[value.dtype], value.data_ptr()
    if isinstance(value, float):
        return "fp32", 1
    return ("i32" if -(2**31) <= value < 2**31 else "i64"), value


def operations(dtype: torch.dtype, pages: torch.dtype, hidden: int, heads: int, kv_heads: int, dim: int) -> None:
    x = torch.zeros(3, hidden, dtype=dtype)
    add_norm(x, None, x[0], 1e-6)
    add_norm(x, x.clone(), x[0], 1e-6)
    silu_mul(torch.zeros(3, 4 * hidden, dtype=dtype))
    at = torch.zeros(3, dtype=torch.int64)
    angles = rotation(at, torch.zeros(dim // 2), 1.0, dtype)
    for page_size in (1, 16):
        for norm in (None, torch.zeros(heads + kv_heads, dim, dtype=dtype)):
            fused = torch.zeros(3, heads + 2 * kv_heads, dim, dtype=dtype)
            layer = torch.zeros(2, 2, page_size, kv_heads, dim).to(pages)
            rotate_into(layer, at, fused, angles, norm, 1e-6)


def sampling(vocab_size: int) -> None:
    asked, numbers = torch.zeros(2, dtype=torch.int64), torch.ones(2, dtype=torch.float64)
    choices = Choices(asked, numbers, asked.int(), numbers, numbers, draws=True, cuts=True)
    logits = torch.zeros(2, vocab_size)
    choose(logits, choices, asked)
    change(logits, asked.int(), asked.int(), *torch.zeros(3, 2))


if __name__ == "__main__":
    with compiled() as names:
        operations(torch.bfloat16, torch.bfloat16, 4096, 32, 8, 128)
        operations(torch.float16, torch.float8_e4m3fn, 896, 14, 2, 64)
        operations(torch.float32, torch.float32, 96, 1, 1, 96)
        sampling(151_936)
        sampling(1)
    print(*sorted(names))
