"""Garbage collection of a serving process: pauses are counted, and what its start left is not looked at."""

from __future__ import annotations

import gc
import subprocess
import sys

from deployments.telemetry.garbage import GarbagePauses
from monitoring.metrics import Metrics
from tests.support.metric_values import snapshot_of

SETTLED = """
import gc
from deployments.telemetry.garbage import RARE, YOUNG, GarbagePauses

GarbagePauses().settle()
assert gc.get_threshold() == (*YOUNG, RARE)
print(len(gc.get_objects()) < gc.get_freeze_count() / 10)
"""


def num_pauses(metrics: Metrics, generation: str) -> int:
    return sum(dict(snapshot_of(metrics).histograms["gc_pause_seconds"])[(generation,)].counts)


def test_each_collection_is_an_observation_of_its_generation() -> None:
    metrics, pauses = Metrics("m", "r"), GarbagePauses()
    try:
        gc.collect(0)
        gc.collect()
        gc.collect()
        pauses.report(metrics)
        assert num_pauses(metrics, "0") >= 1
        assert num_pauses(metrics, "2") == 2
        pauses.report(metrics)
        assert num_pauses(metrics, "2") == 2
    finally:
        pauses.close()


def test_a_closed_meter_counts_nothing() -> None:
    pauses = GarbagePauses()
    pauses.close()
    pauses.close()
    gc.collect()
    assert pauses.drain() == []


def test_a_collection_in_a_settled_process_visits_few_of_its_objects() -> None:
    found = subprocess.run([sys.executable, "-c", SETTLED], capture_output=True, text=True, check=False)
    assert found.stdout.strip() == "True", found.stderr
