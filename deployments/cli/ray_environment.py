"""Settings that have Ray's own processes use little processor time and listen on this machine only.

Ray reads them from the environment when it is imported, so they are set before that. docs/tuning.md says what each
of them costs, and docs/security.md what listens where.
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
"""Set where the environment does not say otherwise: the processes of a Ray that is started inherit them."""

LOCAL_ENVIRONMENT = {
    # Whether other machines may join this Ray, on any system: the name comes from the only two on which Ray turns
    # it off. Where they may not, Ray's node has the address 127.0.0.1, and all that Ray starts listens there; else
    # its servers, and three pages of metrics that ask for no token, listen on all interfaces.
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    # Each process of this Ray imports Serve. The first ones do so while the command still starts Ray.
    "RAY_preload_python_modules": "ray.serve",
}
"""Set as well where Ray is started for this machine alone, and where such a Ray is joined: otherwise Ray takes a
loopback address for the machine's other one, at which nothing listens."""


def set_environment() -> None:
    """Set what the environment does not say otherwise. To be called before Ray is imported."""
    cluster = os.environ.get("RAY_ADDRESS", "auto")
    is_local = cluster in ("auto", "local") or cluster.startswith(("127.", "localhost", "[::1]"))
    for name, value in {**RAY_ENVIRONMENT, **(LOCAL_ENVIRONMENT if is_local else {})}.items():
        os.environ.setdefault(name, value)
