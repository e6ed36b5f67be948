"""Publish to Grafana: compare the wanted with the existing content, and write where they differ.

Every object is found by its uid. Fields that Grafana adds (ids, versions, defaults) do not count as differences,
so a second run writes nothing.
"""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass
from typing import Any, Literal

from monitoring.grafana.client import ConflictError, Grafana, GrafanaError
from monitoring.grafana.names import FOLDER_UID, RULE_GROUP, JsonObject
from monitoring.grafana.rules import seconds

MESSAGE = "raydix dashboards push"
"""Message of our versions in a dashboard's history; versions without it were saved by another user."""

DEFAULT_PROMETHEUS = "http://localhost:9090"

PublishOutcome = Literal["created", "updated", "no change"]


@dataclass(frozen=True, slots=True)
class Published:
    """Outcome of publishing one object."""

    kind: Literal["datasource", "folder", "dashboard", "alert rules"]
    name: str
    outcome: PublishOutcome


class Publisher:
    """Publishes to one Grafana. Every method raises GrafanaError; objects published before it stay."""

    def __init__(self, grafana: Grafana) -> None:
        self._grafana = grafana
        self._api = grafana.api

    def datasource(self, wanted: JsonObject) -> Published:
        """Publish a datasource by its uid; settings that `wanted` does not mention stay unchanged."""
        uid, api = wanted["uid"], self._api.datasource
        existing = self._grafana.found("datasources", api.get_datasource_by_uid, uid)
        outcome = _outcome(existing, existing is not None and contains(existing, wanted))
        with self._grafana.doing("write the datasource"):
            if outcome == "created":
                api.create_datasource({"url": DEFAULT_PROMETHEUS, **wanted})
            elif outcome == "updated":
                settings = {**existing.get("jsonData", {}), **wanted["jsonData"]}
                api.update_datasource_by_uid(uid, {**existing, **wanted, "jsonData": settings})
        return Published("datasource", wanted["name"], outcome)

    def existing_datasource(self, uid: str) -> JsonObject:
        """Return the datasource with that uid."""
        existing = self._grafana.found("datasources", self._api.datasource.get_datasource_by_uid, uid)
        if existing is None:
            raise GrafanaError(
                f"--datasource {uid}: there is no such datasource; its uid is in the address of its page"
            )
        return dict(existing)

    def folder(self, title: str) -> Published:
        """Publish our folder under this title."""
        return self._twice(lambda: self._folder(title), f"the folder {title!r}")

    def dashboard(self, wanted: JsonObject, *, force: bool = False) -> Published:
        """Publish a dashboard in our folder. Edits that another user saved are overwritten only with `force`."""
        return self._twice(lambda: self._dashboard(wanted, force), f"the dashboard {wanted['title']!r}")

    def rules(self, wanted: JsonObject) -> Published:
        """Publish all rules of our group; the group's other rules are deleted."""
        api = self._api.alertingprovisioning
        existing = self._grafana.found("alert rules", api.get_rule_group, FOLDER_UID, RULE_GROUP)
        outcome = _outcome(existing, existing is not None and contains(existing, wanted))
        if outcome != "no change":
            with self._grafana.doing("write alert rules"):
                # Without provenance the rules can be silenced and viewed in Grafana like others.
                api.update_rule_group(FOLDER_UID, RULE_GROUP, wanted, disable_provenance=True)
        return Published("alert rules", f"{len(wanted['rules'])} in group {RULE_GROUP}", outcome)

    def _folder(self, title: str) -> Published:
        api = self._api.folder
        existing = self._grafana.found("folders", api.get_folder, FOLDER_UID)
        outcome = _outcome(existing, existing is not None and existing["title"] == title)
        with self._grafana.doing("write folders"):
            if outcome == "created":
                api.create_folder(title, uid=FOLDER_UID)
            elif outcome == "updated":
                api.update_folder(FOLDER_UID, title=title, version=existing.get("version"))
        return Published("folder", title, outcome)

    def _dashboard(self, wanted: JsonObject, force: bool) -> Published:
        existing = self._grafana.found("dashboards", self._api.dashboard.get_dashboard, wanted["uid"])
        body: JsonObject = {
            "dashboard": deepcopy(wanted),
            "folderUid": FOLDER_UID,
            "message": MESSAGE,
            "overwrite": False,
        }
        same = False
        if existing is not None:
            same = contains(existing["dashboard"], wanted) and existing["meta"].get("folderUid") == FOLDER_UID
            body["dashboard"]["version"] = existing["dashboard"].get("version")
        outcome = _outcome(existing, same)
        if outcome == "updated" and not force:
            self._check_edits(wanted)
        if outcome != "no change":
            with self._grafana.doing("write dashboards"):
                self._api.dashboard.update_dashboard(body)
        return Published("dashboard", wanted["title"], outcome)

    def _check_edits(self, wanted: JsonObject) -> None:
        read = self._api.dashboard_versions.get_dashboard_versions_by_uid
        history = self._grafana.found("dashboards", read, wanted["uid"])
        versions = history.get("versions", []) if isinstance(history, dict) else history or []
        latest: JsonObject = max(versions, key=lambda version: int(version["version"]), default={})
        if latest and not str(latest.get("message", "")).startswith(MESSAGE):
            raise GrafanaError(
                f"{wanted['title']!r} was edited in Grafana (version {latest['version']}, by "
                f"{latest.get('createdBy') or 'another user'}): save a copy under another name, or overwrite it "
                "with --force"
            )

    def _twice(self, write: Any, what: str) -> Published:
        """Write, and retry once after a conflict: another user wrote between our read and our write."""
        try:
            return self._once(write)
        except ConflictError:
            pass
        try:
            return self._once(write)
        except ConflictError as error:
            raise GrafanaError(
                f"Grafana refuses {what} twice ({error}): another one has its name, or it is being written at the "
                "same time. Rename the other one, or try again"
            ) from None

    @staticmethod
    def _once(write: Any) -> Published:
        published: Published = write()
        return published


def contains(existing: Any, wanted: Any) -> bool:
    """Whether `existing` contains all that `wanted` contains; it may contain more."""
    if isinstance(wanted, dict):
        return isinstance(existing, dict) and all(
            _same_duration(existing.get(key), value) if key == "for" else contains(existing.get(key), value)
            for key, value in wanted.items()
        )
    if isinstance(wanted, list):
        return isinstance(existing, list) and len(existing) == len(wanted) and all(map(contains, existing, wanted))
    return bool(existing == wanted)


def _same_duration(existing: object, wanted: str) -> bool:
    """Whether two durations are equal, as 5m and 300s are; Grafana answers in its own notation."""
    try:
        return seconds(str(existing)) == seconds(wanted)
    except ValueError:
        return False


def _outcome(existing: object, same: bool) -> PublishOutcome:
    return "created" if existing is None else "no change" if same else "updated"
