"""Grafana's HTTP API through grafana-client; every failure becomes one message that says what to do."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.resources import files
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

TIMEOUT_S = 15.0
REQUIREMENTS = Path(str(files("monitoring.grafana"))) / "requirements.txt"


class GrafanaError(Exception):
    """A failure that the user can correct; the message says what went wrong and what to do."""


class ConflictError(GrafanaError):
    """The object has changed since it was read (HTTP 412)."""


class Grafana:
    """An open connection. `api` is grafana-client's GrafanaApi; make every call to it within `doing`."""

    def __init__(self, url: str, token: str) -> None:
        """Open no connection yet. Raises GrafanaError for an invalid URL, or when grafana-client is missing."""
        try:
            from grafana_client import GrafanaApi
        except ImportError:
            raise GrafanaError(_how_to_install()) from None
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise GrafanaError(f"--url {url!r} is not a URL such as https://grafana.example.com")
        if parts.username or parts.password:
            raise GrafanaError("--url contains a password: create a service account token and pass that instead")
        self.url = url.rstrip("/")
        self._token = token
        # grafana-client joins the path and "api" without a slash.
        base = f"{self.url}/" if parts.path.strip("/") else self.url
        self.api: Any = GrafanaApi.from_url(base, credential=token, timeout=TIMEOUT_S)

    @contextmanager
    def doing(self, what: str) -> Iterator[None]:
        """Turn every failure into a GrafanaError. `what` completes "may not …", e.g. "read folders"."""
        import niquests.exceptions as http
        from grafana_client.client import GrafanaException, GrafanaTimeoutError

        try:
            yield
        except GrafanaTimeoutError:
            raise GrafanaError(
                f"{self.url} did not answer within {TIMEOUT_S:g} s: check that it is Grafana and up"
            ) from None
        except http.Timeout:
            raise GrafanaError(
                f"{self.url} did not answer within {TIMEOUT_S:g} s: check that it is Grafana and up"
            ) from None
        except GrafanaException as error:
            raise self._explained(error.status_code, self._message(error), what) from None
        except http.SSLError as error:
            raise GrafanaError(
                f"no TLS connection to {self.url} ({self._reason(error)}): use http if it serves no TLS; if "
                "this machine does not know its certificate's authority, let REQUESTS_CA_BUNDLE name a "
                "file with it"
            ) from None
        except http.JSONDecodeError:
            raise self._not_grafana() from None
        except http.RequestException as error:
            raise GrafanaError(
                f"cannot reach Grafana at {self.url} ({self._reason(error)}): check --url, and that it is up"
            ) from None

    def check(self) -> None:
        """Ask whether this is Grafana, before anything is written."""
        # /health does not exist at Amazon's Grafana, and `api.health.check` accepts any page as an answer.
        settings = self.found("settings", self.api.client.GET, "/frontend/settings")
        if not isinstance(settings, dict) or "buildInfo" not in settings:
            raise self._not_grafana()

    def found(self, what: str, read: Any, *args: Any) -> Any:
        """Return the result of a reading call; None if the object does not exist (404)."""
        with self.doing(f"read {what}"):
            try:
                answer = read(*args)
            except Exception as error:
                if getattr(error, "status_code", None) == 404:
                    return None
                raise
            if isinstance(answer, str):
                raise self._not_grafana()
            return answer

    def _explained(self, status: int, message: str, what: str) -> GrafanaError:
        if status == 401:
            return GrafanaError(
                f"{self.url} does not accept the token: it may be mistyped, expired or of another Grafana. "
                "Create one under Administration, Service accounts."
            )
        if status == 403:
            return GrafanaError(
                f"the token may not {what} ({message}): its service account needs the role Editor, and Admin for "
                "the datasource"
            )
        if status == 412:
            return ConflictError(message)
        return GrafanaError(f"Grafana would not {what}: {message}" + (f" (HTTP {status})" if status else ""))

    def _message(self, error: Any) -> str:
        response = error.response
        return self._redacted(
            response["message"] if isinstance(response, dict) and "message" in response else error
        )

    def _redacted(self, error: object) -> str:
        """Return an error's text in one line, without the token."""
        text = " ".join(str(error).split()).replace(self._token, "***")
        return text if len(text) <= 200 else text[:200] + "…"

    def _reason(self, error: Exception) -> str:
        """Return the system's message, which follows those of three libraries in a connection error."""
        return self._redacted(str(error).rpartition(": ")[2].strip("()'\"")) or type(error).__name__

    def _not_grafana(self) -> GrafanaError:
        return GrafanaError(
            f"{self.url} does not answer like Grafana's API: check --url, including its path, e.g. "
            "https://example.com/grafana"
        )


def _how_to_install() -> str:
    return (
        "publishing needs grafana-client, which must not be installed next to Ray because it replaces urllib3. "
        "Create an environment for it, and run the command there:\n"
        "  python3 -m venv raydix-publisher\n"
        f"  raydix-publisher/bin/pip install -r {REQUIREMENTS}\n"
        f"  raydix-publisher/bin/pip install --no-deps {_ourselves()}\n"
        "  raydix-publisher/bin/raydix dashboards push …"
    )


def _ourselves() -> str:
    """Return what pip installs Raydix from: this source tree, or the installed version."""
    from importlib.metadata import PackageNotFoundError, version

    root = Path(__file__).parents[2]
    if (root / "pyproject.toml").is_file():
        return str(root)
    try:
        return f"raydix=={version('raydix')}"
    except PackageNotFoundError:
        return "raydix"
