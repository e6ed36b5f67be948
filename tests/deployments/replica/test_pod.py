"""The readiness probe of an engine's pod."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from deployments.config.args import AppArgs
from deployments.replica import pod


def test_a_beat_outlives_the_slowest_health_check_and_not_a_lost_replica() -> None:
    """Serve gives a replica up after three failed checks; the pod is unready by then, but not before the first."""
    health = AppArgs().health
    one = health.check_period_s + health.check_timeout_s
    assert one < pod.BEAT_AGE_S < 3 * one


def test_the_probe_gives_the_reason_and_imports_nothing_heavy() -> None:
    probe = "import sys; from deployments.replica import pod; code = pod.main(['ready']); "
    probe += "print(sorted({'ray', 'torch', 'pydantic'} & sys.modules.keys())); sys.exit(code)"
    environment = {"PYTHONPATH": str(Path(pod.__file__).parents[2])}
    began = subprocess.run([sys.executable, "-c", probe], env=environment, capture_output=True, text=True)
    assert (began.returncode, began.stdout) == (1, "[]\n")
    assert "health check" in began.stderr
