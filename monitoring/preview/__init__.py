"""Pictures of the dashboards with a real Prometheus' data, where no Grafana is at hand.

    python -m monitoring.preview --prometheus http://127.0.0.1:9090 --out docs

The same panels, queries, units and thresholds in the same places; matplotlib draws them (extra `plots`).
"""
