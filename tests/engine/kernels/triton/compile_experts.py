"""Compile the experts' kernels for GPUs that are not here: run by itself, without Triton's interpreter.

Prints a line for each: kernel, bytes of shared memory it takes, bytes there are, and whether it has tensor core
products.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from engine.kernels.triton import expert_tiles, grouped_gemm

SHARED_BYTES = {80: 163 << 10, 86: 99 << 10, 90: 227 << 10}
"""By capability, what one program may have: A100, RTX 30 and A10, H100."""
_WEIGHTS = ("x", "weight", "out", "between", "pairs")


def compile_for(capability: int, kernel: Any, constants: Mapping[str, Any], **options: int) -> None:
    """With bfloat16 weights, and sizes that are multiples of 16."""
    types = {"order": "*i32", "tiles": "*i32", "counts": "*i32", "chosen": "*i64", "shares": "*fp32"}
    types.update(dict.fromkeys(_WEIGHTS, "*bf16"))
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in kernel.arg_names}
    divisible = {
        (index,): [["tt.divisibility", 16]] for index, kind in enumerate(signature.values()) if kind != "constexpr"
    }
    source = ASTSource(kernel, signature, constexprs=dict(constants), attrs=divisible)
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    shared = compiled.metadata.shared
    print(kernel.__name__, shared, SHARED_BYTES[capability], "mma" in compiled.asm["ptx"])


def main() -> None:
    """All shapes of the products for the largest GPU, one of few and one of many rows for the others."""
    for capability, shared in SHARED_BYTES.items():
        for _, shape in grouped_gemm._SHAPES if capability == 90 else grouped_gemm._SHAPES[::2]:
            blocks = {
                "ROWS": shape.rows,
                "OUTPUTS": shape.outputs,
                "INPUTS": shape.input_bytes // 2,
                "WIDEN": False,
            }
            options = {"num_warps": shape.num_warps, "num_stages": shape.stages_in(shared - grouped_gemm._BESIDE)}
            contiguous = {"x_column": 1, "w_input": 1, "PER_TOKEN": 8}
            compile_for(capability, grouped_gemm._gate_up, {**blocks, **contiguous}, **options)
            compile_for(capability, grouped_gemm._down, {**blocks, "w_input": 1}, **options)
    compile_for(90, grouped_gemm._combine, {"PER_TOKEN": 8, "COLUMNS": 1024})
    compile_for(90, expert_tiles._count, {"BLOCK": 1024})
    compile_for(90, expert_tiles._place, {"BLOCK": 1024, "TILE": 16, "EXPERTS": 128})


if __name__ == "__main__":
    main()
