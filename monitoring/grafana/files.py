"""Read the content to publish from the repository's files, and write it as files for Grafana's provisioning."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import yaml

from monitoring.grafana.names import DATASOURCE_NAME, DATASOURCE_UID, FOLDER_UID, JsonObject
from monitoring.grafana.rules import rule_group
from monitoring.rules import RULES

_MONITORING = Path(__file__).parent.parent
# The committed files are published, rather than generated ones, because they were reviewed.
DASHBOARDS = _MONITORING / "dashboards" / "json"
PROVISIONING = _MONITORING / "provisioning"


def dashboards() -> list[JsonObject]:
    """Return the dashboards to publish, by uid."""
    return [json.loads(path.read_text(encoding="utf-8")) for path in sorted(DASHBOARDS.glob("*.json"))]


def datasource(url: str | None) -> JsonObject:
    """Return our datasource; Grafana's server reaches Prometheus at `url`, and None leaves its URL unchanged."""
    wanted = {
        "uid": DATASOURCE_UID,
        "name": DATASOURCE_NAME,
        "type": "prometheus",
        "access": "proxy",
        "jsonData": {"httpMethod": "POST"},
    }
    return wanted if url is None else {**wanted, "url": url}


def using(dashboard: JsonObject, uid: str, name: str) -> JsonObject:
    """Return the dashboard with another datasource chosen by default."""
    copy: JsonObject = json.loads(json.dumps(dashboard))
    for variable in copy["templating"]["list"]:
        if variable["type"] == "datasource":
            variable["current"] = {"selected": False, "text": name, "value": uid}
    return copy


def write(directory: Path, rules: Path = RULES) -> Iterator[Path]:
    """Write dashboards/ and provisioning/ below `directory`; yields each path written.

    Raises ValueError and OSError as `rule_group` does.
    """
    for source in (*sorted(DASHBOARDS.glob("*.json")), *sorted(PROVISIONING.glob("*/*.yaml"))):
        below = "dashboards" / Path(source.name) if source.suffix == ".json" else source.relative_to(_MONITORING)
        yield _written(directory / below, source.read_text(encoding="utf-8"))
    yield _written(directory / "provisioning" / "alerting" / "raydix.yaml", _alerting(rules))


def _alerting(rules: Path) -> str:
    """Return the alert rules in the file format, which names folders by title and groups by name."""
    group = rule_group(rules, datasource_uid=DATASOURCE_UID, folder_uid=FOLDER_UID)
    for rule in group["rules"]:
        del rule["folderUID"], rule["ruleGroup"]
        # In files, Grafana expands environment variables in labels, but not in annotations and queries.
        rule["labels"] = {name: text.replace("$", "$$") for name, text in rule["labels"].items()}
    content = {
        "apiVersion": 1,
        "groups": [
            {
                "orgId": 1,
                "name": group["title"],
                "folder": "Raydix",
                "interval": f"{group['interval']}s",
                "rules": group["rules"],
            }
        ],
    }
    return yaml.safe_dump(content, sort_keys=False, allow_unicode=True, width=100)


def _written(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path
