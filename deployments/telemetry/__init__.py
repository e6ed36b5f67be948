"""Reports of processes: the request log, traces, and metrics pushed to the hub; and the reading of /metrics."""
