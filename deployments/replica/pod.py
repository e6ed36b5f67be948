"""Answers a pod's readiness probe: `python -m deployments.replica.pod ready ingress|engine`.

    ready ingress   this node's Serve proxy takes requests, and some engine serves them
    ready engine    an engine replica on this node passed a health check within 30 s, so its steps finish

As probes run every few seconds, this module imports the standard library alone. Exit status 0 means ready;
otherwise stderr says why not.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

BEATS = "/tmp/raydix/beats"  # health.beat_directory in k8s/*/serve.yaml
BEAT_AGE_S = 30.0
"""Oldest acceptable file: Serve checks every `check_period_s` (2 s), waits `check_timeout_s` (10 s) and allows
three failures."""


class NotReadyError(Exception):
    """The pod is not ready; the message says why."""


def ready_ingress(url: str = "http://127.0.0.1:8000", timeout_s: float = 4.0) -> None:
    """Raise NotReadyError unless this node's proxy takes requests and some engine serves them."""
    for path in ("/-/healthz", "/health"):  # the proxy's (503 while it drains), the application's
        try:
            urllib.request.urlopen(url + path, timeout=timeout_s).close()
        except urllib.error.HTTPError as error:
            body = error.read(500).decode(errors="replace")
            raise NotReadyError(f"{path} answers {error.code}: {body}") from None
        except OSError as error:
            raise NotReadyError(f"{path} does not answer: {error}") from None


def ready_engine(beats: str = BEATS, max_age_s: float = BEAT_AGE_S) -> None:
    """Raise NotReadyError unless an engine replica passed its health check at most `max_age_s` ago."""
    marks = [path.stat().st_mtime for path in Path(beats).glob("*")]
    if not marks:
        raise NotReadyError(f"no engine replica on this node has passed a health check yet ({beats} is empty)")
    if (age := time.time() - max(marks)) > max_age_s:
        raise NotReadyError(f"the last health check that passed was {age:.0f} s ago, more than {max_age_s:.0f}")


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Parse the command line into `command` and `part`. Raises SystemExit."""
    parser = argparse.ArgumentParser(prog="python -m deployments.replica.pod")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("ready").add_argument("part", choices=["ingress", "engine"])
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    """Run the command line and return its exit status."""
    asked = parse(arguments)
    try:
        if asked.part == "ingress":
            ready_ingress(os.environ.get("RAYDIX_URL", "http://127.0.0.1:8000"))
        else:
            ready_engine()
    except NotReadyError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
