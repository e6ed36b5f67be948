"""An engine's settings. Every limit is a field here, with its unit and its default."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

from engine.drafting.settings import Speculation
from engine.machine import cpu_list
from engine.scheduling.queue_policy import POLICIES

DType = Literal["auto", "float32", "bfloat16", "float16"]
Preemption = Literal["auto", "swap", "recompute"]
KVDType = Literal["auto", "fp8"]
Quantization = Literal["int8", "fp8"]
CudaGraphs = Literal["start", "lazy", "off"]
# Eleven days: in practice priorities then do not age, and seconds on a clock are still told apart.
_LONGEST_HALF_LIFE_S = 1e6


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Settings of one engine replica. Raises ValueError when a value is out of range."""

    model: str = "demo"
    """Directory of a Hugging Face-style model, a hub id, or "demo" for the embedded model."""
    served_name: str | None = None
    """Name in the API; None takes `model`."""
    device: str = "auto"
    """"auto" (CUDA when there is one), "cpu" or "cuda"."""
    dtype: DType = "auto"
    """Type of weights and KV; "auto" is the checkpoint's on a GPU and float32 on a CPU."""
    kv_dtype: KVDType = "auto"
    """Type of KV: "auto" is that of `dtype`; "fp8": eight bits, scaled for each layer's keys, and values."""
    quantization: Quantization | None = None
    """Rounds a plain checkpoint's weights while they are loaded, with a scale for each output: "int8" for CPUs'
    native kernels, "fp8" (float8_e4m3fn, activations too) for GPUs that multiply it. None: as they are."""
    tensor_parallel_size: int = 1
    """GPUs (or processes, on a CPU) that share each layer of the model: they must divide its heads."""
    expert_parallel: bool = False
    """With `tensor_parallel_size`: each GPU has some of a mixture's experts, whole, instead of a part of each."""
    page_size: int = 16
    """Tokens per KV page, 1 to 256."""
    kv_pages: int | None = None
    """KV pages to allocate; None sizes them from `kv_memory_share`."""
    kv_memory_share: float = 0.25
    """Share of memory for KV pages when `kv_pages` is None: of free GPU memory, or of a CPU machine's RAM."""
    preemption: Preemption = "auto"
    """What becomes of the KV of a preempted request: "swap" copies it to host memory while there is room,
    "recompute" leaves it to be computed again, "auto" takes what will probably be cheaper."""
    host_kv_gib: float = 0.0
    """Host memory for that, in GiB, allocated at the start and pinned on a GPU's machine. 0: always recompute."""
    max_model_len: int | None = None
    """Most tokens of prompt and output together; None takes the model's own limit."""
    max_running: int = 256
    """Most requests in one batch."""
    max_step_tokens: int = 2048
    """Most tokens computed in one step: bounds the time a long prompt can hold up running decodes."""
    max_step_ms: float | None = 100.0
    """Aimed length of a step beside running decodes, in milliseconds: bounds its prefill. None: no aim."""
    max_step_stretch: float | None = 0.75
    """How much longer each prompt may make a step beside running decodes, as a share of what they take alone: with
    0.75 streams keep within twice the time per token while one long prompt is computed. None: no such bound."""
    cuda_graphs: CudaGraphs = "start"
    """Record steps of plain decodes on a GPU and replay them, a launch for all of their kernels: "start" records
    all sizes when the engine starts, "lazy" each when it first comes, "off" none."""
    overlap: bool | None = None
    """Plan the next step while one runs. Without it the tokens are the same, and each step waits for its plan.
    None: unless steps are computed by as many threads as there are cores, which planning would only hold up."""
    policy: str = "priority"
    """Who goes first: "fcfs", "priority" (with ageing) or "fair" (tenants take turns);
    see `engine/scheduling/queue_policy.py`."""
    priority_half_life_s: float = 30.0
    """Seconds of waiting that weigh as much as one level of priority."""
    fair_quantum_tokens: int = 256
    """Tokens that a tenant may have computed in a turn, when the policy is "fair"."""
    max_waiting: int = 1024
    """Most requests waiting for admission; more are refused with "queue full"."""
    max_waiting_tokens: int = 4_000_000
    """Most uncomputed prompt tokens waiting; more are refused with "queue full"."""
    prefix_cache: bool = True
    """Keep KV of finished requests for prompts that begin alike."""
    eviction: str = "lru"
    """Which cached prefixes go first: "lru", "lfu" or "priority"."""
    attention: str = "auto"
    """Attention backend: "native" (CPUs), "triton" (GPUs), "flash_attn" and "flashinfer" (GPUs, where installed),
    "reference", or "auto" for the best that runs here."""
    block_tokens: int = 16
    """Tokens of the blocks in which routers are told what is cached; the same in all engines of a model."""
    max_grammars: int = 64
    """Compiled grammars to keep for requests to come: up to some 50 MB each, seldom over one."""
    threads: int | None = None
    """Threads that compute on a CPU; None: OMP_NUM_THREADS where it is set, else one for each core of the
    machine that this process may use (`engine/machine.py`)."""
    cpus: str | None = None
    """Logical CPUs that the engine's process keeps to, such as "0-3,8"; None: wherever the system puts it."""
    speculation: Speculation | None = None
    """Guess tokens and check many in one step; None: one token per request and step."""

    def __post_init__(self) -> None:
        _check_range("page_size", self.page_size, 1, 256)
        _check_range("block_tokens", self.block_tokens, 1, 2**20)
        _check_range("tensor_parallel_size", self.tensor_parallel_size, 1, 2**10)
        if self.tensor_parallel_size > 1 and self.device not in ("auto", "cpu", "cuda"):
            raise ValueError(
                f"device is {self.device!r}, but tensor_parallel_size is {self.tensor_parallel_size}: it must be "
                '"auto", "cpu" or "cuda", and each rank takes a GPU of its own'
            )
        for name in (
            "max_running",
            "max_step_tokens",
            "max_waiting",
            "max_waiting_tokens",
            "max_grammars",
            "fair_quantum_tokens",
        ):
            _check_range(name, getattr(self, name), 1, 2**40)
        for name in ("kv_pages", "max_model_len", "threads"):
            if getattr(self, name) is not None:
                _check_range(name, getattr(self, name), 1, 2**40)
        for name in ("max_step_ms", "max_step_stretch"):
            if (value := getattr(self, name)) is not None and not 0 < value < math.inf:
                raise ValueError(f"{name} must be a number above 0, or None for no bound; got {value}")
        if self.cpus is not None:
            cpu_list(self.cpus)
        if self.quantization not in (None, *get_args(Quantization)):
            raise ValueError(f'quantization must be "int8", "fp8" or None, got {self.quantization!r}')
        if self.kv_dtype not in get_args(KVDType):
            raise ValueError(f'kv_dtype must be "auto" or "fp8", got {self.kv_dtype!r}')
        if self.cuda_graphs not in get_args(CudaGraphs):
            raise ValueError(f'cuda_graphs must be "start", "lazy" or "off", got {self.cuda_graphs!r}')
        if self.policy not in POLICIES:
            raise ValueError(f"policy must be one of {', '.join(sorted(POLICIES))}; got {self.policy!r}")
        if not 0 < self.priority_half_life_s <= _LONGEST_HALF_LIFE_S:
            raise ValueError(
                f"priority_half_life_s must be above 0 and at most {_LONGEST_HALF_LIFE_S:g}, "
                f"got {self.priority_half_life_s}"
            )
        if not isinstance(self.speculation, Speculation | None):
            raise ValueError(f"speculation must be a Speculation or None, got {self.speculation!r}")
        if not 0 < self.kv_memory_share <= 1:
            raise ValueError(f"kv_memory_share must be in (0, 1], got {self.kv_memory_share}")
        if not 0 <= self.host_kv_gib < 2**20:
            raise ValueError(f"host_kv_gib must be in [0, {2**20}), got {self.host_kv_gib}")
        if self.preemption == "swap" and not self.host_kv_gib:
            raise ValueError('preemption is "swap", but host_kv_gib is 0: set it, or use "auto" or "recompute"')
        if self.max_step_tokens < self.max_running:
            raise ValueError(
                f"max_step_tokens must be at least max_running ({self.max_running}), as every running request "
                f"decodes one token per step; got {self.max_step_tokens}"
            )

    @property
    def name(self) -> str:
        """The model's name in the API."""
        return self.served_name or self.model


def _check_range(name: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise ValueError(f"{name} must be in [{low}, {high}], got {value}")
