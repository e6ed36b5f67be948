"""When the hub dies and restarts, no counter and no bucket on its page ever runs backwards."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from monitoring.checkpoint import Kept, decode
from monitoring.hub import Hub, NotReady
from monitoring.metrics import Metrics
from tests.monitoring.support.metrics_pages import page_of, sum_of, totals_of
from tests.support.examples import examples

NUM_KEEPERS = 2
STEPS = (
    *("count", "work", "work", "work", "send", "deliver", "lose", "restart", "replace"),
    *("keep", "render", "render", "kill_hub", "kill_ingress", "wait"),
)


@dataclass
class Ingress:
    """Keeps checkpoints; see `deployments.hub.keeper`."""

    name: str
    kept: Kept | None = None

    def hold(self, kept: Kept | None) -> None:
        if kept is not None and (self.kept is None or kept[0] > self.kept[0]):
            self.kept = kept

    def keep(self, hub: Hub, now: float) -> None:
        wants, newer = hub.keep(self.name, self.kept and self.kept[0], now)
        if wants and self.kept is not None:
            hub.restore(self.name, self.kept[1], now)
        self.hold(newer)


@dataclass
class Application:
    """Processes, ingresses, a hub and what is under way between them."""

    gone_after: float = 60.0
    now: float = 0.0
    num_made: int = 0
    counted: int = 0
    under_way: list[tuple[str, bytes]] = field(default_factory=list)
    last: dict[str, float] = field(default_factory=dict)
    num_pages: int = 0

    def __post_init__(self) -> None:
        self.processes = [self.process() for _ in range(3)]
        self.ingresses = [self.ingress() for _ in range(NUM_KEEPERS)]
        self.generation = 0
        self.hub = self.new_hub()

    def process(self, name: str | None = None) -> tuple[str, Metrics]:
        self.num_made += 1
        name = name or f"p{self.num_made}"
        return name, Metrics("demo", name, "engine")

    def ingress(self) -> Ingress:
        self.num_made += 1
        return Ingress(f"i{self.num_made}")

    def new_hub(self) -> Hub:
        self.generation += 1
        return Hub(
            gone_after=self.gone_after,
            num_keepers=NUM_KEEPERS,
            patience=10.0,
            born=self.now,
            generation=self.generation,
        )

    def is_kept(self) -> bool:
        """Whether an ingress holds what the last page was made of."""
        stamps = [ingress.kept[0] for ingress in self.ingresses if ingress.kept is not None]
        return not self.num_pages or max(stamps, default=(0, 0)) >= self.last_stamp

    # --- steps ---------------------------------------------------------------------------------------------

    def count(self, i: int, amount: int) -> None:
        metrics = self.processes[i][1]
        metrics.inc("generation_tokens_total", amount)
        metrics.inc("engine_stage_seconds_total", 0.1 * amount, stage="forward")  # no exact float
        metrics.observe("engine_step_seconds", 0.0007 * amount, amount, phase="decode")
        self.counted += amount

    def push(self, i: int, amount: int) -> None:
        name, metrics = self.processes[i]
        self.hub.push(name, metrics.snapshot(), self.now)

    def work(self, i: int, amount: int) -> None:
        self.count(i, amount)
        self.push(i, amount)

    def send(self, i: int, amount: int) -> None:
        name, metrics = self.processes[i]
        self.under_way.append((name, metrics.snapshot()))

    def deliver(self, i: int, amount: int) -> None:
        if self.under_way:
            self.hub.push(*self.under_way.pop(amount % len(self.under_way)), self.now)

    def lose(self, i: int, amount: int) -> None:
        del self.under_way[:amount]

    def restart(self, i: int, amount: int) -> None:
        self.processes[i] = self.process(self.processes[i][0])

    def replace(self, i: int, amount: int) -> None:
        self.processes[i] = self.process()

    def keep(self, i: int, amount: int) -> None:
        self.ingresses[i % NUM_KEEPERS].keep(self.hub, self.now)

    def kill_hub(self, i: int, amount: int) -> None:
        if self.is_kept():  # not together with the only one that knows what it has shown
            self.hub = self.new_hub()

    def kill_ingress(self, i: int, amount: int) -> None:
        i %= NUM_KEEPERS
        before = self.ingresses[i]
        self.ingresses[i] = self.ingress()
        try:
            self.hub.render(self.now)  # an ingress dies with a page it has not handed on
        except NotReady:
            self.ingresses[i] = before

    def wait(self, i: int, amount: int) -> None:
        """Wait long enough for all live processes to report, and for some to be taken for gone."""
        for _ in range(amount):
            self.now += 4.0
            for j, _ in enumerate(self.processes[:2]):
                self.push(j, 0)
            for ingress in self.ingresses:
                ingress.keep(self.hub, self.now)

    def render(self, i: int, amount: int) -> None:
        try:
            text = self.hub.render(self.now).decode()
        except NotReady:
            return
        self.ingresses[i % NUM_KEEPERS].hold(self.hub.checkpoint)
        kept = self.hub.checkpoint
        assert kept is not None
        self.last_stamp, self.num_pages = kept[0], self.num_pages + 1
        new = totals_of(text)
        check(self.last, new)
        tokens = sum(
            number for series, number in new.items() if series.startswith("raydix_generation_tokens_total")
        )
        assert tokens <= self.counted, "counted twice"
        self.last = new


def check(before: dict[str, float], after: dict[str, float]) -> None:
    """Check that no total has shrunk, and that those that are gone still count in the sum over replicas."""
    for series, old in before.items():
        assert after.get(series, old) >= old, series
    after_sums = sums(after)
    for series, total in sums(before).items():
        assert after_sums[series] >= total, series


def sums(totals: dict[str, float]) -> Counter[str]:
    """Sum over replicas, in millionths, as the order in which floats are added is arbitrary."""
    total: Counter[str] = Counter()
    for series, number in totals.items():
        total[re.sub(r',?replica="[^"]*"', "", series)] += round(number * 1e6)
    return total


@settings(max_examples=examples(60), deadline=None)
@given(st.lists(st.tuples(st.sampled_from(STEPS), st.integers(0, 2), st.integers(1, 5)), max_size=60))
def test_no_total_ever_runs_backwards(steps: list[tuple[str, int, int]]) -> None:
    app = Application()
    app.wait(0, 1)
    for step, i, amount in steps:
        getattr(app, step)(i, amount)
    app.wait(0, 5)
    app.render(0, 1)
    assert app.num_pages, "after all that, there is a page"
    app.kill_hub(0, 1)
    app.wait(0, 5)
    app.render(1, 1)


def test_sums_of_seconds_do_not_depend_on_the_order_of_reports() -> None:
    """0.1 + 0.2 + 0.3 is more than 0.3 + 0.2 + 0.1, and Prometheus would take that for a restart."""
    hub, processes = Hub(), {name: Metrics("demo", name, "engine") for name in "abc"}
    for seconds, metrics in zip((0.1, 0.2, 0.3), processes.values(), strict=True):
        metrics.observe("engine_step_seconds", seconds, phase="decode")
    sums = set()
    for now, name in enumerate("abccbacabbca"):
        hub.push(name, processes[name].snapshot(), float(now))
        if now >= 2:
            sums.add(sum_of(page_of(hub, float(now)), "engine_step_seconds_sum", phase="decode"))
    assert len(sums) == 1


def test_a_new_hub_continues_the_counts_of_the_old_one() -> None:
    app = Application()
    for i, amount in enumerate((2, 3, 5)):
        app.count(i, amount)
        app.push(i, 1)
    app.wait(0, 1)
    app.render(0, 1)
    app.replace(2, 1)  # with what it has counted
    app.kill_hub(0, 1)
    with pytest.raises(NotReady):
        app.hub.render(app.now)
    app.count(0, 1)
    for i in range(2):
        app.push(i, 1)
    app.keep(1, 1)  # this one has nothing to tell
    with pytest.raises(NotReady):
        app.hub.render(app.now)
    app.keep(0, 1)
    with pytest.raises(NotReady):  # the third process is known to have lived a moment ago
        app.hub.render(app.now)
    app.now += 10.0
    new = page_of(app.hub, app.now)
    assert sum_of(new, "generation_tokens_total") == 2 + 1 + 3 + 5
    assert sum_of(new, "engine_step_seconds_count", phase="decode") == 11


def test_a_new_hub_is_ready_as_soon_as_all_have_reported() -> None:
    app = Application()
    app.wait(0, 1)
    app.push(2, 1)
    app.render(1, 1)
    app.kill_hub(0, 1)
    for i in range(3):
        app.push(i, 1)
    for i in range(NUM_KEEPERS):
        app.keep(i, 1)
    assert sum_of(page_of(app.hub, app.now), "metrics_processes") == 3


def test_the_first_hub_of_all_waits_for_its_ingresses_only() -> None:
    hub = Hub(num_keepers=1)
    with pytest.raises(NotReady):
        hub.render(0.0)
    Ingress("i").keep(hub, 0.0)
    hub.render(0.0)


def test_gauges_of_those_that_died_with_the_hub_do_not_come_back() -> None:
    app = Application()
    for i in range(3):
        app.processes[i][1].set("requests_running", 4)
        app.push(i, 1)
    app.wait(0, 1)
    app.render(0, 1)
    app.kill_hub(0, 1)
    app.push(0, 1)
    app.now += 10.0
    assert sum_of(page_of(app.hub, app.now), "requests_running") == 4
    assert sum_of(page_of(app.hub, app.now), "metrics_processes") == 1


def test_snapshots_dropped_before_the_restart_stay_counted() -> None:
    app = Application()
    app.hub.push("x", b"nonsense", app.now)
    app.wait(0, 1)
    app.render(0, 1)
    app.kill_hub(0, 1)
    app.hub.push("x", b"nonsense", app.now)
    app.wait(0, 4)
    assert sum_of(page_of(app.hub, app.now), "metrics_snapshots_dropped_total", reason="malformed") == 2


@pytest.mark.parametrize("broken", [b"", b"\xc1", b"\x80", b'{"version": 1}'])
def test_a_checkpoint_that_cannot_be_read_is_no_reason_to_wait(broken: bytes) -> None:
    with pytest.raises(ValueError, match="checkpoint"):
        decode(broken)
    hub = Hub(num_keepers=1)
    assert hub.keep("i", (1, 1), 0.0) == (True, None)
    hub.restore("i", broken, 0.0)
    assert sum_of(page_of(hub, 0.0), "metrics_snapshots_dropped_total", reason="malformed") == 1


def test_a_process_whose_snapshots_overtake_each_other_is_counted_once() -> None:
    hub = Hub(gone_after=10)
    first, second = Metrics("demo", "r", "engine"), Metrics("demo", "r", "engine")
    snapshots = []
    for metrics in (first, first, second, second):
        metrics.inc("generation_tokens_total", 10)
        snapshots.append(metrics.snapshot())
    for i in (1, 0, 3, 2, 1, 0):
        hub.push("p", snapshots[i], 0.0)
        page_of(hub, 0.0)
    assert sum_of(page_of(hub, 0.0), "generation_tokens_total") == 20 + 20
    page_of(hub, 100.0)
    assert not hub.push("p", snapshots[2], 100.0), "late, and its process taken for gone"
    assert sum_of(page_of(hub, 100.0), "generation_tokens_total") == 40
