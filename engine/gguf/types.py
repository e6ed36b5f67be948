"""The formats of numbers in GGUF: plain, or in blocks that share scales."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BlockType:
    """One format of numbers."""

    name: str
    block: int
    """Numbers of a block, which are adjacent in a row; 1: plain numbers."""
    block_bytes: int

    @property
    def is_plain(self) -> bool:
        """Whether numbers are stored without shared scales."""
        return self.block == 1


TYPES: Mapping[int, BlockType] = {
    0: BlockType("F32", 1, 4),
    1: BlockType("F16", 1, 2),
    30: BlockType("BF16", 1, 2),
    2: BlockType("Q4_0", 32, 18),
    3: BlockType("Q4_1", 32, 20),
    6: BlockType("Q5_0", 32, 22),
    7: BlockType("Q5_1", 32, 24),
    8: BlockType("Q8_0", 32, 34),
    10: BlockType("Q2_K", 256, 84),
    11: BlockType("Q3_K", 256, 110),
    12: BlockType("Q4_K", 256, 144),
    13: BlockType("Q5_K", 256, 176),
    14: BlockType("Q6_K", 256, 210),
}
"""The supported types, by their numbers in files."""
SUPPORTED = ", ".join(each.name for each in TYPES.values())
UNSUPPORTED: Mapping[int, str] = {
    4: "Q4_2 (removed from GGUF)",
    5: "Q4_3 (removed from GGUF)",
    9: "Q8_1",
    15: "Q8_K",
    16: "IQ2_XXS",
    17: "IQ2_XS",
    18: "IQ3_XXS",
    19: "IQ1_S",
    20: "IQ4_NL",
    21: "IQ3_S",
    22: "IQ2_S",
    23: "IQ4_XS",
    24: "I8",
    25: "I16",
    26: "I32",
    27: "I64",
    28: "F64",
    29: "IQ1_M",
    31: "Q4_0_4_4 (removed from GGUF)",
    32: "Q4_0_4_8 (removed from GGUF)",
    33: "Q4_0_8_8 (removed from GGUF)",
    34: "TQ1_0",
    35: "TQ2_0",
    36: "IQ4_NL_4_4 (removed from GGUF)",
    37: "IQ4_NL_4_8 (removed from GGUF)",
    38: "IQ4_NL_8_8 (removed from GGUF)",
    39: "MXFP4",
    40: "NVFP4",
    41: "Q1_0",
}
"""The names of other types."""
