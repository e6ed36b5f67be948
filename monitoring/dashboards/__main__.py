"""`python -m monitoring.dashboards`: write the JSON files anew."""

from monitoring.dashboards import DASHBOARDS
from monitoring.dashboards.files import DIRECTORY, as_text
from monitoring.dashboards.grafana_json import to_json


def main() -> None:
    """Write one file for each dashboard."""
    DIRECTORY.mkdir(exist_ok=True)
    for dashboard in DASHBOARDS:
        path = DIRECTORY / f"{dashboard.uid}.json"
        path.write_text(as_text(to_json(dashboard)), encoding="utf-8")
        print(path)


if __name__ == "__main__":
    main()
