"""What Kubernetes asks of a pod: `python -m deployments.pod ready ingress|engine` and `... drain SECONDS`.

    ready ingress   this node's Serve proxy takes requests, and behind it some engine serves each of them
    ready engine    an engine replica on this node passed its health check just now: its steps finish
    drain           before the pod ends: Serve moves its replicas elsewhere, and their streams come to their end

Probes run every few seconds, so all but `drain` is the standard library. Exit status 0 is yes; otherwise stderr
says why.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

BEATS = "/tmp/raydix/beats"  # health.beat_directory in k8s/*/serve.yaml
BEAT_AGE_S = 30.0
"""Serve checks every `health.check_period_s` (2), waits `check_timeout_s` (10) and lets three fail."""
_SERVING = ("ray::ServeReplica", "ray::ProxyActor")


class NotReadyError(Exception):
    """The answer is no; the message says why."""


def ready_ingress(url: str = "http://127.0.0.1:8000", timeout_s: float = 4.0) -> None:
    """Raise NotReadyError unless this node's proxy takes requests and some engine serves them."""
    for path in ("/-/healthz", "/health"):  # the proxy's own, 503 while it drains; the application's
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


def drain(
    seconds: float,
    tell_ray: Callable[[int], None],
    serving: Callable[[], list[str]],
    settle_s: float = 5.0,
    poll_s: float = 1.0,
) -> list[str]:
    """Have Serve move everything off this node; the processes that still serve when it is done, or time is up.

    `tell_ray` marks the node as draining for so many seconds. `settle_s` is the time in which proxies elsewhere
    hear that the pod is going. A node on which nothing serves is done at once.
    """
    deadline = time.monotonic() + seconds
    if not serving():
        return []
    time.sleep(min(settle_s, seconds))
    tell_ray(max(0, int(deadline - time.monotonic())))
    while (left := serving()) and time.monotonic() < deadline:
        time.sleep(poll_s)
    return left


def tell_ray(seconds: int) -> None:
    """Mark this Ray node as one that goes in `seconds`. Raises subprocess.SubprocessError."""
    ray = Path(sys.executable).with_name("ray")
    command = [str(ray), "drain-node", "--reason", "DRAIN_NODE_REASON_PREEMPTION"]
    command += ["--reason-message", "the pod is being stopped", "--deadline-remaining-seconds", str(seconds)]
    subprocess.run(command, check=True, timeout=60)


def serving_here(proc: Path = Path("/proc")) -> list[str]:
    """Titles of the processes of this container that are Serve replicas or proxies."""
    titles = []
    for path in proc.glob("[0-9]*/cmdline"):
        try:
            title = path.read_bytes().rstrip(b"\0 ").decode(errors="replace")
        except OSError:  # it ended
            continue
        if title.startswith(_SERVING):
            titles.append(title)
    return sorted(titles)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """`command`, and its `part` or `seconds`. Raises SystemExit."""
    parser = argparse.ArgumentParser(prog="python -m deployments.pod")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("ready").add_argument("part", choices=["ingress", "engine"])
    commands.add_parser("drain").add_argument("seconds", type=float)
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    """The command line."""
    asked = parse(arguments)
    try:
        if asked.command == "drain":
            left = drain(asked.seconds, tell_ray, serving_here)
            if left:
                raise NotReadyError(f"after {asked.seconds:.0f} s these still serve: {', '.join(left)}")
        elif asked.part == "ingress":
            ready_ingress(os.environ.get("RAYDIX_URL", "http://127.0.0.1:8000"))
        else:
            ready_engine()
    except (NotReadyError, subprocess.SubprocessError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
