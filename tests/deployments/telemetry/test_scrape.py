"""Scraped pages as numbers: other labels do not matter, counters may be reset, replicas may come and go."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployments.telemetry.scrape import Interval, MetricsPage
from monitoring.hub import Hub
from monitoring.metrics import Metrics


def parsed(*lines: str) -> MetricsPage:
    return MetricsPage.parse("\n".join([*lines, ""]))


def counter(**replicas: float) -> MetricsPage:
    series = [f'raydix_x_total{{replica="{name}"}} {value}' for name, value in replicas.items()]
    return parsed("# TYPE raydix_x_total counter", *series)


def risen(before: MetricsPage, after: MetricsPage, **labels: str) -> float | None:
    return Interval(before, after, 2.0).increase("x_total", **labels)


def histogram(**counts: int | str) -> MetricsPage:
    """A page with cumulative counts up to 1, 2, 4 and infinity, by model."""
    lines = ["# TYPE raydix_h histogram"]
    for model, text in counts.items():
        for bound, count in zip(("1.0", "2.0", "4.0", "+Inf"), str(text), strict=True):
            lines.append(f'raydix_h_bucket{{model_name="{model}",le="{bound}"}} {count}')
    return parsed(*lines)


def test_labels_that_are_not_asked_for_are_summed_over() -> None:
    old = parsed('raydix_kv_pages{replica="a",state="free"} 3')
    new = parsed(
        'raydix_kv_pages{replica="a",state="free",tier="device"} 3',
        'raydix_kv_pages{replica="a",state="free",tier="host"} 4',
    )
    assert (old.total("kv_pages", state="free"), new.total("kv_pages", state="free")) == (3, 7)
    assert new.total("kv_pages", state="free", tier="host") == 4
    assert new.total("kv_pages", state="active") is None
    assert new.values("kv_pages", "tier") == {"device", "host"}


def test_values_that_are_not_finite_are_ignored() -> None:
    page = parsed('raydix_g{replica="a"} NaN', 'raydix_g{replica="b"} +Inf', 'raydix_g{replica="c"} 2')
    assert page.total("g") == 2


def test_rates_are_increases_over_seconds() -> None:
    interval = Interval(counter(a=10, b=1), counter(a=16, b=2), 2.0)
    assert (interval.increase("x_total"), interval.rate("x_total")) == (7, 3.5)
    assert interval.rate("x_total", replica="a") == 3
    assert interval.by("x_total", "replica") == {"a": 6, "b": 1}


def test_the_first_page_counts_from_the_start_and_gives_no_rates() -> None:
    first = Interval(None, counter(a=10), None)
    assert (first.increase("x_total"), first.rate("x_total")) == (10, None)


def test_a_metric_without_series_has_not_happened_and_one_that_is_unknown_is_unknown() -> None:
    page = parsed("# TYPE raydix_x_total counter")
    assert Interval(None, page, None).increase("x_total") == 0
    assert Interval(None, page, None).increase("y_total") is None
    assert Interval(None, counter(a=1), None).increase("x_total", replica="not-yet") is None


@pytest.mark.parametrize(
    ("before", "after", "increase"),
    [
        (counter(a=10, b=5), counter(a=3, b=6), 3 + 1),  # a was reset
        (counter(a=10), counter(a=11, b=7), 1 + 7),  # b is new
        (counter(a=10, b=5), counter(a=11), 1),  # b vanished without a trace
        (counter(a=10, b=5), counter(a=11, gone=5), 1),  # b was given up
        (counter(a=10, b=5, gone=9), counter(a=11, gone=14), 1),
        (counter(a=10, gone=9), counter(a=11, b=6, gone=4), 1 + 1),  # b was not gone after all
        (counter(a=10, gone=9), counter(a=11), 1),  # the hub forgot the gone ones
    ],
)
def test_counters_are_reset_and_replicas_come_and_go(
    before: MetricsPage, after: MetricsPage, increase: float
) -> None:
    assert risen(before, after) == increase


def test_a_real_hub_gives_up_a_replica_and_no_rate_jumps() -> None:
    hub, lives, dies = Hub(gone_after=100), Metrics("m", "a", "engine"), Metrics("m", "b", "engine")
    dies.inc("generation_tokens_total", 5000)
    hub.push("b", dies.snapshot(), 0.0)
    pages = []
    for now in (0.0, 200.0):
        lives.inc("generation_tokens_total", 3)
        hub.push("a", lives.snapshot(), now)
        pages.append(MetricsPage.parse(hub.render(now).decode()))
    assert pages[1].total("generation_tokens_total", replica="gone") == 5000
    assert Interval(pages[0], pages[1], 200.0).increase("generation_tokens_total") == 3


def test_quantiles_lie_linearly_in_their_bucket() -> None:
    interval = Interval(histogram(m=1111), histogram(m=1155), 1.0)  # four between 2 and 4
    assert interval.quantile("h", 0.5) == pytest.approx(3.0)
    assert interval.quantile("h", 1.0) == pytest.approx(4.0)
    assert Interval(None, histogram(m=4444), None).quantile("h", 0.5) == pytest.approx(0.5)


def test_quantiles_of_nothing_of_the_last_bucket_and_of_a_counter_that_restarted() -> None:
    same = histogram(m=1234)
    assert Interval(same, same, 1.0).quantile("h", 0.5) is None
    assert Interval(None, parsed("# TYPE raydix_h histogram"), None).quantile("h", 0.5) is None
    assert Interval(None, histogram(m="0008"), None).quantile("h", 0.99) == 4.0
    restarted = Interval(histogram(m=9999), histogram(m=2222), 1.0)
    assert restarted.quantile("h", 0.5) == pytest.approx(0.5)


def test_quantiles_are_given_for_several_models_together_and_for_one() -> None:
    interval = Interval(None, histogram(a="1111", b="0003"), None)
    assert interval.quantile("h", 0.5, model_name="a") == pytest.approx(0.5)
    assert interval.quantile("h", 0.5, model_name="b") == 4.0
    assert interval.quantile("h", 0.25) == pytest.approx(1.0)


def test_a_page_of_another_server_is_distinguished_from_ours() -> None:
    assert not parsed("# TYPE python_info gauge", "python_info 1.0").is_raydix
    assert parsed("# TYPE raydix_x gauge").is_raydix


@given(st.one_of(st.text(max_size=200), st.text('raydix_x{}=",.1e+N \\\n#TYPEgauge', max_size=200)))
def test_any_text_is_a_page_or_a_value_error(text: str) -> None:
    try:
        page = MetricsPage.parse(text)
    except ValueError:
        return
    assert page.total("requests_running") is None or page.is_raydix


values = st.one_of(st.floats(), st.integers(0, 10**6).map(float), st.sampled_from([1e100, -1e100]))
families = st.dictionaries(st.sampled_from("abcd"), values, max_size=4)


@given(st.one_of(st.none(), families), families, st.floats(0.01, 100))
def test_rates_of_any_values_are_numbers_not_below_zero(
    before: dict[str, float] | None, after: dict[str, float], seconds: float
) -> None:
    interval = Interval(counter(**before) if before is not None else None, counter(**after), seconds)
    for found in (interval.increase("x_total", replica="a"), interval.ratio("x_total", "x_total")):
        assert found is None or found >= 0
    total = interval.increase("x_total")
    assert total is not None and total >= 0
