"""Grafana's HTTP API as far as publishing needs it, with its rules: uids, versions, roles, 404, 409 and 412."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from monitoring.grafana.names import JsonObject

Answer = tuple[int, Any]
NOT_FOUND: Answer = (404, {"message": "Not found"})


@dataclass
class FakeGrafana:
    """The state; `start` serves it. Tokens by role: "admin-token", "editor-token", "viewer-token"."""

    prefix: str = ""
    """Path below which the API is, as behind a proxy."""
    datasources: dict[str, JsonObject] = field(default_factory=dict)
    folders: dict[str, JsonObject] = field(default_factory=dict)
    dashboards: dict[str, list[JsonObject]] = field(default_factory=dict)
    """Versions of each, oldest first: {dashboard, folderUid, message, createdBy}."""
    groups: dict[tuple[str, str], JsonObject] = field(default_factory=dict)
    writes: list[str] = field(default_factory=list)
    before_write: Callable[[str], None] = lambda path: None
    """What a user does right before a dashboard is written."""

    def start(self) -> str:
        """Serve on a free port; returns the URL."""
        state = self

        class Handler(BaseHTTPRequestHandler):
            def answer(self) -> None:
                length = int(self.headers.get("Content-Length") or 0)
                body = json.loads(self.rfile.read(length)) if length else {}
                status, content = state.handle(self.command, self.path, self.headers.get("Authorization"), body)
                is_page = isinstance(content, str)
                data = content.encode() if is_page else json.dumps(content).encode()
                self.send_response(status)
                self.send_header("Content-Type", "text/html" if is_page else "application/json")
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            do_GET = do_POST = do_PUT = answer

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        self.port = self._server.server_address[1]
        return f"http://127.0.0.1:{self.port}{self.prefix}"

    def stop(self) -> None:
        """Serve no more."""
        self._server.shutdown()
        self._server.server_close()

    def edit(self, uid: str, title: str, by: str = "alice") -> None:
        """A user saves a dashboard in the browser."""
        latest = deepcopy(self.dashboards[uid][-1])
        latest["dashboard"].update(title=title, version=len(self.dashboards[uid]) + 1)
        self.dashboards[uid].append({**latest, "message": "", "createdBy": by})

    def handle(self, method: str, path: str, authorization: str | None, body: JsonObject) -> Answer:
        """One request."""
        path = path.split("?")[0]
        if not path.startswith(f"{self.prefix}/api/"):
            return 200, "<html>Welcome</html>"
        path = path.removeprefix(f"{self.prefix}/api")
        role = (authorization or "").removeprefix("Bearer ").removesuffix("-token")
        if role not in ("admin", "editor", "viewer"):
            return 401, {"message": f"Invalid API key {authorization}"}
        if method != "GET" and (role == "viewer" or (role == "editor" and path.startswith("/datasources"))):
            return 403, {"message": "You'll need additional permissions to perform this action."}
        if path == "/frontend/settings":
            return 200, {"buildInfo": {"version": "12.2.0"}}
        for pattern, handler in _ROUTES:
            if found := re.fullmatch(pattern, f"{method} {path}"):
                status, content = handler(self, body, *found.groups())
                if method != "GET" and status < 300:
                    self.writes.append(path)
                return status, content
        return NOT_FOUND


def _get_datasource(state: FakeGrafana, body: JsonObject, uid: str) -> Answer:
    return (200, state.datasources[uid]) if uid in state.datasources else NOT_FOUND


def _create_datasource(state: FakeGrafana, body: JsonObject) -> Answer:
    if body["uid"] in state.datasources or body["name"] in [d["name"] for d in state.datasources.values()]:
        return 409, {"message": "data source with the same name already exists"}
    state.datasources[body["uid"]] = {"id": 1, "isDefault": False, "readOnly": False, "version": 1, **body}
    return 200, {"datasource": state.datasources[body["uid"]]}


def _update_datasource(state: FakeGrafana, body: JsonObject, uid: str) -> Answer:
    existing = state.datasources.get(uid)
    if existing is None:
        return NOT_FOUND
    if body.get("version", existing["version"]) != existing["version"]:
        return 409, {"message": "Datasource has already been updated by someone else."}
    # What is not named goes back to its default, as in Grafana.
    state.datasources[uid] = {
        "id": 1,
        "isDefault": False,
        "readOnly": False,
        **body,
        "version": existing["version"] + 1,
    }
    return 200, {"datasource": state.datasources[uid]}


def _get_folder(state: FakeGrafana, body: JsonObject, uid: str) -> Answer:
    return (200, state.folders[uid]) if uid in state.folders else NOT_FOUND


def _create_folder(state: FakeGrafana, body: JsonObject) -> Answer:
    if body["uid"] in state.folders or body["title"] in [folder["title"] for folder in state.folders.values()]:
        return 412, {"message": "a folder with that name or uid already exists", "status": "name-exists"}
    state.folders[body["uid"]] = {"id": 2, "version": 1, **body}
    return 200, state.folders[body["uid"]]


def _update_folder(state: FakeGrafana, body: JsonObject, uid: str) -> Answer:
    folder = state.folders[uid]
    if not body.get("overwrite") and body.get("version") != folder["version"]:
        return 412, {"message": "the folder has been changed by someone else", "status": "version-mismatch"}
    folder.update(title=body["title"], version=folder["version"] + 1)
    return 200, folder


def _get_dashboard(state: FakeGrafana, body: JsonObject, uid: str) -> Answer:
    if uid not in state.dashboards:
        return NOT_FOUND
    latest = state.dashboards[uid][-1]
    meta = {"folderUid": latest["folderUid"], "version": latest["dashboard"]["version"], "provisioned": False}
    return 200, {"dashboard": latest["dashboard"], "meta": meta}


def _save_dashboard(state: FakeGrafana, body: JsonObject) -> Answer:
    dashboard = body["dashboard"]
    uid = dashboard["uid"]
    state.before_write(uid)
    if body.get("folderUid") not in state.folders:
        return 400, {"message": "folder not found"}
    versions = state.dashboards.setdefault(uid, [])
    current = versions[-1]["dashboard"]["version"] if versions else 0
    if not body.get("overwrite") and dashboard.get("version", 0) != current:
        message = "The dashboard has been changed by someone else"
        return 412, {"message": message, "status": "version-mismatch"}
    others = [v[-1] for u, v in state.dashboards.items() if u != uid and v]
    if (dashboard["title"], body["folderUid"]) in [(o["dashboard"]["title"], o["folderUid"]) for o in others]:
        if not versions:
            del state.dashboards[uid]
        return 412, {
            "message": "A dashboard with the same name in the folder already exists",
            "status": "name-exists",
        }
    saved = {**dashboard, "id": 7, "version": current + 1, "fiscalYearStartMonth": 0}
    message = body.get("message", "")
    versions.append({"dashboard": saved, "folderUid": body["folderUid"], "message": message, "createdBy": "sa-1"})
    return 200, {"uid": uid, "version": current + 1, "status": "success"}


def _get_versions(state: FakeGrafana, body: JsonObject, uid: str) -> Answer:
    if uid not in state.dashboards:
        return NOT_FOUND
    listed = [
        {"version": one["dashboard"]["version"], "message": one["message"], "createdBy": one["createdBy"]}
        for one in reversed(state.dashboards[uid])
    ]
    return 200, {"continueToken": "", "versions": listed}


def _get_group(state: FakeGrafana, body: JsonObject, folder: str, group: str) -> Answer:
    return (200, state.groups[folder, group]) if (folder, group) in state.groups else NOT_FOUND


def _put_group(state: FakeGrafana, body: JsonObject, folder: str, group: str) -> Answer:
    if folder not in state.folders:
        return 400, {"message": "folder does not exist"}
    if body["interval"] % 10:
        return 400, {"message": "interval must be a multiple of 10 s"}
    for rule in body["rules"]:
        if not re.fullmatch(r"[a-zA-Z0-9_-]{1,40}", rule["uid"]):
            return 400, {"message": f"cannot use {rule['uid']} as a uid"}
        if rule["condition"] not in [step["refId"] for step in rule["data"]]:
            return 400, {"message": f"condition {rule['condition']} does not exist"}
        unknown = {step["datasourceUid"] for step in rule["data"]} - {"__expr__", *state.datasources}
        if unknown:
            return 400, {"message": f"data source {unknown} not found"}
    saved = deepcopy(body)
    for number, rule in enumerate(saved["rules"]):
        # Grafana writes durations in its own way, and adds of its own.
        rule.update(id=number, orgID=1, updated="2026-01-01T00:00:00Z", provenance="", notification_settings=None)
        rule["for"] = {"60s": "1m", "120s": "2m", "0s": "0s"}.get(rule["for"], rule["for"])
    state.groups[folder, group] = saved
    return 200, saved


_ROUTES: list[tuple[str, Callable[..., Answer]]] = [
    (r"GET /datasources/uid/([^/]+)", _get_datasource),
    (r"POST /datasources", _create_datasource),
    (r"PUT /datasources/uid/([^/]+)", _update_datasource),
    (r"GET /folders/([^/]+)", _get_folder),
    (r"POST /folders", _create_folder),
    (r"PUT /folders/([^/]+)", _update_folder),
    (r"GET /dashboards/uid/([^/]+)", _get_dashboard),
    (r"GET /dashboards/uid/([^/]+)/versions", _get_versions),
    (r"POST /dashboards/db", _save_dashboard),
    (r"GET /v1/provisioning/folder/([^/]+)/rule-groups/([^/]+)", _get_group),
    (r"PUT /v1/provisioning/folder/([^/]+)/rule-groups/([^/]+)", _put_group),
]
