"""The part of a model that one rank has (Shoeybi et al. 2019, arXiv:1909.08053).

    heads      [ rank 0 | rank 1 | rank 2 | rank 3 ]     columns of qkv, rows of the output projection
    KV heads   [ rank 0 and 1    | rank 2 and 3    ]     shared if there are fewer of them than ranks
    inner      [ rank 0 | rank 1 | rank 2 | rank 3 ]     columns of gate and up, rows of down
    experts    [ rank 0 | rank 1 | rank 2 | rank 3 ]     whole ones, or the inner columns of every one
    vocabulary [ rank 0 | rank 1 | rank 2 | ra ]   ]     rows of the tables; the last rank's are padded

A rank's part of a layer is a layer of the same kind, with fewer heads and narrower inside, whose outputs are
summed with those of the other ranks. A `ModelConfig` therefore describes it too.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from engine.model_config.config import ModelConfig
from engine.model_parts.experts_config import ExpertsConfig
from engine.model_parts.formats import MXFP4_INPUTS
from engine.model_parts.parts import AttentionConfig, DeltaNetConfig, LayerKind, MLPConfig
from engine.settings.config import EngineConfig


@dataclass(frozen=True, slots=True)
class Shard:
    """One of `size` equal parts."""

    rank: int = 0
    size: int = 1
    splits_experts: bool = False
    """Whether each rank has some experts whole; otherwise it has its columns of every expert."""

    @classmethod
    def of_engine(cls, config: EngineConfig, rank: int) -> Shard:
        """Return the shard of a rank with these settings; each stage's ranks follow those of the stage before."""
        return cls(rank % config.tensor_parallel_size, config.tensor_parallel_size, config.expert_parallel)

    def part(self, count: int) -> slice:
        """Return this rank's part of `count` items; `size` divides `count`."""
        own = count // self.size
        return slice(self.rank * own, (self.rank + 1) * own)

    def kv_part(self, num_kv_heads: int) -> slice:
        """Return this rank's key-value heads, those that its query heads attend to."""
        if num_kv_heads >= self.size:
            return self.part(num_kv_heads)
        head = self.rank * num_kv_heads // self.size
        return slice(head, head + 1)

    def num_rows(self, vocab_size: int) -> int:
        """Return the number of rows of a vocabulary's table on each rank."""
        return -(-vocab_size // self.size)

    def rows(self, vocab_size: int) -> slice:
        """Return the tokens whose rows this rank has; the last rank may have fewer than `num_rows`."""
        own = self.num_rows(vocab_size)
        return slice(min(self.rank * own, vocab_size), min((self.rank + 1) * own, vocab_size))

    def of(self, config: ModelConfig) -> ModelConfig:
        """Return the shape of this rank's layers. The vocabulary stays whole: see `rows`."""
        return replace(
            config,
            attention=self.attention(config.attention),
            layers=tuple(map(self.layer, config.layers)),
            mlp=self.mlp(config.mlp),
            experts=None if config.experts is None else self.experts(config.experts),
            delta_net=None if config.delta_net is None else self.delta_net(config.delta_net),
        )

    def layer(self, whole: LayerKind) -> LayerKind:
        """Return the parts of this rank's layer that differ from other layers."""
        heads, mlp = whole.attention, whole.mlp
        return replace(
            whole,
            attention=None if heads is None else self.attention(heads),
            mlp=None if mlp is None else self.mlp(mlp),
        )

    def mlp(self, whole: MLPConfig) -> MLPConfig:
        """Return the shape of this rank's MLP."""
        return replace(whole, intermediate_size=whole.intermediate_size // self.size)

    def delta_net(self, whole: DeltaNetConfig) -> DeltaNetConfig:
        """Return the shape of this rank's recurrent layers."""
        keys, values = whole.num_key_heads // self.size, whole.num_value_heads // self.size
        return replace(whole, num_key_heads=keys, num_value_heads=values)

    def attention(self, whole: AttentionConfig) -> AttentionConfig:
        """Return the shape of this rank's attention."""
        kv = self.kv_part(whole.num_kv_heads)
        return replace(whole, num_heads=whole.num_heads // self.size, num_kv_heads=kv.stop - kv.start)

    def experts(self, experts: ExpertsConfig) -> ExpertsConfig:
        """Return the shape of this rank's experts."""
        experts = replace(experts, shared_size=experts.shared_size // self.size)
        if self.splits_experts:
            return replace(experts, held=range(experts.num_experts)[self.part(experts.num_experts)])
        return replace(experts, intermediate_size=experts.intermediate_size // self.size)

    def expert_columns(self, experts: ExpertsConfig) -> slice:
        """Return this rank's inner columns of an expert that it has."""
        return slice(None) if self.splits_experts else self.part(experts.intermediate_size)


def possible_sizes(config: ModelConfig, splits_experts: bool = False) -> list[int]:
    """Return the numbers of ranks that can share a model evenly."""
    return [size for size in range(1, config.num_heads + 1) if _divides(config, size, splits_experts)]


def check_divides(config: ModelConfig, size: int, splits_experts: bool = False) -> None:
    """Raise ValueError, which lists the possible sizes, if `size` ranks cannot share a model evenly."""
    if splits_experts and config.experts is None:
        raise ValueError(f"expert_parallel is on, but {config.architecture} has no experts here; leave it out")
    if not _divides(config, size, splits_experts):
        heads = f"{config.num_heads} query heads, {config.num_kv_heads} key-value heads"
        inner = " and ".join(f"{count} {name}" for name, count in _inner(config, splits_experts).items())
        raise ValueError(
            f"tensor_parallel_size is {size}, which cannot share {heads} and {inner} evenly; "
            f"with this model it can be {', '.join(map(str, possible_sizes(config, splits_experts)))}"
            + _with_whole_experts(config, splits_experts)
        )


def _with_whole_experts(config: ModelConfig, splits_experts: bool) -> str:
    """Return the sizes that only `expert_parallel` makes possible, as advice."""
    more = {*possible_sizes(config, True)} - {*possible_sizes(config)} if config.experts is not None else ()
    if splits_experts or not more:
        return ""
    return f", and with expert_parallel also {', '.join(map(str, sorted(more)))}"


def check_context(config: ModelConfig, tensor_parallel_size: int, context_parallel_size: int) -> None:
    """Raise ValueError, which lists the possible sizes, if the ranks with the same key-value heads cannot divide a
    request's KV into so many parts. `tensor_parallel_size` ranks can share the model (`check_divides`).
    """
    if context_parallel_size == 1:
        return
    model = config.architecture
    if config.chunk is not None or config.windows != {None}:
        raise ValueError(
            f"context_parallel_size is {context_parallel_size}, but layers of this model ({model}) attend only to "
            "a window or a chunk, whose KV is not divided; leave it out"
        )
    if len(config.kinds_of_heads) > 1:
        raise ValueError(
            f"context_parallel_size is {context_parallel_size}, but the layers of this model ({model}) have heads "
            "of several kinds, whose KV is not divided; leave it out"
        )
    possible = _possible_contexts(config, tensor_parallel_size)
    others = [n for n in possible_sizes(config) if context_parallel_size in _possible_contexts(config, n)]
    if context_parallel_size not in possible:
        raise ValueError(
            f"context_parallel_size is {context_parallel_size}, but the number of ranks with the same key-value "
            f"head is {possible[-1]} (tensor_parallel_size is {tensor_parallel_size}, and the model has "
            f"{config.num_kv_heads}); it can be {', '.join(map(str, possible))}"
            + (f", or set tensor_parallel_size to {' or '.join(map(str, others))}" if others else "")
        )


def sizes_for_context(config: ModelConfig, context_parallel_size: int) -> list[int]:
    """Return the numbers of ranks that can share a model evenly and divide a request's KV into so many parts.

    Raises ValueError if there are none.
    """
    sizes = possible_sizes(config)
    if context_parallel_size == 1:
        return sizes
    found = [size for size in sizes if context_parallel_size in _possible_contexts(config, size)]
    check_context(config, (found or sizes)[-1], context_parallel_size)
    return found


def _possible_contexts(config: ModelConfig, tensor_parallel_size: int) -> list[int]:
    ranks = max(1, tensor_parallel_size // config.num_kv_heads)
    return [size for size in range(1, ranks + 1) if ranks % size == 0]


def check_copies(model: ModelConfig, config: EngineConfig) -> None:
    """Raise ValueError if ranks cannot hold as many copies of experts as `config` says."""
    if not config.expert_copies or model.experts is None:
        return
    if model.experts.are_next_to_mlp:
        raise ValueError("expert_copies is not supported for experts next to an MLP (Gemma 4); leave it out")
    num_experts, size = model.experts.num_experts, config.tensor_parallel_size
    most = num_experts - num_experts // size
    if config.expert_copies > most:
        raise ValueError(
            f"expert_copies is {config.expert_copies}, but each of {size} GPUs holds {num_experts // size} of the "
            f"{num_experts} experts, so the others have {most}; lower it"
        )


def _divides(config: ModelConfig, size: int, splits_experts: bool) -> bool:
    even = all(count % size == 0 for count in (config.num_heads, *_inner(config, splits_experts).values()))
    kinds = [heads.num_kv_heads for heads, _ in config.kinds_of_heads.values()]
    return even and all(kv % size == 0 or size % kv == 0 for kv in kinds)


def _inner(config: ModelConfig, splits_experts: bool) -> dict[str, int]:
    """Return the counts that ranks divide: of dense MLPs, if a layer has one, and of experts."""
    counts, experts = {}, config.experts
    if config.delta_net is not None:
        counts["key heads of recurrent layers"] = config.delta_net.num_key_heads
    if experts is None or experts.are_next_to_mlp or len(experts.layers) < config.num_layers:
        counts["inner columns"] = config.intermediate_size
    if experts is not None and experts.shared_size:
        counts["inner columns of the shared experts"] = experts.shared_size
    if experts is not None and splits_experts:
        counts["experts"] = experts.num_experts
    elif experts is not None and experts.is_mxfp4 and experts.are_quantized:
        counts[f"groups of {MXFP4_INPUTS} inner columns of an expert"] = experts.intermediate_size // MXFP4_INPUTS
    elif experts is not None:
        counts["inner columns of an expert"] = experts.intermediate_size
    return counts
