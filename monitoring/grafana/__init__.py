"""Publishing to Grafana: datasource, folder, dashboards and alert rules, through its HTTP API or as files.

The package runs without Ray and torch, in an environment of its own, because a dependency of grafana-client
replaces urllib3.
"""
