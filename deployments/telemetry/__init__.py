"""Request logs, traces, and the pushing and reading of metrics."""
