"""The exchanges of experts' tokens that are compared: all give the same sums, and send the expected bytes."""

from __future__ import annotations

import pytest

from benchmarks.expert_exchange import HIDDEN, NAMES, measure, of_models, rows_sent


def test_ranks_send_as_many_bytes_as_the_formula_says() -> None:
    """A rank compares its sums with those of one process before it counts bytes, and fails if they differ."""
    (row,) = measure(4, [(1024, 2)], 0.0)
    assert row["sums"]["bytes"] == row["expected"]["sums"] == 3 * 1024 * HIDDEN * 4
    for name in NAMES[1:]:
        assert row[name]["bytes"] == pytest.approx(row["expected"][name], rel=0.03)


def test_with_one_expert_of_each_rank_all_exchanges_send_the_same() -> None:
    """Each rank then has some expert of every token."""
    assert set(rows_sent(4, 4, 4).values()) == {3.0}
    sparse = rows_sent(4, 8, 1)
    assert sparse["to_experts"] < sparse["to_home"] < sparse["sums"]


def test_a_slower_link_needs_longer_for_the_same_bytes() -> None:
    for row in of_models():
        assert row["25 Gbit/s"]["sums"] == pytest.approx(144 * row["NVLink"]["sums"])
