"""The interface between the decoder and an attention implementation, and the choice of an implementation."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Protocol, cast

import torch

from engine.attention.batch import AttentionBatch
from engine.attention.kv_pages import UNSCALED, KVScales
from engine.attention.packages import capability
from engine.model_parts.parts import AttentionConfig


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """The heads, windows and pages that a backend is built for."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    windows: frozenset[int | None]
    """The sliding windows that occur in the model's layers, in positions; None is full attention."""
    kv_dtype: torch.dtype | None = None
    """Type of the numbers in pages; None for the model's type."""
    factor: float | None = None
    """Factor of the scores before the softmax; None: one over the root of head_dim."""
    soft_cap: float | None = None
    """Scores, times their factor, are cap * tanh(score / cap); None: unchanged."""
    has_sinks: bool = False
    """Whether each head has a sink: a score in the softmax without a value."""
    is_cascade: bool = True
    """Whether rows whose page tables begin alike attend to their shared prefix together, if the backend can."""
    latent: int | None = None
    """How many of a key's numbers are also its value, and the size of a head's result; None: separate values."""
    needs_sums: bool = False
    """Whether the backend has to return the sums of its weights, too (`StepWithSums`)."""

    @classmethod
    def of(
        cls,
        attention: AttentionConfig,
        windows: frozenset[int | None],
        page_size: int,
        kv_dtype: torch.dtype | None = None,
        is_cascade: bool = True,
    ) -> AttentionShape:
        """Return the shape of a model's attention."""
        heads = attention.num_heads, attention.num_kv_heads, attention.head_dim
        rest = attention.scale, attention.soft_cap, attention.has_sinks
        return cls(*heads, page_size, windows, kv_dtype, *rest, is_cascade, attention.latent)

    @property
    def scale(self) -> float:
        """Factor of the scores before the softmax."""
        return float(self.head_dim**-0.5) if self.factor is None else self.factor

    @property
    def heads(self) -> tuple[int, int, int, int | None]:
        """Query heads, KV heads, numbers of a key, and how many of them are its value (`latent`)."""
        return self.num_heads, self.num_kv_heads, self.head_dim, self.latent

    @property
    def value_dim(self) -> int:
        """Numbers of a value, and of a head's result."""
        return self.head_dim if self.latent is None else self.latent

    @property
    def unusual(self) -> str | None:
        """The property of the scores that not every backend supports; None if there is none."""
        if self.latent is not None:
            return "latent KV (MLA)"
        if self.soft_cap is not None:
            return "scores with a soft cap"
        return "attention sinks" if self.has_sinks else None


class AttentionStep(Protocol):
    """One step's prepared batch, called once per layer. `prepare` has computed the data that all layers share.

    Backends read KV and never write it: the decoder stores a layer's KV before attention (`store_kv`, or a fused
    kernel).
    """

    @property
    def batch(self) -> AttentionBatch:
        """The batch that was prepared."""

    def attend(
        self,
        pages: torch.Tensor,
        query: torch.Tensor,
        window: int | None,
        scales: KVScales = UNSCALED,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Compute the attention of one layer.

        pages: [2, num_pages + 1, page_size, num_kv_heads, head_dim], including the step's own KV; [1, ...] if
            values are part of keys (`AttentionShape.latent`)
        query: [N, num_heads, head_dim]; dim 0 may be strided
        window: a query at position p sees positions p - window + 1 .. p; None: 0 .. p
        scales: the layer's keys and values are the numbers in the pages times these
        sinks: [num_heads], a score for each head, if the model has any
        Returns [N, num_heads * value_dim], contiguous.
        """


class StepWithSums(AttentionStep, Protocol):
    """A step whose results can be merged with those of other positions (context parallelism)."""

    def attend_with_sums(
        self, pages: torch.Tensor, query: torch.Tensor, scales: KVScales = UNSCALED
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute the attention of one layer without a window or sinks, as `attend` does.

        Returns [N, num_heads, value_dim], and the logarithms of the sums of the weights before they are
        normalised, float32 [N, num_heads]: for a token that sees no position, zeros and -inf.
        """


class AttentionBackend(Protocol):
    """Attention over paged KV for one model on one device. Holds no state of any batch."""

    name: str
    is_capturable: bool
    """Whether a decode step depends only on its batch's tensors, their shapes and bounds of `kv_lens_host`: a CUDA
    graph of it then stays valid when the tensors' values change."""
    captures_prompts: bool
    """The same for steps in which rows have several tokens."""
    plans_by_bounds: bool
    """Whether launches depend on how large these bounds are, so that a graph recorded for the longest contexts is
    slow on short ones."""
    spreads_prompts: bool
    """Whether a step with few tokens of a prompt may have a row for each of them, because it reads the prefix that
    they share once."""

    def __init__(self, shape: AttentionShape) -> None: ...

    @staticmethod
    def unavailable(shape: AttentionShape, dtype: torch.dtype, device: torch.device) -> str | None:
        """Return why this backend cannot compute such heads in `dtype` on `device`; None when it can."""

    def prepare(self, batch: AttentionBatch, null_page: int) -> AttentionStep:
        """Compute the data that all layers of a step share. `null_page` is always zero: gather it for padding."""


_FEW = 16
"""Most tokens of a row that is no prompt: a decode with its draft tokens, or the end of a prompt."""


class HybridAttention:
    """One backend for steps with prompts, and another for steps of decodes and their draft tokens, on the same
    pages. Recorded steps have no prompts.
    """

    def __init__(self, prompts: AttentionBackend, decodes: AttentionBackend) -> None:
        self._prompts, self._decodes = prompts, decodes
        self.name = f"{prompts.name},{decodes.name}"
        self.is_capturable, self.plans_by_bounds = decodes.is_capturable, decodes.plans_by_bounds
        self.captures_prompts, self.spreads_prompts = decodes.captures_prompts, decodes.spreads_prompts

    @staticmethod
    def unavailable(shape: AttentionShape, dtype: torch.dtype, device: torch.device) -> str | None:
        """Return that it cannot be chosen by itself; its parts report whether they can run."""
        return "it consists of two other backends"

    def prepare(self, batch: AttentionBatch, null_page: int) -> AttentionStep:
        """Let one of the two prepare the step; it computes all of the step's rows."""
        has_prompts = not batch.is_bounded and max(batch.query_lens) > _FEW
        return (self._prompts if has_prompts else self._decodes).prepare(batch, null_page)


logger = logging.getLogger(__name__)

_BACKENDS = (
    ("native", "engine.attention.native", "NativeAttention"),
    ("triton", "engine.attention.triton", "TritonAttention"),
    ("flash_attn", "engine.attention.flash_attn", "FlashAttention"),
    ("flashinfer", "engine.attention.flashinfer", "FlashInferAttention"),
    ("cudnn", "engine.attention.cudnn", "CudnnAttention"),
    ("reference", "engine.attention.reference", "ReferenceAttention"),
)
"""Name, module and class of each backend, the best first. A module is imported only when it is considered."""
_WITH_SUMS = ("triton", "reference")
"""Backends whose steps are `StepWithSums`."""
_OURS = "triton"
_LAST_ON_CPUS = _OURS
"""Backend that is considered last on CPUs, where it runs in an interpreter for tests."""

RAN_ON_GPUS = frozenset({"triton", "cudnn", "reference"})
"""Backends that have run on a GPU here (docs/engine.md lists GPUs and dates). On GPUs, "auto" takes no other."""

_FOR_PROMPTS = {9: ("cudnn", "cuDNN has kernels for Hopper GPUs, for many tokens of a prompt")}
"""By a GPU's generation, the first number of its compute capability: the backend whose kernels for prompts were
measured to be faster than our own, and why."""
_WHY_OURS = "Triton for decodes, because CUDA graphs support it and it reads shared prefixes once"


def choose_backend(name: str, shape: AttentionShape, dtype: torch.dtype, device: torch.device) -> AttentionBackend:
    """Return the backend called `name`: of two names with a comma between them, one for steps with prompts and one
    for decodes; for "auto", the choice of `preferred` among those that import and run. Raises ValueError.
    """
    prompts, comma, decodes = name.partition(",")
    if comma:
        first, second = (_named(part.strip(), shape, dtype, device) for part in (prompts, decodes))
        return HybridAttention(first, second)
    if name != "auto":
        return _named(name, shape, dtype, device)
    usable, refused = sorted_out(shape, dtype, device)
    reasons = [f"{label}: {reason}" for label, reason in refused.items()]
    if not usable:
        raise ValueError(f"attention: auto cannot run on {device}: {'; '.join(reasons)}")
    for reason in reasons:
        logger.info("attention: not %s", reason)
    for label in usable:
        if device.type == "cuda" and label not in RAN_ON_GPUS:
            logger.info("attention: not %s: it has not run on a GPU yet, and runs only if it is named", label)
    chosen, why = preferred(usable, device)
    logger.info("attention: %s (%s)", chosen, why)
    return choose_backend(chosen, shape, dtype, device)


def preferred(usable: Sequence[str], device: torch.device) -> tuple[str, str]:
    """Return the name that "auto" stands for, and why. `usable`: backends that run, the best first; among them
    "reference", which always does.

    On GPUs only those count that have run on one. On GPUs for which one's kernels for prompts are faster than our
    own, that one computes prompts.
    """
    if device.type != "cuda":
        return usable[0], "the first that runs, in order of preference"
    proven = [label for label in usable if label in RAN_ON_GPUS]
    if proven[0] != _OURS or (gpu := capability(device)) is None:
        return proven[0], "the first that runs of those that have run on a GPU, in order of preference"
    label, why = _FOR_PROMPTS.get(gpu[0], ("", ""))
    if label in proven:
        return f"{label},{_OURS}", f"{why}; {_WHY_OURS}"
    return _OURS, f"no backend that runs was measured to be faster at compute capability {gpu[0]}.{gpu[1]}"


def _named(name: str, shape: AttentionShape, dtype: torch.dtype, device: torch.device) -> AttentionBackend:
    """Return the backend of this name. Raises ValueError if there is none, or it cannot run."""
    known = [label for label, _, _ in _BACKENDS]
    if name not in known:
        raise ValueError(
            f"attention: no backend is called {name!r}; choose one of auto, {', '.join(known)}, or two of them "
            "with a comma between them, for steps with prompts and for decodes"
        )
    [(_, backend)] = consider(shape, dtype, device, name)
    if isinstance(backend, str):
        raise ValueError(
            f"attention: {name} cannot run on {device}: {name}: {backend}; "
            'or set attention to "auto", which chooses the best one that runs'
        )
    return backend(shape)


def sorted_out(
    shape: AttentionShape, dtype: torch.dtype, device: torch.device
) -> tuple[list[str], dict[str, str]]:
    """Return the names of the backends that run, the best first, and why each of the others cannot."""
    found = dict(consider(shape, dtype, device))
    usable = [label for label, backend in found.items() if not isinstance(backend, str)]
    return usable, {label: reason for label, reason in found.items() if isinstance(reason, str)}


def consider(
    shape: AttentionShape, dtype: torch.dtype, device: torch.device, only: str | None = None
) -> Iterator[tuple[str, type[AttentionBackend] | str]]:
    """Yield each backend's name, the best first, and its class or why it cannot run; `only` selects one."""
    order = sorted(_BACKENDS, key=lambda entry: entry[0] == _LAST_ON_CPUS) if device.type == "cpu" else _BACKENDS
    for label, module, class_name in order:
        if only not in (None, label):
            continue
        try:
            backend = cast("type[AttentionBackend]", getattr(import_module(module), class_name))
            reason = backend.unavailable(shape, dtype, device)
            if shape.needs_sums and label not in _WITH_SUMS:
                reason = "it does not return the sums by which parts of a request's KV are merged"
        except ImportError as error:
            reason = str(error)
        yield label, backend if reason is None else reason
