"""Attention to a part of the positions, with the sums of weights by which parts are merged."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")
from engine.attention.base import choose_backend
from tests.engine.support.devices import DEVICE
from tests.engine.support.paged_kv import Heads, Paged

ROWS = {
    "decodes": [(0, 1), (70, 1), (5, 1)],
    "prompts": [(3, 1), (70, 20), (0, 33), (130, 2)],
    "a few tokens after many": [(1100, 1), (1500, 5), (1100, 3)],
}
BACKENDS = [("reference", None), ("reference", 16), ("triton", None), ("triton", 16)]


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("rows", ROWS.values(), ids=list(ROWS))
@pytest.mark.parametrize("group", [1, 6])
@pytest.mark.parametrize(("name", "latent"), BACKENDS)
def test_results_come_with_their_sums(
    name: str, latent: int | None, group: int, rows: list[tuple[int, int]], is_causal: bool
) -> None:
    heads = Heads(group, 1, 48, latent)
    case = Paged(rows, heads, 16, None, torch.float32, needs_sums=True, is_causal=is_causal, device=DEVICE)
    out, sums = case.attend_with_sums(choose_backend(name, case.shape, torch.float32, DEVICE))
    torch.testing.assert_close(out.flatten(1).double(), case.expected(), atol=2e-5, rtol=2e-5)
    torch.testing.assert_close(sums.double(), case.expected_sums(), atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize(("name", "latent"), BACKENDS)
def test_a_row_of_which_another_rank_has_all_positions_has_no_weight(name: str, latent: int | None) -> None:
    case = Paged([(9, 1), (70, 1), (9, 3)], Heads(4, 1, 32, latent), 16, None, torch.float32, needs_sums=True)
    lens = [0, 71, 0]
    on_device = torch.tensor(lens, dtype=torch.int32)
    case.batch = replace(case.batch, kv_lens_host=lens, kv_lens=on_device, is_causal=False)
    expected = case.expected()[1]
    out, sums = case.attend_with_sums(choose_backend(name, case.shape, torch.float32, DEVICE))
    others = [0, 2, 3, 4]
    assert not out[others].any() and (sums[others] == -torch.inf).all()
    torch.testing.assert_close(out[1].flatten().double(), expected, atol=2e-5, rtol=2e-5)
