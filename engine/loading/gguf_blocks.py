"""Reads GGUF's blocks as codes with scales, and widens them to plain numbers, on a CPU or a GPU.

Layouts (ggml's ggml-common.h):

Q4_0 Q5_0 Q8_0    32 numbers    scale * code
Q4_1 Q5_1         32 numbers    scale * code + least
Q2_K Q4_K Q5_K    256 numbers   (scale * its scale) * code - (least * its scale), for each 16 or 32 of them
Q3_K Q6_K         256 numbers   (scale * its scale) * code, for each 16 of them
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from engine.gguf.types import BlockType
from engine.layers.grouped_linear import Coded, Grouping

_OF_32, _OF_256 = 2, 4
"""Bytes of a scale: float16, and its product with another one's integer."""
GROUPINGS: Mapping[str, Grouping] = {
    "Q4_0": Grouping(4, 32, _OF_32, False),
    "Q4_1": Grouping(4, 32, _OF_32, True),
    "Q5_0": Grouping(8, 32, _OF_32, False),
    "Q5_1": Grouping(8, 32, _OF_32, True),
    "Q8_0": Grouping(8, 32, _OF_32, False),
    "Q2_K": Grouping(4, 16, _OF_256, True),
    "Q3_K": Grouping(4, 16, _OF_256, False),
    "Q4_K": Grouping(4, 32, _OF_256, True),
    "Q5_K": Grouping(8, 32, _OF_256, True),
    "Q6_K": Grouping(8, 16, _OF_256, False),
}
"""Exact groupings for each type in memory: codes of up to four bits take four, others eight."""
_AT_ONCE = 2**20
"""Numbers that are widened together, so that intermediate results stay in a CPU's cache."""
_ON_GPU = 2**26
"""The same on a GPU, where each step takes some microseconds."""


def widened(raw: torch.Tensor, kind: BlockType, dtype: torch.dtype) -> torch.Tensor:
    """Return numbers [..., C] of a type from uint8 [..., bytes of a row]. They are computed in float32."""
    shape = (*raw.shape[:-1], raw.shape[-1] // kind.block_bytes * kind.block)
    blocks = raw.reshape(-1, kind.block_bytes)
    numbers = torch.empty(len(blocks), kind.block, dtype=dtype, device=raw.device)
    codes, step = _CODES[kind.name], (_ON_GPU if raw.is_cuda else _AT_ONCE) // kind.block
    for first in range(0, len(blocks), step):
        part = blocks[first : first + step]
        numbers[first : first + step] = codes(part).widened().view(len(part), kind.block)
    return numbers.view(shape)


def coded(raw: torch.Tensor, kind: BlockType) -> Coded:
    """Return numbers [outputs, inputs] of a type as codes, grouped as `GROUPINGS` says, from uint8 [outputs, bytes
    of a row].
    """
    codes, scales, leasts = _CODES[kind.name](raw.reshape(-1, kind.block_bytes))
    return Coded(codes.flatten(0, 1), scales.flatten(), None if leasts is None else leasts.flatten())


def _halves(raw: torch.Tensor) -> torch.Tensor:
    """Return float32 [..., n] of float16, uint8 [..., 2 n]."""
    return raw.contiguous().view(torch.float16).float()


def _bits(raw: torch.Tensor, width: int) -> torch.Tensor:
    """Return uint8 [..., 8 / width, n]: of all n bytes the lowest `width` bits, then the next, and so on."""
    raw = raw.contiguous()  # a CPU's vector loads need adjacent bytes
    bits = raw.new_empty(*raw.shape[:-1], 8 // width, raw.shape[-1])
    for place in range(8 // width):
        bits[..., place, :] = (raw >> place * width) & (2**width - 1)
    return bits


def _nibbles(raw: torch.Tensor) -> torch.Tensor:
    """Return uint8 [..., 2 n]: the low four bits of all n bytes, then the high ones."""
    return _bits(raw, 4).flatten(-2)


def _fifth_bits(raw: torch.Tensor) -> torch.Tensor:
    """Return uint8 [..., 8 n]: the bits of n bytes, the lowest first, each as the fifth bit."""
    bits = _bits(torch.arange(256, dtype=torch.uint8, device=raw.device)[:, None], 1) << 4
    return bits.flatten(1).view(torch.int64)[:, 0][raw.int()].view(torch.uint8)


def _q4_0(blocks: torch.Tensor) -> Coded:
    return Coded(_signed(_nibbles(blocks[:, 2:]), 8), _halves(blocks[:, :2]), None)


def _q4_1(blocks: torch.Tensor) -> Coded:
    return Coded(_nibbles(blocks[:, 4:])[:, None], _halves(blocks[:, :2]), _halves(blocks[:, 2:4]))


def _q5_0(blocks: torch.Tensor) -> Coded:
    codes = _nibbles(blocks[:, 6:]).bitwise_or_(_fifth_bits(blocks[:, 2:6]))
    return Coded(_signed(codes, 16), _halves(blocks[:, :2]), None)


def _q5_1(blocks: torch.Tensor) -> Coded:
    codes = _nibbles(blocks[:, 8:]).bitwise_or_(_fifth_bits(blocks[:, 4:8]))
    return Coded(codes[:, None], _halves(blocks[:, :2]), _halves(blocks[:, 2:4]))


def _q8_0(blocks: torch.Tensor) -> Coded:
    return Coded(blocks[:, 2:].contiguous().view(torch.int8)[:, None], _halves(blocks[:, :2]), None)


def _q2_k(blocks: torch.Tensor) -> Coded:
    scales, codes = blocks[:, :16], _bits(blocks[:, 16:80].unflatten(1, (2, 32)), 2).view(-1, 16, 16)
    own, own_least = _halves(blocks[:, 80:82]) * (scales & 15), _halves(blocks[:, 82:84]) * (scales >> 4)
    return Coded(codes, own, own_least.neg_())


def _q3_k(blocks: torch.Tensor) -> Coded:
    codes = _bits(blocks[:, 32:96].unflatten(1, (2, 32)), 2).view(-1, 16, 16)
    codes.bitwise_or_(_bits(blocks[:, :32], 1).view(-1, 16, 16) << 2)
    packed = blocks[:, 96:108]
    scales = _nibbles(packed[:, :8]) | _bits(packed[:, 8:], 2).flatten(1) << 4
    own = _halves(blocks[:, 108:110]) * (scales.float() - 32)
    return Coded(codes.view(torch.int8).sub_(4), own, None)


def _affine_k(blocks: torch.Tensor, codes: torch.Tensor) -> Coded:
    """Return the numbers of codes [N, 8, 32] of Q4_K or Q5_K, whose scales have six bits each."""
    first, second, third = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = torch.cat((first & 63, (third & 15) | (first >> 6) << 4), 1)
    least = torch.cat((second & 63, (third >> 4) | (second >> 6) << 4), 1)
    return Coded(codes, _halves(blocks[:, :2]) * scales, (_halves(blocks[:, 2:4]) * least).neg_())


def _q4_k(blocks: torch.Tensor) -> Coded:
    return _affine_k(blocks, _nibbles(blocks[:, 16:].unflatten(1, (4, 32))).view(-1, 8, 32))


def _q5_k(blocks: torch.Tensor) -> Coded:
    codes = _nibbles(blocks[:, 48:].unflatten(1, (4, 32))).view(-1, 8, 32)
    return _affine_k(blocks, codes.bitwise_or_(_bits(blocks[:, 16:48], 1) << 4))


def _q6_k(blocks: torch.Tensor) -> Coded:
    codes = _bits(blocks[:, :128].unflatten(1, (2, 64)), 4).view(-1, 16, 16)
    codes.bitwise_or_(_bits(blocks[:, 128:192].unflatten(1, (2, 32)), 2).view(-1, 16, 16) << 4)
    scales = blocks[:, 192:208].contiguous().view(torch.int8).float() * _halves(blocks[:, 208:210])
    return Coded(codes.view(torch.int8).sub_(32), scales, None)


def _signed(codes: torch.Tensor, middle: int) -> torch.Tensor:
    """Return int8 [N, 1, n] of uint8 [N, n], minus the code of zero."""
    return codes.view(torch.int8).sub_(middle)[:, None]


_CODES: Mapping[str, Callable[[torch.Tensor], Coded]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
}
