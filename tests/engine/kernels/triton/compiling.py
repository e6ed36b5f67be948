"""Compiles the attention kernels for GPUs that need not be there, as `fit` has them, and prints what they take.

Run as a program, without TRITON_INTERPRET. One line of JSON for each: kernel, GPU, shared memory it takes.
"""

from __future__ import annotations

import json
from typing import Any
from unittest.mock import patch

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from engine.kernels.triton import decode, extend, fitting, work_list

SHARED_KIB = {75: 64, 80: 163, 90: 227}
"""By compute capability: T4, A100, H100."""
CASES = (
    # capability, type of queries, of KV, head_dim, group, page_size, window
    (90, "bf16", "bf16", 128, 4, 16, 0),
    (90, "bf16", "fp8e4nv", 128, 8, 64, 0),
    (90, "bf16", "bf16", 256, 2, 1, 0),
    (80, "bf16", "bf16", 96, 7, 3, 100),
    (75, "fp16", "fp16", 128, 4, 16, 0),
)
_STRIDES = "query_stride", "query_head_stride", "page_stride", "token_stride", "head_stride", "table_stride"
_INTS = "block_table", "kv_lens", "items", "sizes", "row_items", "qo_indptr", "tiles"
_QUERY_BYTES = 2


def compile_for(
    capability: int, kernel: Any, types: dict[str, str], constants: dict[str, Any], **options: int
) -> int:
    """Bytes of shared memory. What is not in `types` is a constant; pointers and strides are multiples of 16."""
    names = kernel.arg_names
    attributes = {
        (index,): [["tt.divisibility", 16]]
        for index, name in enumerate(names)
        if types.get(name, "").startswith("*") or name.endswith("stride")
    }
    signature = {name: types.get(name, "constexpr") for name in names}
    values = {(index,): constants[name] for index, name in enumerate(names) if name in constants}
    source = ASTSource(kernel, signature, values, attributes)
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    return int(compiled.metadata.shared)


def compile_case(capability: int, query: str, kv: str, dim: int, group: int, page_size: int, window: int) -> None:
    """A decode and an extend."""
    limit, device = SHARED_KIB[capability] * 1024, torch.device("cpu")
    types = {
        **dict.fromkeys(_INTS, "*i32"),
        **dict.fromkeys(_STRIDES, "i32"),
        "keys": f"*{kv}",
        "values": f"*{kv}",
    }
    types |= {"query": f"*{query}", "out": f"*{query}", "part_values": "*fp32", "part_lse": "*fp32"}
    types |= {"scale": "fp32", "value_scale": "fp32"}
    heads = {"GROUP": group, "PAGE_SIZE": page_size, "HEAD_DIM": dim, "BLOCK_D": fitting.block_of(dim)}
    with patch.object(fitting, "shared_memory", lambda device: limit):
        small = decode.decode_fit(group, dim, _QUERY_BYTES, device)
        large = extend.extend_fit(group, dim, _QUERY_BYTES, 4096, device)
    assert small is not None and large is not None
    for kernel, program in ((decode._attend, small), (extend._extend, large)):
        constants = {**heads, "BLOCK_M": program.rows, "WINDOW": window, "INTERPRETED": False}
        constants |= {"NUM_KV_HEADS": 2, "NUM_HEADS": 2 * group}
        warps = 4 if kernel is decode._attend else extend.num_warps(program, dim)
        own = {name: type_ for name, type_ in types.items() if name in kernel.arg_names}
        shared = compile_for(capability, kernel, own, constants, num_warps=warps, num_stages=program.num_stages)
        report = {"kernel": kernel.__name__, "capability": capability, "rows": program.rows}
        print(json.dumps({**report, "stages": program.num_stages, "shared": shared, "limit": limit}), flush=True)


def main() -> None:
    """All cases, and what is not attention itself once."""
    numbers = dict.fromkeys(("num_rows", "capacity", "num_programs", "num_kv_heads"), "i32")
    lists = dict.fromkeys(("kv_lens", "items", "row_items", "sizes"), "*i32")
    compile_for(90, work_list._build, lists | numbers, {"WINDOW": 100, "ALL_ROWS": 256})
    types = {
        "part_values": "*fp32",
        "part_lse": "*fp32",
        "row_items": "*i32",
        "out": "*bf16",
        "value_scale": "fp32",
    }
    heads = {"NUM_KV_HEADS": 8, "GROUP": 7, "BLOCK_G": 8, "HEAD_DIM": 96, "BLOCK_D": 128}
    compile_for(90, decode._merge, types, heads, num_warps=2)
    for case in CASES:
        compile_case(*case)


if __name__ == "__main__":
    main()
