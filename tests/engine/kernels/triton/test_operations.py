"""Triton's fused operations compared with torch's: types, odd sizes, strides, and whole models."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.attention.batch import AttentionBatch
from engine.kernels.triton.fp8 import round_rows
from engine.kernels.triton.norm import add_norm, add_norm_fp8
from engine.kernels.triton.rope import rotate_into, rotations
from engine.kernels.triton.silu import gated_fp8, gelu_mul, silu_mul
from engine.layers.linear import Rounded, round_fp8
from engine.layers.operations import Rotary
from engine.model_parts.rope import RopeConfig
from engine.models.torch_operations import TorchOperations
from engine.models.triton_operations import TritonOperations
from engine.values.plan import StepPlan
from tests.engine.support.devices import DEVICE
from tests.engine.support.oracle import save_tiny
from tests.engine.support.steps_by_hand import RequestByHand, load_runner, pages_of, random_prompt

TYPES = [torch.float32, torch.bfloat16, torch.float16]
_ROUNDING = {torch.float32: 1e-5, torch.bfloat16: 0.03, torch.float16: 0.004}
"""Tolerance for numbers around 3, which the torch operations round after each of their parts."""


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(DEVICE, dtype)


def close(mine: torch.Tensor, other: torch.Tensor) -> None:
    torch.testing.assert_close(mine, other, atol=_ROUNDING[other.dtype], rtol=_ROUNDING[other.dtype])


@dataclass(frozen=True)
class Heads:
    """A step's heads and pages, and its tokens' slots."""

    queries: int = 3
    kv: int = 2
    dim: int = 32
    page_size: int = 4
    slots: Sequence[int] = (7, 0, 21, 8)

    def rotary(self, dtype: torch.dtype) -> Rotary:
        return Rotary.of([RopeConfig(1000.0, attention_factor=1.1), None], self.dim, dtype, DEVICE)

    def batch(self) -> AttentionBatch:
        """Return a batch with only what operations read: slots and positions."""
        slots = torch.tensor(self.slots, device=DEVICE)
        positions = torch.arange(len(self.slots), device=DEVICE) * 300 + 5
        return AttentionBatch(0, [], [], slots, slots, slots, slots, positions)

    def pages(self, dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(2, 6, self.page_size, self.kv, self.dim, device=DEVICE).to(dtype)

    def heads(self, dtype: torch.dtype) -> torch.Tensor:
        return random(len(self.slots), self.queries + 2 * self.kv, self.dim, dtype=dtype)

    def norm(self, dtype: torch.dtype) -> torch.Tensor:
        return random(self.queries + self.kv, self.dim, dtype=dtype, seed=1)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 1), (3, 96), (2, 1000), (5, 2048)], ids=str)
@pytest.mark.parametrize("has_branch", [True, False])
def test_add_norm(dtype: torch.dtype, shape: tuple[int, int], has_branch: bool) -> None:
    rows, size = shape
    x = random(rows, size + 3, dtype=dtype)[:, 2 : size + 2]  # rows that do not touch
    branch = random(rows, 2 * size, dtype=dtype, seed=1)[:, size:] if has_branch else None
    weight = random(size, dtype=dtype, seed=2)
    other = TorchOperations(Heads().rotary(dtype), Heads().batch())
    expected, expected_normed = other.add_norm(x.clone(), branch, weight, 1e-5)
    normed = add_norm(x, branch, weight, 1e-5)
    if dtype != torch.bfloat16 or x.is_cuda:  # the interpreter cuts bits off where GPUs round
        assert torch.equal(x, expected)  # the stream is rounded alike, or errors would add up over layers
    close(x, expected)
    close(normed, expected_normed)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 1), (3, 96), (2, 1500)], ids=str)
def test_rounding_to_float8_in_a_kernel_gives_the_numbers_of_the_separate_form(
    dtype: torch.dtype, shape: tuple[int, int]
) -> None:
    """Bit for bit: of norms and of gated activations, rows of zeros and rows with large numbers among them."""
    rows, size = shape
    x, branch = random(rows, size, dtype=dtype), random(rows, size, dtype=dtype, seed=1)
    x[-1] *= 1000
    branch[0] = -x[0]
    weight = random(size, dtype=dtype, seed=2)
    for added in (None, branch):
        separate = x.clone(), x.clone()
        expected = round_fp8(add_norm(separate[0], added, weight, 1e-5))
        same_rounded(add_norm_fp8(separate[1], added, weight, 1e-5), expected)
        assert torch.equal(*separate)
    same_rounded(round_rows(x), round_fp8(x))
    gate_up = random(rows, 2 * size, dtype=dtype) * 3
    gate_up[0, size:] = 0
    same_rounded(gated_fp8(gate_up, is_gelu=False), round_fp8(silu_mul(gate_up)))
    same_rounded(gated_fp8(gate_up, is_gelu=True), round_fp8(gelu_mul(gate_up)))


@pytest.mark.parametrize("size", [128, 384])
def test_blocks_of_a_row_are_rounded_by_scales_of_their_own(size: int) -> None:
    """Bit for bit, as `round_fp8` does it; one block of a row is zero, and one is large."""
    x, weight = random(3, size, dtype=torch.bfloat16), random(size, dtype=torch.bfloat16, seed=2)
    x[1, :128] = 0
    x[2, -128:] *= 1000
    same_rounded(round_rows(x, 128), round_fp8(x, 128))
    same_rounded(add_norm_fp8(x.clone(), None, weight, 1e-5, 128), round_fp8(add_norm(x, None, weight, 1e-5), 128))
    gate_up = random(3, 2 * size, dtype=torch.bfloat16) * 3
    same_rounded(gated_fp8(gate_up, 128, is_gelu=False), round_fp8(silu_mul(gate_up), 128))


def same_rounded(mine: tuple[torch.Tensor, torch.Tensor], other: tuple[torch.Tensor, torch.Tensor]) -> None:
    for ours, theirs in zip(mine, other, strict=True):
        assert ours.dtype == theirs.dtype
        assert torch.equal(ours.float(), theirs.float())


def test_a_row_that_is_no_number_stays_none_when_it_is_rounded() -> None:
    x = random(2, 40)
    x[0, 3] = torch.nan
    numbers, scale = add_norm_fp8(x, None, random(40), 1e-5)
    assert (numbers.float() * scale[:, None]).isnan().any(1).tolist() == [True, False]


def test_add_norm_names_the_tensor_that_it_cannot_read() -> None:
    with pytest.raises(ValueError, match="branch: a row's numbers must be contiguous"):
        add_norm(random(4, 8), random(8, 4).t(), random(8), 1e-5)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 1), (3, 96), (2, 1500)], ids=str)
def test_gated_activations(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    rows, inner = shape
    gate_up = random(rows, 2 * inner, dtype=dtype) * 3
    gate_up[0, 0] = -200.0  # its exponential is infinite
    other = TorchOperations(Heads().rotary(dtype), Heads().batch())
    close(silu_mul(gate_up), other.silu_mul(gate_up))
    close(silu_mul(gate_up.t().contiguous().t()), other.silu_mul(gate_up))
    close(gelu_mul(gate_up), other.gelu_mul(gate_up))


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize(("has_norm", "rope"), [(True, 0), (False, 0), (True, 1)])
@pytest.mark.parametrize(
    "case",
    [
        Heads(),
        Heads(queries=1, kv=1, dim=2, slots=(5,)),
        Heads(queries=8, kv=1, dim=24, page_size=1, slots=(3, 0)),
        Heads(queries=6, kv=6, dim=96, page_size=16),
        Heads(queries=16, kv=8, dim=64),
    ],
    ids=str,
)
def test_rotate_into(dtype: torch.dtype, has_norm: bool, rope: int, case: Heads) -> None:
    norm = case.norm(dtype) if has_norm else None
    made = []
    for kind in (TorchOperations, TritonOperations):
        pages, heads = case.pages(dtype), case.heads(dtype)
        query = kind(case.rotary(dtype), case.batch()).rotate_into(pages, heads, rope, norm, 1e-5)
        made.append((query, pages))
    (expected, expected_pages), (query, pages) = made
    close(query, expected)
    close(pages, expected_pages)
    assert torch.equal(pages[1], expected_pages[1])  # values are copied


def test_rotate_into_pages_of_any_strides_from_heads_of_any() -> None:
    case, dtype = Heads(dim=16), torch.float32
    heads = random(*case.heads(dtype).shape[::-1]).permute(2, 1, 0)
    expected = case.pages(dtype)
    other = TorchOperations(case.rotary(dtype), case.batch())
    expected_query = other.rotate_into(expected, heads.clone(), 0, None, 0.0)
    by_head = torch.zeros(6, case.kv, 2, case.dim, case.page_size, device=DEVICE).permute(2, 0, 4, 1, 3)
    angles = rotations(case.batch().positions, *case.rotary(dtype))[0]
    query = rotate_into(by_head, case.batch().slot_mapping, heads, angles)
    close(query, expected_query)
    close(by_head, expected)


def test_a_token_without_a_slot_stores_nothing() -> None:
    """Padding rows of a graph's batch have no slot; their queries are rotated like any other."""
    case, dtype = Heads(slots=(-1, 2)), torch.float32
    pages, heads = case.pages(dtype), case.heads(dtype)
    operations = TritonOperations(case.rotary(dtype), case.batch())
    query = operations.rotate_into(pages, heads, 0, None, 0.0).clone()
    slots = pages.flatten(1, 2)
    assert slots[:, 2].all() and not slots[:, :2].any() and not slots[:, 3:].any()
    close(query, TorchOperations(case.rotary(dtype), case.batch()).rotate(case.heads(dtype), 0)[:, :3])


@pytest.mark.parametrize("scales", [(1.0, 1.0), (0.5, 0.125)])
def test_pages_of_eight_bits_hold_scaled_and_clamped_numbers(scales: tuple[float, float]) -> None:
    """The numbers fit in eight bits, as the interpreter rounds differently from GPUs; nothing is rotated."""
    case, dtype = Heads(), torch.bfloat16
    pages = case.pages(torch.float8_e4m3fn)
    heads = (case.heads(dtype) * 5).round().clamp(-15, 15) / 8
    heads[0, -1], heads[1, -1] = 1000.0, -1000.0
    expected = case.pages(torch.float32)
    slots, divided = expected.flatten(1, 2), heads[:, case.queries :].float().unflatten(1, (2, case.kv))
    slots[:, list(case.slots)] = divided.transpose(0, 1) / torch.tensor(scales, device=DEVICE)[:, None, None, None]
    _, at_zero = rotations(torch.zeros_like(case.batch().positions), *case.rotary(dtype))
    rotate_into(pages, case.batch().slot_mapping, heads, at_zero, kv_scales=scales)
    assert torch.equal(pages.float(), expected.clamp(-448, 448))


# Families differ in more, but in nothing that a kernel computes, such as the names of weights.
@pytest.mark.parametrize(
    "family", ["llama_biased", "mistral", "qwen3", "mqa", "mixtral", "qwen3_moe", "phi3", "gemma3"]
)
def test_a_whole_model_computes_the_same(family: str, tmp_path: Path) -> None:
    model = save_tiny(family, tmp_path, num_hidden_layers=2)
    expected, found = (logits_by(kind, model) for kind in (TorchOperations, TritonOperations))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


class SeparateRounding(TritonOperations):
    """Rounds what kernels have computed: seven more kernels for each layer that reads it."""

    def add_norm_fp8(self, *args: Any) -> tuple[torch.Tensor, Rounded]:
        x, normed = self.add_norm(*args[:4])
        return x, Rounded.of(normed, args[4])

    def gated_fp8(self, gate_up: torch.Tensor, inputs: int, *, is_gelu: bool) -> Rounded:
        return Rounded.of(self.gelu_mul(gate_up) if is_gelu else self.silu_mul(gate_up), inputs)


@pytest.mark.parametrize("family", ["qwen3", "gemma3", "olmo2"])
def test_a_model_in_float8_computes_the_same_with_fewer_kernels(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit for bit. Of a layer's four matrices only the output projection rounds its input in kernels of their own,
    and with OLMo 2 all that read the stream, which it does not norm.
    """
    model = save_tiny(family, tmp_path, num_hidden_layers=2)
    counts = []
    round_alone = Rounded.of
    for kind in (SeparateRounding, TritonOperations):
        rounded: list[torch.Tensor] = []
        with monkeypatch.context() as patch:
            patch.setattr(Rounded, "of", lambda x, inputs, seen=rounded: seen.append(x) or round_alone(x, inputs))
            counts.append((logits_by(kind, model, quantization="fp8"), len(rounded)))
    (expected, separate), (found, fused) = counts
    assert torch.equal(found, expected)
    num_steps, num_layers = 2, 2
    assert separate == num_steps * num_layers * 4
    assert fused == num_steps * num_layers * (3 if family == "olmo2" else 1)


def logits_by(kind: Callable[..., Any], model: Path, **settings: Any) -> torch.Tensor:
    """Compute a prompt, then a decode beside another prompt. Without graphs: on a GPU they are recorded while the
    model is loaded, with its own operations.
    """
    runner = load_runner(model, attention="reference", kv_tokens=128, cuda_graphs="off", **settings)
    config, decoder = runner.model_config, runner.decoder
    rotary = Rotary.of(config.ropes, config.head_dim, runner.kv_dtype, runner.device)
    decoder.operations = partial(kind, rotary)  # type: ignore[union-attr]
    a, b = (
        RequestByHand(random_prompt(4, 1), pages_of(16, 0, 32)),
        RequestByHand(random_prompt(3, 2), pages_of(16, 64, 16)),
    )
    first = runner.logits(StepPlan((a.chunk(),)))
    a.request.tokens.append(5)
    return torch.cat([first, runner.logits(StepPlan((a.chunk(), b.chunk())))])
