"""Which part of a model is one rank's (Shoeybi et al. 2019, arXiv:1909.08053).

    heads      [ rank 0 | rank 1 | rank 2 | rank 3 ]     columns of qkv, rows of the output projection
    KV heads   [ rank 0 and 1    | rank 2 and 3    ]     shared where there are fewer of them than ranks
    inner      [ rank 0 | rank 1 | rank 2 | rank 3 ]     columns of gate and up, rows of down
    vocabulary [ rank 0 | rank 1 | rank 2 | ra ]   ]     rows of the tables; the last rank's are filled up

A rank's part of a layer is a layer of the same kind: it has fewer heads and is narrower inside, and its outputs
are summed up with those of the others. So a `ModelConfig` describes it too.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from engine.models.config import ModelConfig


@dataclass(frozen=True, slots=True)
class Shard:
    """One of `size` equal parts."""

    rank: int = 0
    size: int = 1

    def part(self, count: int) -> slice:
        """This rank's of `count` things, which `size` divides."""
        own = count // self.size
        return slice(self.rank * own, (self.rank + 1) * own)

    def kv_part(self, num_kv_heads: int) -> slice:
        """This rank's key-value heads: those that its query heads attend to."""
        if num_kv_heads >= self.size:
            return self.part(num_kv_heads)
        head = self.rank * num_kv_heads // self.size
        return slice(head, head + 1)

    def num_rows(self, vocab_size: int) -> int:
        """Rows of a vocabulary's table on each rank."""
        return -(-vocab_size // self.size)

    def rows(self, vocab_size: int) -> slice:
        """The tokens whose rows they are; the last rank may have fewer than `num_rows`."""
        own = self.num_rows(vocab_size)
        return slice(min(self.rank * own, vocab_size), min((self.rank + 1) * own, vocab_size))

    def of(self, config: ModelConfig) -> ModelConfig:
        """The shape of this rank's layers. What ranks share or divide by themselves, the vocabulary, stays."""
        kv = self.kv_part(config.num_kv_heads)
        return replace(
            config,
            num_heads=config.num_heads // self.size,
            num_kv_heads=kv.stop - kv.start,
            intermediate_size=config.intermediate_size // self.size,
        )


def possible_sizes(config: ModelConfig) -> list[int]:
    """How many ranks can share a model evenly."""
    return [size for size in range(1, config.num_heads + 1) if _divides(config, size)]


def check_divides(config: ModelConfig, size: int) -> None:
    """Raise ValueError, with the sizes that are possible, where `size` ranks cannot share a model evenly."""
    if not _divides(config, size):
        raise ValueError(
            f"tensor_parallel_size is {size}, which cannot share {config.num_heads} query heads, "
            f"{config.num_kv_heads} key-value heads and {config.intermediate_size} inner columns evenly; "
            f"with this model it can be {', '.join(map(str, possible_sizes(config)))}"
        )


def _divides(config: ModelConfig, size: int) -> bool:
    kv = config.num_kv_heads
    even = config.num_heads % size == 0 and config.intermediate_size % size == 0
    return even and (kv % size == 0 or size % kv == 0)
