"""Links: transfers worked out by hand, and that no link ever moves more than it can."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deployments.simulator.fleet.links import Links


def links(**bandwidths: float) -> Links:
    made = Links()
    for name, bandwidth in bandwidths.items():
        made.add(name, bandwidth)
    return made


def drain(one: Links, until: float = math.inf) -> None:
    while one.next_event() <= until and one.next_event() != math.inf:
        one.advance(one.next_event())


def test_two_transfers_halve_a_link_and_the_last_has_all_of_it() -> None:
    """100 bytes/s: 100 and 300 bytes together end at 2 s and, after 200 bytes alone, at 4 s."""
    one, ends = links(a=100.0), {}
    for size in (100.0, 300.0):
        one.start(["a"], size, 0.0, 0.0, lambda at, arrived, size=size: ends.update({size: (at, arrived)}))  # type: ignore[misc]
    drain(one)
    assert ends == {100.0: (pytest.approx(2.0), True), 300.0: (pytest.approx(4.0), True)}
    assert one.moved["a"] == pytest.approx(400.0)


def test_the_slowest_link_sets_the_pace_after_the_latency() -> None:
    one, ends = links(a=100.0, b=10.0), []
    one.start(["a", "b"], 50.0, 1.0, 0.5, lambda at, _: ends.append(at))
    drain(one)
    assert ends == [pytest.approx(6.5)]


def test_a_cut_link_ends_its_transfers_and_no_others() -> None:
    one, ended = links(a=10.0, b=10.0), []
    one.start(["a"], 100.0, 0.0, 0.0, lambda at, arrived: ended.append(("a", at, arrived)))
    one.start(["b"], 100.0, 0.0, 0.0, lambda at, arrived: ended.append(("b", at, arrived)))
    one.cut("a", 4.0)
    assert ended == [("a", 4.0, False)]
    drain(one)
    (name, at, arrived) = ended[-1]
    assert (len(ended), name, arrived) == (2, "b", True)
    assert at == pytest.approx(10.0)
    assert one.moved["a"] == pytest.approx(40.0)


def test_a_link_of_nothing_is_named() -> None:
    with pytest.raises(ValueError, match="the bandwidth of a must be above 0 bytes/s"):
        links(a=0.0)


transfers = st.lists(
    st.tuples(
        st.sampled_from([("a",), ("b",), ("a", "b"), ("b", "c")]),
        st.floats(0.0, 1e4),
        st.floats(0.0, 20.0),
        st.floats(0.0, 3.0),
    ),
    min_size=1,
    max_size=20,
)


@settings(deadline=None)
@given(wanted=transfers)
def test_no_link_moves_more_than_its_bandwidth_and_all_bytes_arrive(
    wanted: list[tuple[tuple[str, ...], float, float, float]],
) -> None:
    one, ended = links(a=50.0, b=200.0, c=1000.0), []
    for names, size, at, latency in sorted(wanted, key=lambda each: each[2]):
        drain(one, at)
        one.start(names, size, at, latency, lambda at, arrived: ended.append((at, arrived)))
        for name, bandwidth in (("a", 50.0), ("b", 200.0), ("c", 1000.0)):
            assert one.moved[name] <= bandwidth * at * (1 + 1e-9) + 1e-6
    drain(one)
    assert len(ended) == len(wanted) and all(arrived for _, arrived in ended)
    last = max(at for at, _ in ended)
    for name, bandwidth in (("a", 50.0), ("b", 200.0), ("c", 1000.0)):
        assert one.moved[name] == pytest.approx(sum(size for names, size, _, _ in wanted if name in names))
        assert one.moved[name] <= bandwidth * last * (1 + 1e-9) + 1e-6
