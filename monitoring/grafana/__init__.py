"""Publishing to Grafana: datasource, folder, dashboards and alert rules, through its HTTP API or as files.

Runs without Ray and torch, in an environment of its own: grafana-client brings a package that takes the place of
urllib3.
"""
