"""What processes report: the request log, traces, and metrics pushed to the hub; and how /metrics is read back."""
