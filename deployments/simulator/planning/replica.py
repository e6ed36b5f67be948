"""Computes what fits in one replica of a model on one or several GPUs, and how fast it can be.

    memory of a GPU  =  weights / tp  +  reserve  +  free;   pages = those that fit into `kv_memory_share` of free
    decode step      =  max( (weights read + KV of all running requests) / tp / (bandwidth * efficiency),
                             2 * active parameters * running / tp / (FLOPS * mfu) )
    prefill tokens/s =  tp * FLOPS * mfu / (2 * active parameters + 2 * layers * heads * head_dim * prompt)

In a pipeline this holds for each stage with its own layers. The stage with the least room decides the number of
pages, and the slowest stage or link the rates:

    a request's next token comes after  max( a pass of its micro-batch through all stages and links,
                                             micro-batches * time of one in the slowest stage or link )

A mixture of experts has all of its weights in memory; a token uses only some (active), and a decode step reads
those that any of its tokens uses.

Sizes are exact. Speeds are estimates by the roofline (Williams et al. 2009): the hardware's limits times an
efficiency that is assumed, not measured. Of the traffic between GPUs, only that between stages counts, and that
between the parts of a request's KV (`exchange.py`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import product
from typing import get_args

from deployments.simulator.planning.exchange import PromptTraffic, prompt_traffic, query_bytes
from deployments.simulator.planning.known import Gpu
from engine.loading.kv_memory import free_after_slots, pages_for, slots_for
from engine.loading.windowed import layer_groups
from engine.model_config.config import ELEMENT_BYTES, ModelConfig
from engine.model_config.layer_groups import LayerGroups
from engine.parallel.division import divided, most_stages, stages_of
from engine.parallel.shard import Shard, check_context, check_divides, sizes_for_context
from engine.parallel.stage import Stage
from engine.settings.config import DType, EngineConfig, WindowedKV

_ANYWHERE = frozenset(get_args(DType)) - {"auto"} | {"fp8", "int4"}
RUNS_WEIGHT_TYPES: Mapping[str, frozenset[str]] = {"cuda": _ANYWHERE | {"mxfp4"}, "cpu": _ANYWHERE | {"int8"}}
"""Types of weights that this version can compute with, by device. int8 is for the native kernels of CPUs, which
widen MXFP4."""

MAX_STAGES = 64
"""Most stages that `engine.pipeline_parallel_size` allows."""


@dataclass(frozen=True, slots=True)
class Assumptions:
    """Assumptions of a plan. Shares are 0 to 1."""

    bandwidth_efficiency: float = 0.7
    """Share of the memory bandwidth that a decode step reaches. An 8B in bfloat16 reached 0.65 to 0.74 on an H100
    and an H200 (docs/benchmarks.md#on-gpus)."""
    mfu: float = 0.55
    """Share of the peak FLOPS that prefill reaches (model FLOPS utilisation): there, 0.58 to 0.62."""
    reserve_gib: float = 2.0
    """Memory of each GPU, in GiB, for CUDA's context and a step's tensors."""
    max_weight_share: float = 0.7
    """Share of a GPU's memory that weights may take; above it, the model is shared among more GPUs."""
    gpus_per_host: int = 8
    """GPUs of one machine. Those of a stage are in one."""
    link_gb_s: float = 12.5
    """Speed of the link from all GPUs of a stage to the next stage, in 1e9 bytes per second. The default is that
    of machines with eight A10G, 100 Gb/s (https://aws.amazon.com/ec2/instance-types/g5/)."""
    peer_gb_s: float | None = None
    """Rate at which a GPU receives from others of its host, in 1e9 bytes per second; None: `Gpu.peer_gb_s`."""


@dataclass(frozen=True, slots=True)
class StagePlan:
    """One stage of a replica, or all of it without a pipeline. Bytes are those of all its GPUs together."""

    stage: Stage
    layers: range
    held: ModelConfig
    """The model of its weights."""
    weight_bytes: int
    kv_bytes_per_token: int
    """Some GPUs hold the same heads if there are fewer of them than GPUs, or divide their KV."""
    query_bytes: int
    """Received for a token whose queries go to the other parts of its KV."""
    state_bytes: int
    """Of one request's recurrent state."""
    groups: LayerGroups | None
    """Groups of its layers with page tables of their own, as in the engine; None for one group."""


@dataclass(frozen=True, slots=True)
class ReplicaPlan:
    """One replica, with as many stages as its settings say. Raises ValueError when GPUs cannot share the model, no
    memory is left for KV, or the weights cannot be rounded as asked.
    """

    facts: ModelConfig
    gpu: Gpu
    tp: int
    """GPUs that share the model, or each stage of it (tensor parallel size)."""
    engine: EngineConfig
    assumed: Assumptions = Assumptions()
    stages: tuple[StagePlan, ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if self.engine.quantization is not None:
            self.facts.check_can_be_rounded(self.engine.quantization)
        check_divides(self.facts, self.tp)
        check_context(self.facts, self.tp, self.cp)
        if self.tp > self.assumed.gpus_per_host:
            raise ValueError(
                f"tensor_parallel_size is {self.tp}, but a host has {self.assumed.gpus_per_host} GPUs, and those "
                "that share a layer are in one; lower it, or set pipeline_parallel_size for several hosts"
            )
        stages = stages_of(self.facts, self.engine)
        object.__setattr__(self, "stages", tuple(map(self._stage, stages)))
        _ = self.num_pages

    def _stage(self, stage: Stage) -> StagePlan:
        layers, groups = stage.layers(self.facts.num_layers), self.layer_groups
        share = stage.of(Shard(0, self.tp).of(self.facts))
        return StagePlan(
            stage,
            layers,
            stage.held(self.facts),
            stage.weight_bytes(self.facts, self.element_bytes, self.engine.quantization),
            self.tp // self.cp * share.kv_bytes_per_token(self.kv_element_bytes),
            self.tp * query_bytes(share, self.cp, self.element_bytes),
            stage.of(self.facts).state_bytes(self.element_bytes),
            None if groups is None else groups.part(layers),
        )

    @property
    def cp(self) -> int:
        """Parts into which GPUs with the same key-value heads divide a request's KV (context parallel size)."""
        return self.engine.context_parallel_size

    @property
    def num_gpus(self) -> int:
        """GPUs of all stages."""
        return self.tp * len(self.stages)

    @property
    def num_hosts(self) -> int:
        """Hosts that the stages need, if as many as fit are on each."""
        return hosts_for(self.tp, len(self.stages), self.assumed)

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
        return sum(stage.weight_bytes for stage in self.stages)

    @property
    def weight_share(self) -> float:
        """Share of a GPU's memory that weights take, in the stage that has most."""
        return max(stage.weight_bytes for stage in self.stages) / self.tp / self.gpu.memory_bytes

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes in all layers on all GPUs, of which those with the same heads hold the same KV, or parts of it."""
        return sum(stage.kv_bytes_per_token for stage in self.stages)

    @property
    def free_bytes(self) -> int:
        """Bytes of each GPU that weights and reserve leave free, in the stage that has least."""
        return min(map(self.free_bytes_of, self.stages))

    def free_bytes_of(self, stage: StagePlan) -> int:
        """Return the bytes of each GPU of a stage that weights and reserve leave free."""
        return self.gpu.memory_bytes - stage.weight_bytes // self.tp - int(self.assumed.reserve_gib * 2**30)

    @property
    def longest_request(self) -> int:
        """Maximum number of prompt and output tokens together that the settings allow."""
        return self.engine.max_model_len or self.facts.max_position_embeddings

    @property
    def num_pages(self) -> int:
        """KV pages, counted as the engine counts them on each of its GPUs."""
        return min(map(self.num_pages_of, self.stages))

    def num_pages_of(self, stage: StagePlan) -> int:
        """Return the KV pages for which a stage has room."""
        slots_bytes = self.num_state_slots * stage.state_bytes // self.tp
        free = free_after_slots(self.engine, self.free_bytes_of(stage), slots_bytes)
        # Of the tokens of a page, each GPU keeps `page_size`, of which it has its heads.
        per_token, groups = stage.kv_bytes_per_token * self.cp // self.tp, stage.groups
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
        return sum(stage.state_bytes for stage in self.stages)

    @property
    def num_state_slots(self) -> int:
        """Slots for recurrent states, counted as the engine counts them."""
        if not self.state_bytes:
            return 0
        return min(
            slots_for(self.engine, self.free_bytes_of(stage), max(1, stage.state_bytes // self.tp))
            for stage in self.stages
        )

    @property
    def num_tokens(self) -> int:
        """Number of tokens whose KV fits, of one request where layers with a window have pages of their own."""
        size, groups = self.engine.page_tokens, self.layer_groups
        if groups is None:
            return self.num_pages * size
        return groups.most_tokens(self.num_pages, size, self.engine.max_step_tokens)

    def pages_of(self, num_tokens: float) -> int:
        """Return the number of pages that a request of `num_tokens` needs."""
        count, size, groups = math.ceil(num_tokens), self.engine.page_tokens, self.layer_groups
        return -(-count // size) if groups is None else groups.pages_for(count, size)

    def fits(self, num_tokens: int) -> int:
        """Return how many requests of that length fit into the pages."""
        return self.num_pages // self.pages_of(num_tokens)

    def concurrent_requests(self, num_tokens: int) -> int:
        """Return how many requests of that length can run concurrently within the pages and `max_running`."""
        return min(self.fits(num_tokens), self.engine.max_running)

    @property
    def bytes_per_s(self) -> float:
        """Memory traffic per second that a decode step reaches on all GPUs of a stage together."""
        return self.tp * self.gpu.bandwidth_gb_s * 1e9 * self.assumed.bandwidth_efficiency

    @property
    def flops(self) -> float:
        """Operations per second that prefill reaches on all GPUs of a stage together."""
        return self.tp * self.gpu.bf16_tflops * 1e12 * self.assumed.mfu

    @property
    def peer_gb_s(self) -> float:
        """Received by each GPU from others of its host, in 1e9 bytes per second."""
        return self.assumed.peer_gb_s or self.gpu.peer_gb_s

    @property
    def peer_bytes_per_s(self) -> float:
        """Bytes per second that all GPUs of a stage together receive from each other."""
        return self.tp * self.peer_gb_s * 1e9

    @property
    def link_bytes_per_token(self) -> int:
        """Bytes of a token's hidden state on a link, as each GPU of a stage sends it whole; 0 without links."""
        return self.tp * self.facts.hidden_size * self.element_bytes if len(self.stages) > 1 else 0

    def link_s(self, num_tokens: float) -> float:
        """Return the seconds for the hidden states of so many tokens on one link."""
        return num_tokens * self.link_bytes_per_token / (self.assumed.link_gb_s * 1e9)

    def rows_of(self, num_running: float) -> float:
        """Return the requests in each micro-batch: at least one, if there is one."""
        return max(num_running / self.engine.num_micro_batches, min(num_running, 1.0))

    def stage_step_s(self, stage: StagePlan, rows: float, context: float) -> float:
        """Return the seconds of a decode step of `rows` requests of `context` tokens each in one stage."""
        traffic = self._bytes_read(stage, rows) + rows * context * stage.kv_bytes_per_token
        exchange_s = rows * stage.query_bytes / self.peer_bytes_per_s
        return max(traffic / self.bytes_per_s, rows * 2 * stage.held.active_parameters / self.flops) + exchange_s

    def slowest_step_s(self, rows: float, context: float) -> float:
        """Return the seconds of a decode step of `rows` requests in the slowest stage."""
        return max(self.stage_step_s(stage, rows, context) for stage in self.stages)

    def decode_step_s(self, num_running: float, context: float) -> float:
        """Return the seconds in which `num_running` requests of `context` tokens each get one more."""
        rows = self.rows_of(num_running)
        link_s = self.link_s(rows)
        a_pass = sum(self.stage_step_s(stage, rows, context) + link_s for stage in self.stages)
        return max(a_pass, num_running / rows * max(self.slowest_step_s(rows, context), link_s))

    def bytes_read(self, num_running: float) -> float:
        """Return the bytes of weights that a step of at least one request reads on all GPUs together."""
        return sum(self._bytes_read(stage, num_running) for stage in self.stages)

    def _bytes_read(self, stage: StagePlan, num_running: float) -> float:
        if stage.held.experts is None:
            return stage.weight_bytes
        unread = stage.held.num_parameters - stage.held.parameters_read(max(num_running, 1.0))
        each = self.facts.expert_weight_bytes(self.element_bytes, self.engine.quantization)
        return stage.weight_bytes - unread * each

    @property
    def decode_flops(self) -> int:
        """Operations per generated token in all stages, without attention."""
        return 2 * sum(stage.held.active_parameters for stage in self.stages)

    def prefill_tokens_per_s(self, prompt_tokens: float, num_tokens: float | None = None) -> float:
        """Return the prefill rate for prompts of that length, of the slowest stage or link.

        `num_tokens` of a prompt are computed (None: all); only `exchange.py` distinguishes them.
        """
        each = (self.prefill_token_s(stage, prompt_tokens, num_tokens) for stage in self.stages)
        return 1 / max(self.link_s(1), *each)

    def prefill_s(self, num_tokens: float, prompt_tokens: float) -> float:
        """Return the seconds for `num_tokens` of one prompt: a step passes all stages, and the others follow."""
        first = min(num_tokens, self.engine.max_step_tokens)
        a_token = sum(self.prefill_token_s(stage, prompt_tokens, num_tokens) for stage in self.stages)
        a_token += (len(self.stages) - 1) * self.link_s(1)  # only tokens that sample return to the first stage
        return first * a_token + (num_tokens - first) / self.prefill_tokens_per_s(prompt_tokens, num_tokens)

    def ttft_s_alone(self, num_tokens: float, prompt_tokens: float) -> float:
        """Return the seconds until a prompt's first token on a replica without other requests."""
        return self.prefill_s(num_tokens, prompt_tokens) + self.decode_step_s(1, prompt_tokens)

    def prefill_token_s(self, stage: StagePlan, prompt_tokens: float, num_tokens: float | None = None) -> float:
        """Return the seconds of a token in one stage; it attends to half of the prompt on average."""
        attention_s = 2 * stage.held.attended_numbers * prompt_tokens / self.flops
        received = self.prompt_traffic(stage, prompt_tokens, num_tokens)
        exchange_s = received.num_bytes / self.peer_bytes_per_s
        attention_s = max(attention_s, exchange_s) if received.is_hidden else attention_s + exchange_s
        return 2 * stage.held.active_parameters / self.flops + attention_s

    def prompt_traffic(
        self, stage: StagePlan, prompt_tokens: float, num_tokens: float | None = None
    ) -> PromptTraffic:
        """Return the traffic between a stage's GPUs for a token of a prompt."""
        num_computed = num_tokens or prompt_tokens
        return prompt_traffic(
            self.engine, stage.kv_bytes_per_token, stage.query_bytes, prompt_tokens, num_computed
        )


def hosts_for(tp: int, num_stages: int, assumed: Assumptions) -> int:
    """Return the hosts for so many stages of `tp` GPUs each, of which as many as fit are on each."""
    return -(-num_stages // (assumed.gpus_per_host // tp))


def smallest_replica(
    facts: ModelConfig,
    gpu: Gpu,
    engine: EngineConfig,
    assumed: Assumptions | None = None,
    most_hosts: int = 1,
    num_stages: int | None = None,
) -> ReplicaPlan:
    """Return the replica with the fewest GPUs that leaves room for KV. Raises ValueError if none does.

    `num_stages` None: it is a pipeline only if the GPUs of one host cannot share the layers, and on few hosts.
    """
    assumed, reasons = assumed or Assumptions(), []
    element = ELEMENT_BYTES[facts.dtype if engine.dtype == "auto" else engine.dtype]
    weight_bytes = facts.weight_bytes(element, engine.quantization)
    for tp, count in _divisions(facts, engine.context_parallel_size, assumed, most_hosts, num_stages):
        share = weight_bytes / (tp * count) / gpu.memory_bytes  # of an average stage
        if share <= assumed.max_weight_share:
            try:
                settings = replace(engine, tensor_parallel_size=tp, pipeline_parallel_size=count)
                replica = ReplicaPlan(facts, gpu, tp, settings, assumed)
            except ValueError as error:
                reasons.append(str(error))
                continue
            share = replica.weight_share
            if share <= assumed.max_weight_share:
                return replica
        reasons.append(f"on {tp * count} GPUs weights take {share:.0%} of the memory")
    hosts = "one host" if most_hosts == 1 else f"{most_hosts} hosts"
    raise ValueError(
        f"{facts.num_parameters / 1e9:.1f}B parameters do not fit on up to {most_hosts * assumed.gpus_per_host} "
        f"{gpu.title} of {hosts}: {reasons[-1]}; choose a larger GPU, or more hosts (--hosts)"
    )


def _divisions(
    facts: ModelConfig, cp: int, assumed: Assumptions, most_hosts: int, num_stages: int | None
) -> list[tuple[int, int]]:
    """Return the possible numbers of GPUs in a stage and of stages, in order of preference."""
    if num_stages is not None:
        divided(facts, num_stages)  # raises ValueError for too many
    possible = sizes_for_context(facts, cp)
    if possible[0] > assumed.gpus_per_host:
        raise ValueError(
            f"context_parallel_size is {cp}, for which {possible[0]} GPUs or more share each layer of this "
            f"model ({facts.num_kv_heads} key-value heads), but a host has {assumed.gpus_per_host}; lower it, "
            "or choose hosts with more GPUs (--gpus-per-host)"
        )
    sizes = [size for size in possible if size <= assumed.gpus_per_host]
    most = min(most_stages(facts), MAX_STAGES)
    counts = range(1, most + 1) if num_stages is None else (num_stages,)
    found = [(tp, count) for tp, count in product(sizes, counts) if hosts_for(tp, count, assumed) <= most_hosts]
    if not found:
        raise ValueError(
            f"{counts[0]} stages of {_gpus(sizes[0])} each take {hosts_for(sizes[0], counts[0], assumed)} hosts "
            f"of {assumed.gpus_per_host} GPUs, but there may be {most_hosts} (--hosts)"
        )

    def preference(division: tuple[int, int]) -> tuple[bool, int, int, int]:
        tp, count = division
        return count > 1, hosts_for(tp, count, assumed), tp * count, count

    return sorted(found, key=preference)


def _gpus(count: int) -> str:
    return "one GPU" if count == 1 else f"{count} GPUs"
