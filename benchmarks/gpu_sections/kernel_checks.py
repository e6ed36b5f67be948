"""Every kernel against what torch makes of the same numbers: the largest error, and whether that is rounding."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from itertools import product
from typing import NamedTuple

import torch

from benchmarks.gpu_sections.attention_cases import make_case
from benchmarks.gpu_sections.messages import Measurement
from benchmarks.gpu_sections.timing import synchronize
from cache import Namespace
from engine.attention.base import AttentionShape, consider
from engine.attention.kv_pages import FP8
from engine.layers.operations import Operations, Rotary
from engine.model_parts.rope import RopeConfig
from engine.models.torch_operations import TorchOperations
from engine.sampling.chooser import TorchChooser
from engine.values.request import Request
from engine.values.sampling_params import SamplingParams
from engine.values.sampling_row import SamplingRow

_TOLERANCE: Mapping[torch.dtype, float] = {torch.bfloat16: 0.04, torch.float16: 0.005}
"""Largest error beside a size of 1: sums are float32, and operands and results are rounded to the type."""
_FP8_STEP = 0.07
"""Half a step between neighbours of three bits, and what bfloat16 adds."""
_EQUAL_SHARE = 0.98
"""Share of sampled tokens: two of nearly equal probability may swap if sums are rounded differently."""


class Layout(NamedTuple):
    """Heads and pages; each is compiled anew."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    page_size: int = 16
    window: int | None = None
    dtype: torch.dtype = torch.bfloat16
    kv_dtype: torch.dtype = torch.bfloat16
    """Type of the pages: the same, or fp8."""
    latent: int | None = None
    """How many of a key's numbers are its value; None: values are separate."""

    @property
    def type_name(self) -> str:
        """Return the name of the types in the table."""
        return _short(self.dtype) if self.kv_dtype == self.dtype else f"{_short(self.dtype)}, KV fp8"

    @property
    def shape(self) -> AttentionShape:
        """What a backend is built for."""
        heads = self.num_heads, self.num_kv_heads, self.head_dim
        windows = frozenset({self.window})
        return AttentionShape(*heads, self.page_size, windows, self.kv_dtype, latent=self.latent)

    @staticmethod
    def rows(kind: str, is_tiny: bool) -> list[tuple[int, int]]:
        """Return the rows of a kind of batch: (positions before, tokens of the step)."""
        ends = [1, 63, 65, 200] if is_tiny else [1, 63, 64, 65, 777, 4095, 8200]
        decodes = [(end - 1, 1) for end in ends]
        extends = (
            [(0, 5), (40, 33)] if is_tiny else [(0, 2), (0, 130), (63, 2), (1000, 700), (8000, 257), (0, 2100)]
        )
        return {"decode": decodes, "extend": extends, "mixed": decodes[:3] + extends}[kind]

    def __str__(self) -> str:
        more = "" if self.window is None else f", window {self.window}"
        more += "" if self.latent is None else f", {self.latent} of which are values"
        return f"{self.num_heads}/{self.num_kv_heads} heads of {self.head_dim}, pages of {self.page_size}{more}"


_LAYOUTS = (
    Layout(16, 8, 128),
    Layout(32, 8, 128),
    Layout(40, 8, 128),
    Layout(14, 2, 64),
    Layout(32, 8, 128, page_size=64),
    Layout(32, 8, 128, page_size=1, window=100),
    Layout(32, 8, 128, dtype=torch.float16, kv_dtype=torch.float16),
    Layout(32, 8, 128, kv_dtype=FP8),
    Layout(16, 1, 576, page_size=64, latent=512),
    Layout(128, 1, 576, page_size=64, kv_dtype=FP8, latent=512),
)
_PACKAGES = ("flash_attn", "flashinfer")
_PACKAGED_LAYOUTS = (Layout(32, 8, 128),)
"""Layouts of checks of packages, some of which compile for a minute at first use."""
_TINY_LAYOUTS = (
    Layout(4, 2, 32),
    Layout(4, 2, 32, page_size=3, window=30, dtype=torch.float16, kv_dtype=torch.float16),
    Layout(4, 2, 32, kv_dtype=FP8),
    Layout(40, 1, 48, kv_dtype=FP8, latent=32),
)


class KernelChecks:
    """On one device. `is_tiny`: for Triton's interpreter, which is slow."""

    def __init__(self, device: torch.device, is_tiny: bool) -> None:
        self._device, self._is_tiny = device, is_tiny

    def attention(self) -> Iterator[Measurement]:
        """A line for each backend, kind of batch and type: the worst of all layouts."""
        layouts = _TINY_LAYOUTS if self._is_tiny else _LAYOUTS
        for name, _ in consider(layouts[0].shape, layouts[0].dtype, self._device):
            mine = _PACKAGED_LAYOUTS if name in _PACKAGES else layouts
            names = dict.fromkeys(layout.type_name for layout in mine)
            for type_name, kind in product(names, ("decode", "extend", "mixed")):
                what = f"attention, {kind}, {type_name}"
                some = [layout for layout in mine if layout.type_name == type_name]
                found = [line for layout in some for line in self._attend(what, name, kind, layout)]
                if found:
                    worst = max(found, key=lambda line: math.inf if line.error is None else line.error)
                    yield replace(worst, note=f"{worst.note}; of {len(found)} layouts")
                self._require_device()

    def _attend(self, what: str, name: str, kind: str, layout: Layout) -> Iterator[Measurement]:
        shape = layout.shape
        backend = dict(consider(shape, layout.dtype, self._device))[name]
        if isinstance(backend, str):
            return

        def error() -> float:
            case = make_case(layout.rows(kind, self._is_tiny), shape, layout.window, layout.dtype, self._device)
            step = backend(shape).prepare(case.batch, case.null_page)
            return _error(step.attend(case.pages, case.query, layout.window, case.scales), case.expected())

        yield self._checked(what, name, _TOLERANCE[layout.dtype], error, str(layout))

    def operations(self) -> Iterator[Measurement]:
        """What a layer computes beside attention and products."""
        checks = (
            ("add, norm", self._add_norm),
            ("norm, rotate, store", self._rotate),
            ("silu, multiply", self._silu),
        )
        for (name, check), dtype in product(checks, _TOLERANCE):
            yield self._checked(f"{name}, {_short(dtype)}", "triton", _TOLERANCE[dtype], partial(check, dtype))
            self._require_device()
        if not self._is_tiny:  # Triton 3.7's interpreter rounds 1.99 to 1.0 in fp8: it loses the carry
            stored = partial(self._rotate, torch.bfloat16, FP8)
            yield self._checked("norm, rotate, store, KV fp8", "triton", _FP8_STEP, stored)

    def sampler(self) -> Iterator[Measurement]:
        """Which tokens are chosen."""
        yield self._guarded("sampler", "triton", self._choices)

    def _operations(self, dtype: torch.dtype) -> tuple[Operations, TorchOperations, torch.Tensor]:
        """Triton's and torch's, the latter in float32, and a layer's pages."""
        from engine.models.triton_operations import TritonOperations

        shape = AttentionShape(8, 4, 32 if self._is_tiny else 128, 16, frozenset({None}))
        case = make_case([(70, 1), (3, 1), (20, 9)], shape, None, dtype, self._device)
        rope = RopeConfig(1e6)
        rotary = Rotary.of([rope], shape.head_dim, dtype, self._device)
        exact = TorchOperations(rotary._replace(dtype=torch.float32), case.batch)
        return TritonOperations(rotary, case.batch), exact, case.pages

    def _add_norm(self, dtype: torch.dtype) -> float:
        ours, exact, _ = self._operations(dtype)
        x, branch = self._random(dtype, 11, 96), self._random(dtype, 11, 96)
        weight = self._random(dtype, 96)
        # What is normed is the rounded sum: that is what the stream holds.
        summed, normed = exact.add_norm((x.float() + branch.float()).to(dtype).float(), None, weight.float(), 1e-6)
        found = ours.add_norm(x.clone(), branch, weight, 1e-6)
        return max(_error(found[0], summed), _error(found[1], normed))

    def _rotate(self, dtype: torch.dtype, kv_dtype: torch.dtype | None = None) -> float:
        ours, exact, pages = self._operations(dtype)
        pages = torch.zeros_like(pages, dtype=kv_dtype or dtype)
        heads, norm = self._random(dtype, 11, 16, pages.shape[-1]), self._random(dtype, 12, pages.shape[-1])
        written, expected_pages = pages.clone(), pages.float()  # in fp8 with scales of 1
        expected = exact.rotate_into(expected_pages, heads.float(), 0, norm.float(), 1e-6)
        found = ours.rotate_into(written, heads.clone(), 0, norm, 1e-6)
        return max(_error(found, expected), _error(written, expected_pages))

    def _silu(self, dtype: torch.dtype) -> float:
        ours, exact, _ = self._operations(dtype)
        gate_up = self._random(dtype, 11, 2 * 96)
        return _error(ours.silu_mul(gate_up), exact.silu_mul(gate_up.float()))

    def _choices(self) -> Measurement:
        """Triton's choices beside torch's, for the same logits and noise."""
        from engine.sampling.triton_chooser import TritonChooser

        kinds: list[dict[str, float | int]] = [
            {"temperature": 0.0},
            {"temperature": 0.6},
            {"top_p": 0.9},
            {"top_k": 50},
            {"temperature": 0.8, "top_k": 200, "top_p": 0.95},
            {"min_p": 0.05},
        ]
        num_rows, vocab_size = (6, 300) if self._is_tiny else (240, 151_936)
        logits = self._random(torch.float32, num_rows, vocab_size) * 3
        rows = [_row(SamplingParams(**kinds[at % len(kinds)]), at) for at in range(num_rows)]  # type: ignore[arg-type]
        found, expected = (chooser.choose(logits.clone(), rows) for chooser in (TritonChooser(), TorchChooser()))
        equal = int((found == expected).sum())
        note = f"{equal} of {num_rows} tokens are torch's, of {vocab_size}"
        return Measurement("sampler", by="triton", passed=equal >= _EQUAL_SHARE * num_rows, note=note)

    def _random(self, dtype: torch.dtype, *shape: int) -> torch.Tensor:
        generator = torch.Generator(self._device).manual_seed(sum(shape))
        return torch.randn(shape, generator=generator, device=self._device).to(dtype)

    def _checked(
        self, what: str, by: str, most: float, error: Callable[[], float], where: str = ""
    ) -> Measurement:
        def check() -> Measurement:
            found = error()
            note = f"error {found:.4f}, at most {most}" + (f"; {where}" if where else "")
            return Measurement(what, by=by, passed=found <= most, error=found, note=note)

        return self._guarded(what, by, check)

    def _guarded(self, what: str, by: str, check: Callable[[], Measurement]) -> Measurement:
        """A check that raises has failed."""
        try:
            return check()
        except Exception as raised:
            reason = " ".join(str(raised).split())[:300]
            return Measurement(what, by=by, passed=False, note=f"{type(raised).__name__}: {reason}")

    def _require_device(self) -> None:
        """Raise where a kernel has left the device unusable: the next section gets a new process."""
        synchronize(self._device)


def _error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest difference, divided by what was expected where that is above 1; infinite for NaN."""
    error = (found.float() - expected.float()).abs() / expected.float().abs().clamp(min=1)
    return float(error.nan_to_num(nan=torch.inf).max())


def _row(sampling: SamplingParams, seed: int) -> SamplingRow:
    request = Request.make(f"r{seed}", [0], sampling, arrival=0.0, seed=seed, namespace=Namespace("check"))
    return SamplingRow.of(request)


def _short(dtype: torch.dtype) -> str:
    return {torch.bfloat16: "bf16", torch.float16: "fp16"}[dtype]
