"""Answers the readiness probe of an engine's pod: `python -m deployments.replica.pod ready`.

The pod is ready when its engine replica passed a health check within 30 s, so that its steps finish. (An ingress
answers its own probe, at /ready.)

Because probes run every few seconds, this module imports only the standard library. Exit status 0 means ready;
otherwise stderr says why not.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

BEATS = "/tmp/raydix/beats"  # health.beat_directory in k8s/*/serve.yaml
BEAT_AGE_S = 30.0
"""Oldest acceptable file: Serve checks every `check_period_s` (2 s), waits `check_timeout_s` (10 s) and allows
three failures."""


class NotReadyError(Exception):
    """The pod is not ready; the message says why."""


def ready_engine(beats: str = BEATS, max_age_s: float = BEAT_AGE_S) -> None:
    """Raise NotReadyError unless an engine replica passed its health check at most `max_age_s` ago."""
    marks = [path.stat().st_mtime for path in Path(beats).glob("*")]
    if not marks:
        raise NotReadyError(f"no engine replica on this node has passed a health check yet ({beats} is empty)")
    if (age := time.time() - max(marks)) > max_age_s:
        raise NotReadyError(f"the last health check that passed was {age:.0f} s ago, more than {max_age_s:.0f}")


def main(arguments: list[str] | None = None) -> int:
    """Run the command line and return its exit status."""
    parser = argparse.ArgumentParser(prog="python -m deployments.replica.pod")
    parser.add_subparsers(required=True).add_parser("ready")
    parser.parse_args(arguments)
    try:
        ready_engine()
    except NotReadyError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
