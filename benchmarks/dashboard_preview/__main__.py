"""`python -m benchmarks.dashboard_preview`: draw all dashboards."""

from __future__ import annotations

import argparse
import time
from io import BytesIO
from pathlib import Path

import httpx
from PIL import Image

from benchmarks.dashboard_preview.data import EVERYTHING, PrometheusView
from benchmarks.dashboard_preview.drawing import PAPER, draw
from monitoring.dashboards import DASHBOARDS

DPI = 110


def main() -> None:
    """Draw all dashboards."""
    parser = argparse.ArgumentParser(description="Draw the dashboards with the data of a Prometheus.")
    parser.add_argument("--prometheus", default="http://127.0.0.1:9090", help="its URL")
    parser.add_argument("--out", type=Path, default=Path("docs"), help="folder for the PNGs")
    parser.add_argument("--minutes", type=float, default=5.0, help="time span to show, ending now")
    parser.add_argument("--rate-interval", default="30s", help="window of rates")
    options = parser.parse_args()
    end = time.time()
    with httpx.Client(base_url=options.prometheus, timeout=30.0) as client:
        variables = {**EVERYTHING, "__rate_interval": options.rate_interval}
        source = PrometheusView(client, end - options.minutes * 60, end, variables)
        for dashboard in DASHBOARDS:
            path = options.out / f"dashboard_{dashboard.uid.removeprefix('raydix-')}.png"
            drawn = BytesIO()
            draw(dashboard, source).savefig(drawn, dpi=DPI, facecolor=PAPER)
            Image.open(drawn).convert("RGB").quantize(256, Image.Quantize.FASTOCTREE).save(path, optimize=True)
            print(path)


if __name__ == "__main__":
    main()
