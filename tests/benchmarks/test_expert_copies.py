"""Recorded routing: what is read of a log, and how even loads are with copies, or with experts rearranged."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.expert_copies import measure, read, rearranged


def test_a_log_is_read_by_layers_without_padding(tmp_path: Path) -> None:
    log = tmp_path / "routes.jsonl"
    lines = [{"type": "meta"}, *({"layer": n % 2, "topk_ids": ids} for n, ids in enumerate([[1], [2], [1], [3]]))]
    log.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    assert read(log) == [[[1]], [[2], [3]]]


def test_copies_and_other_experts_even_a_load_out() -> None:
    """Experts 0 and 1, on the first of two ranks, get all tokens."""
    row = measure([[[0], [1]] * 600], 4, 2, [0, 1])
    assert row["copies 0"] == row["steps of 32"] == 2.0
    assert row["copies 1"] == 1.5, "one of the two is shared"
    assert row["rearranged"] == 1.0
    assert sorted(rearranged([9, 9, 1, 1], 2)[:2]) in ([0, 2], [0, 3])


def test_a_load_that_changes_is_not_foreseen() -> None:
    row = measure([[[0]] * 600 + [[2]] * 600], 4, 2, [1])
    assert row["copies 1"] == pytest.approx(2.0)
