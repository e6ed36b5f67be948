"""The board sums up the hot prefixes that ingresses report, and forgets those that have faded."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from deployments.hub.warm_up_board import MAX_PREFIXES, MAX_REPORTS, WarmUpBoard
from router.addresses import KVAddress
from tests.deployments.support.prefix_reports import report, tokens_of


def test_the_reports_of_several_ingresses_are_summed_up() -> None:
    board = WarmUpBoard()
    a, b, c = list(range(8)), list(range(50, 58)), list(range(80, 88))
    board.take("i1", report(*[a] * 5, *[b] * 4), now=0.0)
    board.take("i2", report(*[b] * 4, *[c] * 6), now=0.0)
    assert tokens_of(board.top("m", 1000, 0.0)) == [b, c, a]
    assert tokens_of(board.top("m", 16, 0.0)) == [b, c]
    assert board.top("another", 1000, 0.0) == []


def test_the_lender_of_a_prefix_is_the_one_that_was_reported_last() -> None:
    board = WarmUpBoard()
    a, b, longer = list(range(8)), list(range(50, 58)), list(range(12))
    first, second = (KVAddress(f"tcp://{name}", "secret") for name in "xy")
    for at, (ingress, address) in enumerate((("i1", first), ("i2", second))):
        known = report(*[a] * 5, *[b] * 4)
        lent = [replace(one, source=(address, 8)) if list(one.token_ids) == a else one for one in known.prefixes]
        board.take(ingress, replace(known, prefixes=lent), now=float(at))
    assert [prefix.source for prefix in board.top("m", 1000, 1.0)] == [(second, 8), None]
    board.take("i3", report(*[longer] * 9), now=1.0)
    best = board.top("m", 1000, 1.0)[0]
    assert (list(best.token_ids), best.source) == (longer, (second, 8))


def test_a_new_report_replaces_the_one_before_and_an_old_one_fades_and_is_dropped() -> None:
    board = WarmUpBoard()
    a, b = list(range(8)), list(range(50, 58))
    board.take("i1", report(*[a] * 9), now=0.0)
    board.take("i1", report(*[a] * 4), now=0.0)
    board.take("i2", report(*[b] * 3), now=100.0)
    assert tokens_of(board.top("m", 1000, 100.0)) == [b, a]  # 3 uses, and 4 a half-life ago
    board.take("i2", report(*[b] * 3), now=1000.0)
    assert tokens_of(board.top("m", 1000, 1000.0)) == [b]


def test_the_board_is_bounded() -> None:
    board = WarmUpBoard()
    for number in range(MAX_REPORTS + 5):
        board.take(f"i{number}", report([number] * 8, [number] * 8), now=0.0)
    assert len(board.top("m", 10**6, 0.0)) == MAX_REPORTS


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"half_life_s": 0.0}, "half_life_s"),
        ({"half_life_s": float("nan")}, "half_life_s"),
        ({"block_tokens": 0}, "block_tokens"),
        ({"prefixes": [None] * (MAX_PREFIXES + 1)}, f"at most {MAX_PREFIXES}"),
    ],
)
def test_a_report_that_would_break_the_board_is_refused(wrong: dict[str, Any], said: str) -> None:
    board = WarmUpBoard()
    kept = list(range(8))
    board.take("i1", report(kept, kept), now=0.0)
    with pytest.raises(ValueError, match=said):
        board.take("i2", replace(report(kept, kept), **wrong), now=0.0)
    board.take("i3", report(kept, kept), now=1.0)
    assert tokens_of(board.top("m", 1000, 1.0)) == [kept]
