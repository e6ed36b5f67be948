"""Draw pictures of the dashboards with data of a real Prometheus, without Grafana.

    python -m benchmarks.dashboard_preview --prometheus http://127.0.0.1:9090 --out docs

The pictures show the same panels, queries, units and thresholds in the same places; matplotlib draws them (extra
`plots`).
"""
