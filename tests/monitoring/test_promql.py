"""The metrics and labels of an expression are found, and what cannot be right in it is reported."""

import pytest

from tests.monitoring.support.promql import labels_listed, problems, selectors


@pytest.mark.parametrize(
    ("expression", "names", "labels"),
    [
        ("raydix_requests_running", ["raydix_requests_running"], set()),
        (
            'sum by (job, model_name) (rate(raydix_migrations_total{outcome!="resumed",replica!="gone"}[5m])) > 0',
            ["raydix_migrations_total"],
            {"job", "model_name"},
        ),
        ("sum(a) without (b) / on (c) group_left (d, e) avg(f)", ["a", "f"], {"b", "c", "d", "e"}),
        ("a - b * on(c) group_left d", ["a", "b", "d"], {"c"}),
        ("avg_over_time(some:record:rate5m[1d] offset 1h) >= bool 1e3", ["some:record:rate5m"], set()),
        ('a{x="by (y)", z=~"{b}|c"} and topk(5, d) or absent(e)', ["a", "d", "e"], set()),
        ("a # a comment with b\n> 0.5", ["a"], set()),
        ('a{x="#1"} - b', ["a", "b"], set()),
        ("max_over_time(rate(a[5m])[1h:1m])", ["a"], set()),
    ],
)
def test_series_and_labels_are_found(expression: str, names: list[str], labels: set[str]) -> None:
    assert [selector.name for selector in selectors(expression)] == names
    assert labels_listed(expression) == labels


def test_a_selector_is_read_whole() -> None:
    [selector] = selectors('increase(raydix_requests_total{finish_reason=~"stop|length", replica!="gone"}[10m])')
    assert str(selector) == 'raydix_requests_total{finish_reason=~"stop|length",replica!="gone"}'
    assert (selector.range, selector.function) == ("10m", "increase")


@pytest.mark.parametrize(
    "expression",
    [
        'sum by (model_name, reason) (rate(raydix_router_decisions_total{replica!="gone"}[5m]))',
        "histogram_quantile(0.99, sum by (le) (rate(raydix_request_queue_seconds_bucket[$__rate_interval])))",
        'raydix_kv_pages{state=~"active|cached", job="raydix"} / on (instance) raydix_kv_pages_capacity',
        'rate(raydix_generation_tokens_total{replica="r1"}[5m])',
        'raydix_kv_pages{model_name=~"$model", state="$state"}',
        "avg by (own) (raydix:own)",
    ],
)
def test_an_expression_that_fits_the_table_is_no_problem(expression: str) -> None:
    assert problems(expression, {"raydix:own": {"own"}}) == []


@pytest.mark.parametrize(
    ("expression", "problem"),
    [
        ("radix_requests_running > 0", "no metric is named radix_requests_running"),
        ("raydix_requests_runing > 0", "no metric is named raydix_requests_runing"),
        ("rate(raydix_time_to_first_token_seconds[5m])", "no metric is named raydix_time_to_first_token_seconds"),
        ("raydix_kv_pages_count", "no metric is named raydix_kv_pages_count"),
        ("raydix:other", "no metric is named raydix:other"),
        ('raydix_kv_pages{sate="active"}', "raydix_kv_pages has no label sate"),
        ('raydix_kv_pages{state="actve"}', "raydix_kv_pages: state is never 'actve'"),
        ('raydix_kv_pages{state=~"active|cachd"}', "raydix_kv_pages: state is never 'cachd'"),
        ('raydix_kv_pages{state!="lost"}', "raydix_kv_pages: state is never 'lost'"),
        ('raydix:own{their="x"}', "raydix:own has no label their"),
        ("rate(raydix_time_to_first_token_seconds_sum{replica='r1'}[5m])", "has no label replica"),
        (
            "sum by (replica) (rate(raydix_time_to_first_token_seconds_sum[5m]))",
            "no series here has the label replica",
        ),
        ("sum by (le) (raydix_kv_pages)", "no series here has the label le"),
        ("rate(raydix_requests_running[5m])", "rate() of the gauge raydix_requests_running"),
        ("raydix_preemptions_total > 5", "raydix_preemptions_total only ever grows"),
        ("rate(raydix_preemptions_total[5m])", 'raydix_preemptions_total needs replica!="gone"'),
        ('rate(raydix_preemptions_total{replica=~".+"}[5m])', 'needs replica!="gone"'),
    ],
)
def test_expressions_that_cannot_be_right_are_reported(expression: str, problem: str) -> None:
    [found] = problems(expression, {"raydix:own": {"own"}})
    assert problem in found
