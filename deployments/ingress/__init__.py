"""The ingress deployment: one process that serves the HTTP API and holds connections to all engines."""
