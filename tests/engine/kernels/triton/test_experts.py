"""Experts in Triton's interpreter compared with torch: uneven loads, idle experts, ranks with some experts."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

pytest.importorskip("triton")
from engine.kernels.triton.expert_tiles import expert_tiles
from engine.kernels.triton.grouped_gemm import experts_mlp as triton_mlp
from engine.kernels.triton.route import route as triton_route
from engine.model_parts.experts_config import Clamp
from engine.models.experts import experts_mlp, route
from tests.engine.support.devices import DEVICE

EXPERTS, HIDDEN, INNER = 5, 40, 24


def everywhere(tokens: int, per_token: int) -> torch.Tensor:
    return torch.stack([torch.randperm(EXPERTS)[:per_token] for _ in range(tokens)])


def to_few(tokens: int, per_token: int) -> torch.Tensor:
    """Experts 1 and 3 get all tokens except one, experts 0 and 4 none."""
    chosen = torch.tensor([[3, 1]]).repeat(tokens, 1)
    chosen[0] = torch.tensor([2, 3])
    return chosen[:, :per_token]


def to_one(tokens: int, per_token: int) -> torch.Tensor:
    return torch.full((tokens, per_token), 4)


LOADS: dict[str, Callable[[int, int], torch.Tensor]] = {"everywhere": everywhere, "few": to_few, "one": to_one}


def inputs(tokens: int, per_token: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, ...]:
    x = torch.randn(tokens, HIDDEN, dtype=dtype)
    gate_up = (torch.randn(EXPERTS, 2 * INNER, HIDDEN) / HIDDEN**0.5).to(dtype)
    down = (torch.randn(EXPERTS, HIDDEN, INNER) / INNER**0.5).to(dtype)
    return x, torch.rand(tokens, per_token), gate_up, down


@pytest.fixture(autouse=True)
def numbers() -> Iterator[None]:
    """Tensors that are the same for each test, made where kernels run."""
    torch.manual_seed(0)
    with torch.device(DEVICE):
        yield


@pytest.mark.parametrize(("load", "per_token"), [("everywhere", 1), ("everywhere", 3), ("few", 2), ("one", 1)])
@pytest.mark.parametrize("tokens", [1, 37])
def test_experts_are_those_of_torch(load: str, per_token: int, tokens: int) -> None:
    x, weights, gate_up, down = inputs(tokens, per_token)
    chosen = LOADS[load](tokens, per_token)
    expected = experts_mlp(x, chosen, weights, gate_up, down, 0)
    torch.testing.assert_close(triton_mlp(x, chosen, weights, gate_up, down, 0), expected, rtol=1e-5, atol=1e-5)


def test_experts_whose_gates_go_through_gelu() -> None:
    """As Gemma 4 has them: shares are scaled for each expert, so that they do not sum up to one."""
    x, weights, gate_up, down = inputs(9, 2)
    given = x * 3, everywhere(9, 2), weights * 2.5, gate_up, down, 0
    found = triton_mlp(*given, is_gelu=True)
    torch.testing.assert_close(found, experts_mlp(*given, is_gelu=True), rtol=1e-5, atol=1e-5)
    assert not torch.allclose(found, experts_mlp(*given), rtol=0.01, atol=0.01)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_experts_of_half_the_width(dtype: torch.dtype) -> None:
    """Results are within a rounding or two of those in float32."""
    x, weights, gate_up, down = inputs(9, 2, dtype)
    chosen = everywhere(9, 2)
    expected = experts_mlp(x.float(), chosen, weights, gate_up.float(), down.float(), 0)
    result = triton_mlp(x, chosen, weights, gate_up, down, 0)
    assert result.dtype == dtype
    torch.testing.assert_close(result.float(), expected, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("first", [0, 2])
def test_clamped_experts_with_biases(first: int) -> None:
    """As gpt-oss has them: the limit cuts some gates and ups, and NaN stays NaN."""
    x, weights, gate_up, down = inputs(9, 2)
    biases = torch.randn(EXPERTS, 2 * INNER), torch.randn(EXPERTS, HIDDEN)
    x[3] = torch.nan
    held = slice(first, EXPERTS)
    given = gate_up[held], down[held], first, (biases[0][held].contiguous(), biases[1][held].contiguous())
    chosen, clamp = everywhere(9, 2), Clamp(1.7, 0.8)
    chosen[3] = torch.tensor([3, 4])
    expected = experts_mlp(x, chosen, weights, *given, clamp)
    found = triton_mlp(x, chosen, weights, *given, clamp)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5, equal_nan=True)
    assert found[3].isnan().all()


def test_many_tokens_in_large_tiles() -> None:
    """There are more pairs than the smallest tiles are for: two experts have full tiles and a partial one each."""
    tokens = 90
    x, weights, gate_up, down = inputs(tokens, 1)
    chosen = torch.arange(tokens)[:, None] // 70
    expected = experts_mlp(x, chosen, weights, gate_up[:2], down[:2], 0)
    result = triton_mlp(x, chosen, weights, gate_up[:2], down[:2], 0)
    torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-5)


def test_a_row_is_the_same_in_any_batch_and_wherever_it_lies() -> None:
    """Tiles of the same shape sum a row in the same order, alone or with others, and in a strided input."""
    x, weights, gate_up, down = inputs(7, 2)
    wide = torch.randn(7, 2 * HIDDEN)
    wide[:, :HIDDEN] = x
    chosen = everywhere(7, 2)
    together = triton_mlp(wide[:, :HIDDEN], chosen, weights, gate_up, down, 0)
    for row in range(7):
        mine = slice(row, row + 1)
        alone = triton_mlp(x[mine], chosen[mine], weights[mine], gate_up, down, 0)
        torch.testing.assert_close(alone, together[mine], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("compute", [experts_mlp, triton_mlp])
def test_ranks_with_some_experts_each_sum_up_to_all(compute: Callable[..., torch.Tensor]) -> None:
    x, weights, gate_up, down = inputs(11, 3)
    chosen = everywhere(11, 3)
    parts = [
        compute(x, chosen, weights, gate_up[first:end], down[first:end], first) for first, end in ((0, 2), (2, 5))
    ]
    expected = experts_mlp(x, chosen, weights, gate_up, down, 0)
    torch.testing.assert_close(parts[0] + parts[1], expected, rtol=1e-5, atol=1e-5)


def test_a_broken_row_breaks_no_other() -> None:
    x, _, gate_up, down = inputs(6, 2)
    router = torch.randn(EXPERTS, HIDDEN)
    expected = experts_mlp(x, *route(x @ router.T, 2, True), gate_up, down, 0)
    x[2] = torch.nan
    result = triton_mlp(x, *route(x @ router.T, 2, True), gate_up, down, 0)
    assert result[2].isnan().all()
    healthy = [0, 1, 3, 4, 5]
    torch.testing.assert_close(result[healthy], expected[healthy], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("renormalizes", [False, True])
@pytest.mark.parametrize(("count", "per_token"), [(128, 8), (60, 6), (3, 1), (4, 4)])
def test_experts_are_chosen_as_torch_chooses_them(count: int, per_token: int, renormalizes: bool) -> None:
    logits = 4 * torch.randn(9, count)
    logits[4] = torch.nan
    chosen, shares = triton_route(logits, per_token, renormalizes)
    expected, expected_shares = route(logits, per_token, renormalizes)
    healthy = [row for row in range(9) if row != 4]
    assert torch.equal(chosen[healthy], expected[healthy])
    torch.testing.assert_close(shares[healthy], expected_shares[healthy], rtol=1e-5, atol=1e-7)
    assert shares[4].isnan().all()
    assert len(set(chosen[4].tolist())) == per_token and chosen.max() < count
    assert triton_route(logits[:0], per_token, renormalizes)[0].shape == (0, per_token)


def test_the_first_of_equal_experts_is_chosen() -> None:
    chosen, _ = triton_route(torch.tensor([[1.0, 3.0, 3.0, 1.0, 3.0]], dtype=torch.bfloat16), 4, True)
    assert chosen.tolist() == [[1, 2, 4, 0]]


def test_no_tokens_make_no_tiles() -> None:
    x, weights, gate_up, down = inputs(0, 2)
    no_choices = torch.empty(0, 2, dtype=torch.int64)
    assert triton_mlp(x, no_choices, weights, gate_up, down, 0).shape == (0, HIDDEN)


def test_tiles_are_those_of_the_drawing() -> None:
    chosen = torch.tensor([[2, 0], [0, 3], [2, 0]])
    order, tiles = expert_tiles(chosen, 4, 0, 2)
    assert order.tolist() == [1, 2, 5, 0, 4, 3]
    used = [tile for tile in tiles.tolist() if tile[0] >= 0]
    assert used == [[0, 0, 2], [0, 2, 3], [2, 3, 5], [3, 5, 6]]
    assert all(expert == -1 for expert, *_ in tiles[len(used) :].tolist())


@pytest.mark.parametrize(("tokens", "first", "count", "rows"), [(1, 0, 5, 4), (600, 0, 5, 16), (23, 2, 2, 4)])
def test_every_pair_is_in_one_tile_of_its_expert(tokens: int, first: int, count: int, rows: int) -> None:
    """Some cases have more pairs than are examined at once."""
    chosen = everywhere(tokens, 3)
    order, tiles = expert_tiles(chosen, count, first, rows)
    seen: dict[int, list[int]] = {}
    for expert, start, end in tiles.tolist():
        if expert >= 0:
            assert 0 < end - start <= rows
            seen.setdefault(first + expert, []).extend(order[start:end].tolist())
    flat = chosen.flatten().tolist()
    for expert in range(first, first + count):
        assert seen.get(expert, []) == [pair for pair, theirs in enumerate(flat) if theirs == expert]


@pytest.mark.parametrize("tokens", [3, 37])
def test_pairs_in_no_slot_are_left_out(tokens: int) -> None:
    """With copies of experts, pairs that another rank computes have the slot after the last."""
    x, weights, gate_up, down = inputs(tokens, 2)
    chosen = everywhere(tokens, 2)
    chosen[::3] = EXPERTS
    chosen[1::3, 1] = EXPERTS
    expected = experts_mlp(x, chosen, weights, gate_up, down, 0)
    assert not expected[::3].any() and expected[1].any()
    torch.testing.assert_close(triton_mlp(x, chosen, weights, gate_up, down, 0), expected, rtol=1e-5, atol=1e-5)
