"""Settings that limit the processor time of Ray's own processes and make them listen only on this machine.

Ray reads them from the environment when it is imported, so they are set before. docs/tuning.md says what each
of them costs, and docs/security.md which process listens where.
"""

from __future__ import annotations

import os

RAY_ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    # By default each replica, and each handle in it, updates Ray's gauges ten times a second, and the controller
    # compares all deployments as often, which together is a tenth of a core for an application without requests.
    # Ray exports the gauges every ten seconds.
    "RAY_SERVE_METRICS_EXPORT_INTERVAL_MS": "5000",
    "RAY_SERVE_CONTROL_LOOP_INTERVAL_S": "0.25",
    # Ray's processes time each of their own events, for their debug logs.
    "RAY_event_stats": "0",
    # The agent reads /proc of all processes for Ray's metrics and its dashboard.
    "REPORTER_UPDATE_INTERVAL_MS": "15000",
    # The log monitor looks for new log files ten times a second while there are few of them.
    "RAY_LOG_MONITOR_MANY_FILES_THRESHOLD": "0",
    "LOG_NAME_UPDATE_INTERVAL_S": "2",
}
"""Set where the environment does not say otherwise: the processes of a new Ray inherit them."""

LOCAL_ENVIRONMENT = {
    # Whether other machines may join this Ray, on any system: the name comes from the only two on which Ray
    # disables it. Where they may not, Ray's node has the address 127.0.0.1, and all its processes listen there;
    # otherwise its servers, and three pages of metrics without a token, listen on all interfaces.
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    # Each process of this Ray imports Serve. The first ones do so while the command still starts Ray.
    "RAY_preload_python_modules": "ray.serve",
}
"""Also set where Ray is started only for this machine, and where such a Ray is joined: otherwise Ray takes a
loopback address for the machine's other one, at which no process listens."""


def set_environment() -> None:
    """Set these variables unless the environment has them. Call it before Ray is imported."""
    cluster = os.environ.get("RAY_ADDRESS", "auto")
    is_local = cluster in ("auto", "local") or cluster.startswith(("127.", "localhost", "[::1]"))
    for name, value in {**RAY_ENVIRONMENT, **(LOCAL_ENVIRONMENT if is_local else {})}.items():
        os.environ.setdefault(name, value)
