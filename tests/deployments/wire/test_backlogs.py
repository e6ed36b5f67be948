"""What ingresses report to wait in them: summed at a replica, dropped with the ingress, believed for a while."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployments.wire import messages
from deployments.wire.backlogs import STALE_S, Backlogs, BacklogTotals
from deployments.wire.messages import Backlog
from deployments.wire.server import WireServer, WireTimings
from tests.deployments.support.wire_peer import Peer, Requests, hello, served, wait_until


def test_reports_of_several_ingresses_are_summed_and_the_last_of_each_counts() -> None:
    backlogs = Backlogs()
    backlogs.take("a", Backlog(3, 3000), 0.0)
    backlogs.take("b", Backlog(1, 500), 0.5)
    backlogs.take("a", Backlog(2, 2000), 1.0)
    assert backlogs.totals(1.0)[:2] == (3, 2500)
    backlogs.forget("a")
    backlogs.forget("unknown")
    assert backlogs.totals(1.0)[:2] == (1, 500)


def test_a_report_is_stale_after_some_seconds_of_silence() -> None:
    backlogs = Backlogs()
    backlogs.take("silent", Backlog(3, 3000), 0.0)
    backlogs.take("a", Backlog(1, 500), 2.0)
    assert backlogs.totals(STALE_S)[:2] == (4, 3500)
    assert backlogs.totals(STALE_S + 0.01)[:2] == (1, 500)


def test_unserved_arrivals_are_the_growth_of_the_queues_plus_those_turned_away() -> None:
    backlogs = Backlogs()
    backlogs.take("a", Backlog(3, 3000, turned_away=7, turned_away_tokens=7000), 0.0)
    assert backlogs.totals(0.0) == BacklogTotals(3, 3000, 0, 0)  # it did not come now
    backlogs.take("a", Backlog(5, 6000, turned_away=9, turned_away_tokens=9000), 1.0)
    assert backlogs.totals(1.0) == BacklogTotals(5, 6000, 2, 3000 + 2000, 2 + 2)
    backlogs.take("a", Backlog(0, 0, turned_away=9, turned_away_tokens=9000), 2.0)
    assert backlogs.totals(2.0) == BacklogTotals(0, 0, 2, 2000 + 3000 - 6000, 2 + 2 - 5)


def test_an_ingress_that_leaves_or_joins_does_not_count_as_arrivals() -> None:
    backlogs = Backlogs()
    backlogs.take("dies", Backlog(3, 3000), 0.0)
    backlogs.take("falls silent", Backlog(3, 3000), 0.0)
    backlogs.forget("dies")
    backlogs.take("falls silent", Backlog(1, 1000), STALE_S + 1)  # elsewhere, meanwhile, it was counted
    backlogs.take("dies", Backlog(2, 2000), STALE_S + 1)
    assert backlogs.totals(STALE_S + 1) == BacklogTotals(3, 3000, 0, 0)


counts = st.integers(0, 2**48)


@given(st.lists(st.tuples(st.sampled_from("ab"), st.booleans(), counts, counts, counts), max_size=30))
def test_the_sums_are_always_those_of_the_last_reports(
    events: list[tuple[str, bool, int, int, int]],
) -> None:
    backlogs, last = Backlogs(), dict[str, int]()
    for name, ends, num_tokens, turned_away, turned_away_tokens in events:
        if ends:
            backlogs.forget(name)
            last.pop(name, None)
        else:
            backlogs.take(name, Backlog(1, num_tokens, turned_away, turned_away_tokens), 0.0)
            last[name] = num_tokens
        totals = backlogs.totals(0.0)
        assert totals[:2] == (len(last), sum(last.values()))
        assert totals.turned_away >= 0


# --- over the wire -----------------------------------------------------------------------------------------------


@pytest.fixture
def server() -> Iterator[WireServer]:
    made = served(Requests(), WireTimings(0.02))
    yield made
    made.close()


def test_an_ingress_that_dies_no_longer_counts(server: WireServer, peer: Peer) -> None:
    dies, lives = peer(), peer()
    for number, one in enumerate((dies, lives)):
        one.send(hello(f"i{number}"))
        one.receive(messages.Welcome)
        one.send(Backlog(number + 1, 1000))
    wait_until(lambda: server.backlog().num_requests == 3)
    dies.socket.close()
    while server.backlog().num_requests != 2:  # at once, and not after STALE_S
        lives.send(Backlog(2, 1000))
        lives.receive(messages.Heartbeat)
    assert server.backlog() == BacklogTotals(2, 1000, 0, 0)


def test_the_report_of_a_stranger_is_dropped(server: WireServer, peer: Peer) -> None:
    stranger = peer()
    stranger.send(Backlog(1, 1000))
    wait_until(lambda: server.counts["unauthenticated"] == 1)
    assert server.backlog() == BacklogTotals()


def test_numbers_that_are_none_are_malformed(server: WireServer, peer: Peer) -> None:
    one = peer()
    one.send(hello("i"))
    one.receive(messages.Welcome)
    for wrong in (Backlog(-1), Backlog(0, 2**60), Backlog(0, 0.5)):  # type: ignore[arg-type]
        one.send(wrong)
    wait_until(lambda: server.counts["malformed"] == 3)
    assert server.backlog() == BacklogTotals()
