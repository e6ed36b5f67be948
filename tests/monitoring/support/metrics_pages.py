"""Read a metrics page: its series by name and labels, its totals, and promtool's judgement on it."""

from __future__ import annotations

import shutil
import subprocess

import pytest
from prometheus_client.parser import text_string_to_metric_families

from monitoring.hub import Hub
from monitoring.metric_table import PREFIX

Page = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def page_of(hub: Hub, now: float) -> Page:
    samples = {}
    for family in text_string_to_metric_families(hub.render(now).decode()):
        for sample in family.samples:
            key = (sample.name.removeprefix(PREFIX), tuple(sorted(sample.labels.items())))
            assert key not in samples, "a series must not appear twice"
            samples[key] = sample.value
    return samples


def sum_of(samples: Page, name: str, **labels: str) -> float | None:
    """Sum of the series with these labels among theirs; None when there is none."""
    found = [v for (n, series), v in samples.items() if n == name and labels.items() <= dict(series).items()]
    return sum(found) if found else None


def totals_of(text: str) -> dict[str, float]:
    """Counters, and the buckets, counts and sums of histograms, by name and labels as they stand on the page."""
    found: dict[str, float] = {}
    for family in text.split("# TYPE ")[1:]:
        lines = family.splitlines()
        if lines[0].endswith(("counter", "histogram")):
            samples = (line.rsplit(" ", 1) for line in lines[1:] if not line.startswith("#"))
            found |= {series: float(number) for series, number in samples}
    return found


def check_with_promtool(page: bytes) -> subprocess.CompletedProcess[bytes]:
    tool = shutil.which("promtool")
    if tool is None:
        pytest.skip("promtool (Debian's prometheus) is not installed")
    return subprocess.run([tool, "check", "metrics"], input=page, capture_output=True, timeout=120, check=False)
