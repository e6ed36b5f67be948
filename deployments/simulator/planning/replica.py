"""Computes what fits in one replica of a model on one or several GPUs, and how fast it can be.

    memory of a GPU  =  weights / tp  +  reserve  +  free;   pages = those that fit into `kv_memory_share` of free
    decode step      =  max( (weights read + KV of all running requests) / tp / (bandwidth * efficiency),
                             2 * active parameters * running / tp / (FLOPS * mfu) )
    prefill tokens/s =  tp * FLOPS * mfu / (2 * active parameters + 2 * layers * heads * head_dim * prompt)

A mixture of experts has all of its weights in memory; a token uses only some (active), and a decode step reads
those that any of its tokens uses.

Sizes are exact. Speeds are estimates by the roofline (Williams et al. 2009): the hardware's limits times an
efficiency that is assumed, not measured. Communication between GPUs is not counted.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import get_args

from deployments.simulator.planning.known import Gpu
from engine.loading.kv_memory import free_after_slots, pages_for, slots_for
from engine.loading.windowed import layer_groups
from engine.model_config.config import ELEMENT_BYTES, ModelConfig
from engine.model_config.layer_groups import LayerGroups
from engine.parallel.shard import Shard, check_divides, possible_sizes
from engine.settings.config import DType, EngineConfig, WindowedKV

_ANYWHERE = frozenset(get_args(DType)) - {"auto"} | {"fp8", "int4"}
RUNS_WEIGHT_TYPES: Mapping[str, frozenset[str]] = {"cuda": _ANYWHERE, "cpu": _ANYWHERE | {"int8"}}
"""Types of weights that this version can compute with, by device. int8 is for the native kernels of CPUs."""
MAX_GPUS = 8
"""Maximum number of GPUs in one replica: those of one machine."""


@dataclass(frozen=True, slots=True)
class Assumptions:
    """Assumptions of a plan. Shares are 0 to 1."""

    bandwidth_efficiency: float = 0.7
    """Share of the memory bandwidth that a decode step reaches."""
    mfu: float = 0.4
    """Share of the peak FLOPS that prefill reaches (model FLOPS utilisation)."""
    reserve_gib: float = 2.0
    """Memory of each GPU, in GiB, for CUDA's context and a step's tensors."""
    max_weight_share: float = 0.7
    """Share of a GPU's memory that weights may take; above it, the model is shared among more GPUs."""


@dataclass(frozen=True, slots=True)
class ReplicaPlan:
    """One replica. Raises ValueError when `tp` GPUs cannot share the model, no memory is left for KV, or the
    weights cannot be rounded as asked.
    """

    facts: ModelConfig
    gpu: Gpu
    tp: int
    """GPUs that share the model (tensor parallel size)."""
    engine: EngineConfig
    assumed: Assumptions = Assumptions()

    def __post_init__(self) -> None:
        if self.engine.quantization is not None:
            self.facts.check_can_be_rounded(self.engine.quantization)
        check_divides(self.facts, self.tp)
        _ = self.num_pages

    @property
    def element_bytes(self) -> int:
        """Bytes of a weight."""
        return ELEMENT_BYTES[self.facts.dtype if self.engine.dtype == "auto" else self.engine.dtype]

    @property
    def kv_element_bytes(self) -> int:
        """Bytes of one number in KV."""
        return 1 if self.engine.kv_dtype == "fp8" else self.element_bytes

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights on all GPUs together."""
        return self.facts.weight_bytes(self.element_bytes, self.engine.quantization)

    @property
    def weight_share(self) -> float:
        """Share of each GPU's memory that weights take."""
        return self.weight_bytes / self.tp / self.gpu.memory_bytes

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes in all layers on all GPUs, some of which hold the same heads if there are fewer of them."""
        return self.tp * Shard(0, self.tp).of(self.facts).kv_bytes_per_token(self.kv_element_bytes)

    @property
    def free_bytes(self) -> int:
        """Bytes of each GPU that weights and reserve leave free."""
        return self.gpu.memory_bytes - self.weight_bytes // self.tp - int(self.assumed.reserve_gib * 2**30)

    @property
    def longest_request(self) -> int:
        """Maximum number of prompt and output tokens together that the settings allow."""
        return self.engine.max_model_len or self.facts.max_position_embeddings

    @property
    def num_pages(self) -> int:
        """KV pages, counted as the engine counts them on each of its GPUs."""
        free = free_after_slots(self.engine, self.free_bytes, self.num_state_slots * self.state_bytes // self.tp)
        per_token, groups = self.kv_bytes_per_token // self.tp, self.layer_groups
        per_token = per_token if groups is None else groups.bytes_per_token(per_token)
        return pages_for(self.engine, free, per_token, self.longest_request, groups)

    @property
    def layer_groups(self) -> LayerGroups | None:
        """Groups of layers with page tables of their own, as in the engine; None for one group."""
        groups = layer_groups(self.engine, self.facts, self.longest_request)
        return None if isinstance(groups, str) else groups

    def with_windowed_kv(self, setting: WindowedKV) -> ReplicaPlan:
        """Return the same replica, where layers with a window have pages of their own, or not."""
        return replace(self, engine=replace(self.engine, windowed_kv=setting))

    @property
    def state_bytes(self) -> int:
        """Bytes of one request's recurrent state, on all GPUs together; 0 in models without one."""
        return self.facts.state_bytes(self.element_bytes)

    @property
    def num_state_slots(self) -> int:
        """Slots for recurrent states, counted as the engine counts them."""
        return slots_for(self.engine, self.free_bytes, self.state_bytes // self.tp) if self.state_bytes else 0

    @property
    def num_tokens(self) -> int:
        """Number of tokens whose KV fits, of one request where layers with a window have pages of their own."""
        size, groups = self.engine.page_size, self.layer_groups
        if groups is None:
            return self.num_pages * size
        return groups.most_tokens(self.num_pages, size, self.engine.max_step_tokens)

    def pages_of(self, num_tokens: float) -> int:
        """Return the number of pages that a request of `num_tokens` needs."""
        count, size, groups = math.ceil(num_tokens), self.engine.page_size, self.layer_groups
        return -(-count // size) if groups is None else groups.pages_for(count, size)

    def fits(self, num_tokens: int) -> int:
        """Return how many requests of that length fit into the pages."""
        return self.num_pages // self.pages_of(num_tokens)

    def concurrent_requests(self, num_tokens: int) -> int:
        """Return how many requests of that length can run concurrently within the pages and `max_running`."""
        return min(self.fits(num_tokens), self.engine.max_running)

    @property
    def bytes_per_s(self) -> float:
        """Memory traffic per second that a decode step reaches on all GPUs together."""
        return self.tp * self.gpu.bandwidth_gb_s * 1e9 * self.assumed.bandwidth_efficiency

    @property
    def flops(self) -> float:
        """Operations per second that prefill reaches on all GPUs together."""
        return self.tp * self.gpu.bf16_tflops * 1e12 * self.assumed.mfu

    def decode_step_s(self, num_running: float, context: float) -> float:
        """Return the seconds of a step in which `num_running` requests of `context` tokens each get one more."""
        traffic = self.bytes_read(num_running) + num_running * context * self.kv_bytes_per_token
        return max(traffic / self.bytes_per_s, num_running * self.decode_flops / self.flops)

    def bytes_read(self, num_running: float) -> float:
        """Return the bytes of weights that a step of at least one request reads on all GPUs together."""
        unread = self.facts.num_parameters - self.facts.parameters_read(max(num_running, 1.0))
        each = self.facts.expert_weight_bytes(self.element_bytes, self.engine.quantization)
        return self.weight_bytes - unread * each

    @property
    def decode_flops(self) -> int:
        """Operations per generated token, without attention."""
        return 2 * self.facts.active_parameters

    def prefill_tokens_per_s(self, prompt_tokens: float) -> float:
        """Return the prefill rate for prompts of that length; a token attends to half of it on average."""
        return self.flops / (2 * self.facts.active_parameters + 2 * self.facts.attended_numbers * prompt_tokens)


def smallest_replica(
    facts: ModelConfig, gpu: Gpu, engine: EngineConfig, assumed: Assumptions | None = None
) -> ReplicaPlan:
    """Return the replica with the fewest GPUs that leaves room for KV. Raises ValueError if none does."""
    assumed = assumed or Assumptions()
    reasons = []
    for tp in possible_sizes(facts):
        if tp > MAX_GPUS:
            break
        try:
            replica = ReplicaPlan(facts, gpu, tp, engine, assumed)
        except ValueError as error:
            reasons.append(str(error))
            continue
        if replica.weight_share <= assumed.max_weight_share:
            return replica
        reasons.append(f"on {tp} GPUs weights take {replica.weight_share:.0%} of the memory")
    raise ValueError(
        f"{facts.num_parameters / 1e9:.1f}B parameters do not fit on up to {MAX_GPUS} {gpu.title} that share the "
        f"model's {facts.num_heads} heads: {reasons[-1]}; choose a larger GPU"
    )
