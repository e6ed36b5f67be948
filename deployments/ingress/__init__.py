"""The ingress deployment: the process that serves the HTTP API and holds the connections to all engines."""
