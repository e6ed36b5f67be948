"""`python -m monitoring.dashboards`: regenerate the JSON files."""

from monitoring.dashboards import DASHBOARDS
from monitoring.dashboards.grafana_json import as_text
from monitoring.grafana.files import DASHBOARDS as DIRECTORY


def main() -> None:
    """Write one file for each dashboard."""
    DIRECTORY.mkdir(exist_ok=True)
    for dashboard in DASHBOARDS:
        path = DIRECTORY / f"{dashboard.uid}.json"
        path.write_text(as_text(dashboard), encoding="utf-8")
        print(path)


if __name__ == "__main__":
    main()
