"""Checks and times the prompts and decodes of one gated delta net, with the sizes of Qwen3-Next."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch

from benchmarks.gpu_sections.foreign_kernels import gated_delta_rule
from benchmarks.gpu_sections.limits import Rates
from benchmarks.gpu_sections.messages import Measurement
from benchmarks.gpu_sections.timing import recorded_seconds_of, seconds_of
from engine.attention.pinned import to_device
from engine.attention.state_batch import StateBatch, StateRow
from engine.attention.state_slots import LayerState
from engine.model_parts.parts import DeltaNetConfig
from engine.models.native_delta_net import DeltaInputs
from engine.models.torch_delta_net import TorchDeltaHeads

_QWEN3_NEXT = DeltaNetConfig(16, 32, 128, 128, 4)
_TINY = DeltaNetConfig(2, 4, 16, 32, 4)
_MOST = 0.03
"""Largest norm of a token's error, divided by the norm of its result. In bfloat16, the outputs of the convolution,
of norms and of gates are rounded. Single numbers of long prompts may be off by more."""
_EPS = 1e-6


class Recurrent:
    """On one device."""

    def __init__(self, device: torch.device, rates: Rates, *, is_tiny: bool) -> None:
        self._device, self._rates = device, rates
        self._shape = _TINY if is_tiny else _QWEN3_NEXT
        self._lengths = (70,) if is_tiny else (512, 2048, 8192)
        self._counts = (3,) if is_tiny else (1, 32, 128)
        self._generator = torch.Generator(device).manual_seed(0)

    def all(self) -> Iterator[Measurement]:
        """Yield a line for each way to compute a prompt, and for each number of decodes."""
        for length in self._lengths:
            yield from self._prompt(length)
        for count in self._counts:
            yield self._decodes(count)

    def _prompt(self, length: int) -> Iterator[Measurement]:
        from engine.kernels.triton.delta_prompts import advance_rows, convolve
        from engine.models.triton_delta_net import TritonDeltaHeads

        shape, conv, norm = (
            self._shape,
            self._random(self._shape.channels, 4) / 2,
            self._random(self._shape.value_dim),
        )
        heads, by_torch = (kind(shape, conv, norm, _EPS) for kind in (TritonDeltaHeads, TorchDeltaHeads))
        z = self._random(length, shape.values)
        decay, strength = (self._random(length, shape.num_value_heads).float().sigmoid() for _ in range(2))
        mixed = self._random(length, shape.channels)
        inputs = DeltaInputs(mixed, -decay, strength)
        batch = to_device(StateBatch.of([StateRow(0, 0, length, 1, 0, 0, False, ())], length), self._device)
        assert batch.pieces is not None
        state = self._state(2)  # The first slot is only written.
        wide = DeltaInputs(*(part.float() for part in inputs))
        float32 = TorchDeltaHeads(shape, conv.float(), norm.float(), _EPS)
        copy = LayerState(state.inputs.float(), state.matrices.clone(), state.drafts)
        expected = float32.run(wide, z.float(), copy, batch)
        convolved, _ = convolve(mixed, conv, state.inputs, batch.pieces)
        advance = partial(advance_rows, state.matrices, convolved, -decay, strength, batch.pieces)
        ways: list[tuple[str, str, Callable[[], torch.Tensor]]] = [
            ("triton", "", lambda: heads.run(inputs, z, state, batch)),
            ("torch", "", lambda: by_torch.run(inputs, z, state, batch)),
            ("triton", ", recurrence alone", advance),
        ]
        note = ""
        try:
            found = gated_delta_rule(convolved, -decay, strength, shape, state.matrices[1])
            found()  # The package compiles, and tries what is fastest.
            ways.append(("fla", ", recurrence alone", found))
        except Exception as failure:  # It may not be installed, or not be made for this torch.
            note = f"left out: {type(failure).__name__}: {str(failure)[:150]}"
        for by, part, call in ways:
            right = advance().flatten(1) if part else expected
            off = (call().flatten(1).float() - right.float()).norm(dim=1) / right.float().norm(dim=1)
            error = float(off.nan_to_num(nan=torch.inf).max())
            seconds = seconds_of(call, self._device, tries=3, calls=2)
            yield Measurement(
                f"delta net, {length} tokens{part}",
                by=by,
                ms=1000 * seconds,
                passed=error <= _MOST,
                error=error,
                note=f"error {error:.4f}, at most {_MOST}, beside {'triton' if part else 'torch in float32'}",
            )
        if note:
            yield Measurement(f"delta net, {length} tokens, recurrence alone", by="fla", note=note)

    def _decodes(self, count: int) -> Measurement:
        """All rows advance in place, from the convolution to the gated norm; the states are more than the cache
        holds.
        """
        from engine.models.triton_delta_net import TritonDeltaHeads

        shape, slots = self._shape, torch.arange(count, device=self._device)
        heads = shape.num_value_heads
        conv, norm = self._random(shape.channels, 4) / 2, self._random(shape.value_dim)
        decay, strength = (self._random(count, heads).float().sigmoid() for _ in range(2))
        inputs = DeltaInputs(self._random(count, shape.channels), -decay, strength)
        z = self._random(count, shape.values)
        float32 = TorchDeltaHeads(shape, conv.float(), norm.float(), _EPS)
        ours = self._state(count)
        theirs = LayerState(ours.inputs.float(), ours.matrices.clone(), ours.drafts)
        wide = DeltaInputs(*(part.float() for part in inputs))
        expected = float32.step(wide, z.float(), theirs, slots, slots)
        by_kernels = TritonDeltaHeads(shape, conv, norm, _EPS)
        found = by_kernels.step(inputs, z, ours, slots, slots)
        off = (found.float() - expected).norm(dim=1) / expected.norm(dim=1)
        error = float(off.nan_to_num(nan=torch.inf).max())
        states = [self._state(count) for _ in range(4)]
        calls = [partial(by_kernels.step, inputs, z, some, slots, slots) for some in states]
        seconds = recorded_seconds_of(calls, self._device)
        least = partial(
            Rates.least, num_bytes=2 * count * heads * shape.key_dim * shape.value_dim * 4, operations=0
        )
        return Measurement(
            f"delta net, decodes of {count}",
            by="triton",
            ms=1000 * seconds,
            **self._rates.shares(least, seconds),
            passed=error <= _MOST,
            error=error,
            note=f"error {error:.4f}, at most {_MOST}, beside torch in float32",
        )

    def _state(self, num_slots: int) -> LayerState:
        """Random states of so many slots, and an empty one."""
        shape = self._shape
        sizes = num_slots + 1, shape.num_value_heads, shape.key_dim, shape.value_dim
        matrices = torch.zeros(sizes, device=self._device)
        matrices[:-1].normal_(std=0.1, generator=self._generator)
        inputs = torch.zeros(num_slots + 1, shape.kernel - 1, shape.channels, device=self._device)
        return LayerState(inputs.to(torch.bfloat16), matrices, torch.empty(0))

    def _random(self, *shape: int) -> torch.Tensor:
        drawn = torch.randn(shape, generator=self._generator, device=self._device)
        return drawn.to(torch.bfloat16)
