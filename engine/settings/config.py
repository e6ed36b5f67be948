"""An engine's settings. Every limit is a field, here or in `SchedulerSettings`, with its unit and its default."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

from engine.base.machine import cpu_list
from engine.model_config.tasks import TASKS, Task
from engine.settings.drafting import Speculation
from engine.settings.generation_defaults import checked_defaults
from engine.settings.kv_tier import KVTier
from engine.settings.scheduling import POLICIES, SchedulerSettings

DType = Literal["auto", "float32", "bfloat16", "float16"]
Preemption = Literal["auto", "swap", "recompute"]
KVDType = Literal["auto", "fp8"]
Quantization = Literal["int8", "fp8"]
CudaGraphs = Literal["start", "lazy", "off"]
Cascade = Literal["auto", "off"]
WindowedKV = Literal["auto", "on", "off"]
GPU_DEFAULTS: Mapping[str, Any] = {"kv_memory_share": 0.9, "max_step_tokens": 8192}
"""Defaults on a GPU, for servers (`deployments/config/chosen.py`) and for `LLM`. Steps are measured there before
KV pages take their share of the rest (`engine/loading/step_memory.py`)."""
# Eleven days. Priorities then hardly age, and a float still distinguishes a clock's seconds.
_LONGEST_HALF_LIFE_S = 1e6
_LARGEST_PAGE = 256


@dataclass(frozen=True, slots=True)
class EngineConfig(SchedulerSettings):
    """The settings of one engine replica. Raises ValueError when a value is out of range."""

    model: str = "demo"
    """Directory of a Hugging Face-style model, a hub id, "demo" for the embedded model, or a name that
    `raydix pull` knows."""
    model_revision: str | None = None
    """Commit, tag or branch of a hub id; None takes the newest. Only a commit always names the same files."""
    served_name: str | None = None
    """Name in the API; None takes `model`."""
    device: str = "auto"
    """"auto" (CUDA when there is one), "cpu", "cuda" or one of several GPUs: "cuda:1"."""
    dtype: DType = "auto"
    """Type of weights and KV; "auto" is the checkpoint's on a GPU and float32 on a CPU."""
    kv_dtype: KVDType = "auto"
    """Type of KV: "auto" takes that of `dtype`; "fp8" takes eight bits, with a scale for each layer's keys and one
    for its values."""
    quantization: Quantization | None = None
    """Format to which a plain checkpoint's weights are rounded when they are loaded, with a scale for each output:
    "int8" for CPUs' native kernels, "fp8" (float8_e4m3fn, activations too) for GPUs that multiply it. None: no
    rounding."""
    tensor_parallel_size: int = 1
    """GPUs (or processes, on a CPU) that share each layer of the model: they must divide its heads."""
    expert_parallel: bool = False
    """With `tensor_parallel_size`: whether each GPU holds some experts whole instead of a part of every expert."""
    expert_copies: int = 0
    """With `expert_parallel`: copies of other GPUs' experts that each GPU holds in each layer, of those in demand,
    0 to 64. Their tokens are divided."""
    expert_copies_interval: int = 2000
    """Steps after which the copies of each layer are chosen again, by the tokens of its experts meanwhile."""
    one_shot_kib: int = 512
    """With `tensor_parallel_size` on GPUs: one kernel, which reads the other GPUs' memory and also adds and norms,
    computes sums over ranks of up to so many KiB; NCCL computes larger ones. 0: NCCL computes all."""
    pipeline_parallel_size: int = 1
    """Stages that each hold some consecutive layers of the model, 1 to 64. A step passes through all of them, and
    they compute different steps meanwhile."""
    pipeline_layers: list[int] | None = None
    """With `pipeline_parallel_size`: how many layers each stage has. None: so many that the slowest stage reads as
    few weights as possible, the output head included. The start measures the stages and says if others were
    better."""
    rank_interface: str | None = None
    """With `pipeline_parallel_size` on several hosts: the network interface of each host, such as "eth1", through
    which ranks connect. None: the one with the host's address in Ray, and those that reach it."""
    micro_batches: int | None = None
    """With `pipeline_parallel_size`: most steps in flight, over which the requests that decode are divided, 1 to
    128. None: as many as stages."""
    context_parallel_size: int = 1
    """With `tensor_parallel_size`: ranks with the same key-value heads that divide a request's KV among them, so
    that each keeps one of so many parts, 1 to 64. It divides the number of ranks that share a key-value head."""
    ring_attention_tokens: int = 1024
    """With `context_parallel_size`: a prompt's step of at least so many tokens passes the earlier KV from rank to
    rank (ring attention); one of fewer tokens sends its queries instead. 1 to 2**20."""
    page_size: int = 16
    """Tokens per KV page, 1 to 256; with `context_parallel_size`, those that each rank has of a page."""
    kv_pages: int | None = None
    """KV pages to allocate; None sizes them from `kv_memory_share`."""
    kv_memory_share: float = 0.25
    """Share of memory for KV pages when `kv_pages` is None: of a CPU machine's RAM, or of the GPU memory that
    weights, the largest step and CUDA graphs leave. Servers and `LLM` take 0.9 on GPUs (`GPU_DEFAULTS`)."""
    state_snapshots: int | None = None
    """In a model with recurrent layers: slots for states kept at the ends of prefixes, without which these could
    not be reused, in addition to one slot for each running request. None: as many as `max_running`, if they leave
    half of the memory for KV pages; other models have none."""
    windowed_kv: WindowedKV = "auto"
    """Whether layers with a window have their own pages, which are freed behind it: "auto" if that makes room for
    more requests and no other setting needs one page table for all layers, "on" (an error at the start if it is
    not possible) or "off"."""
    preemption: Preemption = "auto"
    """Treatment of the KV of a preempted request: "swap" copies it to host memory while there is room,
    "recompute" drops it to compute it again, "auto" chooses the way with the lower expected cost."""
    host_kv_gib: float = 0.0
    """Host memory for the KV of preempted requests and of evicted prefixes, with the recurrent states and windows
    from which these resume, in GiB; allocated at the start, and pinned if there is a GPU. 0: all of it is computed
    again."""
    host_kv_min_uses: int = 2
    """Requests that must have used an evicted prefix, including the one that computed it, for its KV to be copied
    to host memory; 1 copies all."""
    kv_tier: KVTier | None = None
    """Files for the evicted prefixes in host memory, which outlive the engine; None: no files."""
    generation_config: Literal["model", "none"] | dict[str, int | float] = "model"
    """Sampling parameters of requests without their own: "model" takes the values of the model's
    generation_config.json, "none" the API's own. Or explicit values: `temperature`, `top_p`, `top_k`, `min_p`,
    `repetition_penalty` and `max_new_tokens`."""
    tasks: Literal["auto"] | list[Task] = "auto"
    """The tasks that the model serves: "generate", "embed" (embeddings are the last token's hidden state),
    "rerank" (scores are the probability of "yes"), or several of them. "auto" decides by its files
    (`engine/model_config/tasks.py`)."""
    ignored_config_keys: tuple[str, ...] = ()
    """Keys of the model's config.json that Raydix does not know and may ignore, such as "rope_scaling.factor".
    Others that could change what the model computes are an error."""
    max_model_len: int | None = None
    """Most tokens of prompt and output together; None takes the model's own limit."""
    cuda_graphs: CudaGraphs = "start"
    """Whether decode steps on a GPU are recorded and replayed, one launch for all their layers: "start"
    records all batch sizes when the engine starts, "lazy" each size on first use, "off" none."""
    graph_tokens: int | None = None
    """Most tokens of a step with prompts whose layers are replayed too, as a whole or with attention launched
    between them. None: 512, or up to 2,048 for a small model, whose layers a GPU computes faster than the host
    launches their kernels; 0: such steps are launched kernel by kernel."""
    overlap: bool | None = None
    """Whether the next step is planned while one runs; the tokens are the same either way. None: yes, unless
    as many threads compute a step as there are cores, because planning would then only slow them down."""
    stream_interval_ms: float = 8.0
    """Least milliseconds between two deliveries of a stream's tokens, where steps are shorter: tokens that come
    meanwhile are delivered together. First tokens and ends never wait. 0: each step's tokens immediately."""
    prefix_cache: bool = True
    """Whether KV of finished requests is kept for prompts that begin alike."""
    eviction: str = "lru"
    """Which cached prefixes are evicted first: "lru", "lfu" or "priority"."""
    attention: str = "auto"
    """Attention backend: "native" (CPUs), "triton" and "cudnn" (GPUs), "flash_attn" and "flashinfer" (GPUs, where
    installed), "reference", or "auto" for the best that runs here. Two names with a comma between them
    ("flash_attn,triton"): one for steps with prompts, and one for steps with only decodes."""
    cascade_attention: Cascade = "auto"
    """Whether requests that decode after the same cached prefix attend to it together, so that its KV is read once
    for all of them: "auto" if the backend supports it and it pays, or "off"."""
    block_tokens: int = 16
    """Tokens per block in the cache reports to routers; the same in all engines of a model."""
    grammar_cache_bytes: int = 2**29
    """Most bytes of compiled grammars kept for later requests. Each counts the memory that compiling it took, as
    measured when it was tried, and 8 MiB for its use."""
    grammar_mask_budget_s: float = 10.0
    """Seconds of processor time that the token masks of a request's grammar may take, for its whole answer. Only
    masks that steps do not wait for count: most grammars take microseconds for a token."""
    threads: int | None = None
    """Threads that compute on a CPU; None: OMP_NUM_THREADS if it is set, else one for each core that this process
    may use (`engine/base/machine.py`)."""
    cpus: str | None = None
    """Logical CPUs to which the engine's process is pinned, such as "0-3,8"; None: not pinned."""
    speculation: Speculation | None = None
    """How tokens are drafted, so that one step verifies several of them; None: one token per request and step."""

    def __post_init__(self) -> None:
        _check_range("one_shot_kib", self.one_shot_kib, 0, 2**16)
        if self.graph_tokens is not None:
            _check_range("graph_tokens", self.graph_tokens, 0, 2048)
        _check_range("page_size", self.page_size, 1, _LARGEST_PAGE)
        _check_range("block_tokens", self.block_tokens, 1, 2**20)
        _check_range("tensor_parallel_size", self.tensor_parallel_size, 1, 2**10)
        _check_range("pipeline_parallel_size", self.pipeline_parallel_size, 1, 64)
        for name in ("tensor_parallel_size", "pipeline_parallel_size"):
            if (size := getattr(self, name)) > 1 and self.device not in ("auto", "cpu", "cuda"):
                raise ValueError(
                    f"device is {self.device!r}, but {name} is {size}: device must be "
                    '"auto", "cpu" or "cuda", because each rank takes a GPU of its own'
                )
        _check_range("expert_copies", self.expert_copies, 0, 64)
        _check_range("expert_copies_interval", self.expert_copies_interval, 1, 2**40)
        if self.expert_copies and not (self.expert_parallel and self.tensor_parallel_size > 1):
            raise ValueError(
                f"expert_copies is {self.expert_copies}, but copies are for GPUs that hold experts whole; set "
                "expert_parallel, and tensor_parallel_size above 1, or leave expert_copies out"
            )
        if self.expert_copies and self.pipeline_parallel_size > 1:
            raise ValueError(
                f"expert_copies is {self.expert_copies}, but pipeline_parallel_size is "
                f"{self.pipeline_parallel_size}: stages of a pipeline have no copies; leave one of them out"
            )
        if self.pipeline_layers is not None and len(self.pipeline_layers) != self.pipeline_parallel_size:
            raise ValueError(
                f"pipeline_layers has {len(self.pipeline_layers)} numbers, but pipeline_parallel_size is "
                f"{self.pipeline_parallel_size}: give the number of layers of each stage"
            )
        if self.micro_batches is not None:
            _check_range("micro_batches", self.micro_batches, 1, 128)
            if self.micro_batches > 1 and self.pipeline_parallel_size == 1:
                raise ValueError(
                    f"micro_batches is {self.micro_batches}, but pipeline_parallel_size is 1: one stage computes "
                    "one step at a time; set pipeline_parallel_size, or leave micro_batches out"
                )
        _check_range("context_parallel_size", self.context_parallel_size, 1, 64)
        _check_range("ring_attention_tokens", self.ring_attention_tokens, 1, 2**20)
        if self.tensor_parallel_size % self.context_parallel_size:
            raise ValueError(
                f"context_parallel_size is {self.context_parallel_size}, which does not divide "
                f"tensor_parallel_size {self.tensor_parallel_size}: ranks with the same key-value heads divide "
                "the KV of a request; set tensor_parallel_size to a multiple, or leave context_parallel_size out"
            )
        for name in (
            "max_running",
            "max_step_tokens",
            "max_waiting",
            "max_waiting_tokens",
            "fair_quantum_tokens",
        ):
            _check_range(name, getattr(self, name), 1, 2**40)
        _check_range("grammar_cache_bytes", self.grammar_cache_bytes, 0, 2**50)
        if not self.grammar_mask_budget_s > 0:
            raise ValueError(f"grammar_mask_budget_s must be above 0, got {self.grammar_mask_budget_s}")
        for name in ("kv_pages", "max_model_len", "threads"):
            if getattr(self, name) is not None:
                _check_range(name, getattr(self, name), 1, 2**40)
        if not 0 <= self.stream_interval_ms < 10_000:
            raise ValueError(f"stream_interval_ms must be in [0, 10000), got {self.stream_interval_ms}")
        if self.state_snapshots is not None:
            _check_range("state_snapshots", self.state_snapshots, 0, 2**40)
        for name in ("max_step_ms", "max_step_stretch"):
            if (value := getattr(self, name)) is not None and not 0 < value < math.inf:
                raise ValueError(f"{name} must be a number above 0, or None for no bound; got {value}")
        if self.cpus is not None:
            cpu_list(self.cpus)
        if self.quantization not in (None, *get_args(Quantization)):
            raise ValueError(f'quantization must be "int8", "fp8" or None, got {self.quantization!r}')
        if self.dtype not in get_args(DType):
            raise ValueError(f'dtype must be "auto", "float32", "bfloat16" or "float16", got {self.dtype!r}')
        if self.kv_dtype not in get_args(KVDType):
            raise ValueError(f'kv_dtype must be "auto" or "fp8", got {self.kv_dtype!r}')
        if self.cuda_graphs not in get_args(CudaGraphs):
            raise ValueError(f'cuda_graphs must be "start", "lazy" or "off", got {self.cuda_graphs!r}')
        if self.cascade_attention not in get_args(Cascade):
            raise ValueError(f'cascade_attention must be "auto" or "off", got {self.cascade_attention!r}')
        if self.windowed_kv not in get_args(WindowedKV):
            raise ValueError(f'windowed_kv must be "auto", "on" or "off", got {self.windowed_kv!r}')
        if self.policy not in POLICIES:
            raise ValueError(f"policy must be one of {', '.join(POLICIES)}; got {self.policy!r}")
        if not 0 < self.priority_half_life_s <= _LONGEST_HALF_LIFE_S:
            raise ValueError(
                f"priority_half_life_s must be above 0 and at most {_LONGEST_HALF_LIFE_S:g}, "
                f"got {self.priority_half_life_s}"
            )
        if not isinstance(self.speculation, Speculation | None):
            raise ValueError(f"speculation must be a Speculation or None, got {self.speculation!r}")
        self._check_drafter()
        if self.tasks != "auto" and not (self.tasks and set(self.tasks) <= set(TASKS)):
            raise ValueError(f'tasks must be "auto" or some of {", ".join(TASKS)}; got {self.tasks!r}')
        if not isinstance(self.generation_config, str):
            checked_defaults(self.generation_config)
        elif self.generation_config not in ("model", "none"):
            raise ValueError(
                f'generation_config must be "model", "none" or values, got {self.generation_config!r}'
            )
        if not 0 < self.kv_memory_share <= 1:
            raise ValueError(f"kv_memory_share must be in (0, 1], got {self.kv_memory_share}")
        if not 0 <= self.host_kv_gib < 2**20:
            raise ValueError(f"host_kv_gib must be in [0, {2**20}), got {self.host_kv_gib}")
        _check_range("host_kv_min_uses", self.host_kv_min_uses, 1, 2**20)
        if not isinstance(self.kv_tier, KVTier | None):
            raise ValueError(f"kv_tier must be a KVTier or None, got {self.kv_tier!r}")
        if self.kv_tier is not None and not self.host_kv_gib:
            raise ValueError(
                "kv_tier is set, but host_kv_gib is 0: files are written from host memory and read into it, so "
                "set host_kv_gib, or leave kv_tier out"
            )
        if self.preemption == "swap" and not self.host_kv_gib:
            raise ValueError('preemption is "swap", but host_kv_gib is 0: set it, or use "auto" or "recompute"')
        if self.max_step_tokens < self.max_running:
            raise ValueError(
                f"max_step_tokens must be at least max_running ({self.max_running}): every running request "
                f"decodes one token per step; got {self.max_step_tokens}"
            )

    def _check_drafter(self) -> None:
        """Raise ValueError if the ranks or the pages exclude the drafter."""
        if self.speculation is None or self.speculation.method == "ngram":
            return
        method = f"speculation.method is {self.speculation.method!r}"
        if self.speculation.reads_hidden and self.pipeline_parallel_size > 1:
            raise ValueError(
                f"{method} and pipeline_parallel_size is {self.pipeline_parallel_size}, but the first stage, "
                "which drafts, does not get the hidden states of all tokens: set pipeline_parallel_size to 1 and "
                'use tensor_parallel_size, or choose another method, for example "ngram" or "draft_model"'
            )
        if self.page_tokens > _LARGEST_PAGE:
            raise ValueError(
                f"{method}, and page_size {self.page_size} times context_parallel_size "
                f"{self.context_parallel_size} is more than {_LARGEST_PAGE}, the most tokens of a page of what "
                "drafts; lower page_size"
            )

    @property
    def num_ranks(self) -> int:
        """Processes that share the model: those of each stage, in all stages."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    def of_draft_model(self, model: str) -> EngineConfig:
        """Return the settings for this draft model, which the first rank has whole."""
        return replace(
            self,
            model=model,
            model_revision=None,
            tensor_parallel_size=1,
            context_parallel_size=1,
            page_size=self.page_tokens,
            pipeline_parallel_size=1,
            pipeline_layers=None,
            micro_batches=None,
            expert_parallel=False,
            expert_copies=0,
            speculation=None,
        )

    @property
    def page_tokens(self) -> int:
        """Tokens of a KV page on all ranks together that divide the KV of a request."""
        return self.page_size * self.context_parallel_size

    @property
    def num_micro_batches(self) -> int:
        """Most steps in flight between the stages of a pipeline."""
        return self.micro_batches or self.pipeline_parallel_size

    @property
    def name(self) -> str:
        """The model's name in the API."""
        return self.served_name or self.model


def _check_range(name: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise ValueError(f"{name} must be in [{low}, {high}], got {value}")
