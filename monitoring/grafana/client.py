"""Grafana's HTTP API through grafana-client; what goes wrong there ends in one message that says what to do."""

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
    """Something that whoever publishes can put right; the message says what and how."""


class ConflictError(GrafanaError):
    """What was read has changed since (HTTP 412)."""


class Grafana:
    """An open connection. `api` is grafana-client's GrafanaApi; every call to it belongs within `doing`."""

    def __init__(self, url: str, token: str) -> None:
        """Nothing is sent yet. Raises GrafanaError for a URL that cannot be one, or when the client is missing."""
        try:
            from grafana_client import GrafanaApi
        except ImportError:
            raise GrafanaError(_how_to_install()) from None
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise GrafanaError(f"--url {url!r} is not a URL such as https://grafana.example.com")
        if parts.username or parts.password:
            raise GrafanaError("--url holds a password: make a service account token and give that instead")
        self.url = url.rstrip("/")
        self._token = token
        # grafana-client joins the path and "api" as they are.
        base = f"{self.url}/" if parts.path.strip("/") else self.url
        self.api: Any = GrafanaApi.from_url(base, credential=token, timeout=TIMEOUT_S)

    @contextmanager
    def doing(self, what: str) -> Iterator[None]:
        """Turn all that can go wrong into GrafanaError. `what` completes "may not …", e.g. "read folders"."""
        import niquests.exceptions as http
        from grafana_client.client import GrafanaException, GrafanaTimeoutError

        try:
            yield
        except GrafanaTimeoutError:
            raise GrafanaError(
                f"{self.url} did not answer within {TIMEOUT_S:g} s: is it Grafana, and up?"
            ) from None
        except http.Timeout:
            raise GrafanaError(
                f"{self.url} did not answer within {TIMEOUT_S:g} s: is it Grafana, and up?"
            ) from None
        except GrafanaException as error:
            raise self._explained(error.status_code, self._message(error), what) from None
        except http.SSLError as error:
            raise GrafanaError(
                f"no TLS connection to {self.url} ({self._reason(error)}): is it http rather than https, or is "
                "its certificate of an authority that this machine does not know? REQUESTS_CA_BUNDLE names a "
                "file of such."
            ) from None
        except http.JSONDecodeError:
            raise self._not_grafana() from None
        except http.RequestException as error:
            raise GrafanaError(
                f"cannot reach Grafana at {self.url} ({self._reason(error)}): check --url, and that it is up"
            ) from None

    def check(self) -> None:
        """Ask whether this is Grafana, before anything is written."""
        # Not /health: Amazon's has none. Not `api.health.check`: it takes any page for an answer.
        settings = self.found("settings", self.api.client.GET, "/frontend/settings")
        if not isinstance(settings, dict) or "buildInfo" not in settings:
            raise self._not_grafana()

    def found(self, what: str, read: Any, *args: Any) -> Any:
        """What a reading call returns; None where there is no such thing (404)."""
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
                f"{self.url} does not accept the token: it may be mistyped, expired or of another Grafana. Make "
                "one under Administration, Service accounts."
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
        """An error's text in one line, without the token."""
        text = " ".join(str(error).split()).replace(self._token, "***")
        return text if len(text) <= 200 else text[:200] + "…"

    def _reason(self, error: Exception) -> str:
        """The system's words at the end of a connection error, after those of three libraries."""
        return self._redacted(str(error).rpartition(": ")[2].strip("()'\"")) or type(error).__name__

    def _not_grafana(self) -> GrafanaError:
        return GrafanaError(
            f"{self.url} does not answer as Grafana's API does: check --url, its path included, e.g. "
            "https://example.com/grafana"
        )


def _how_to_install() -> str:
    return (
        "publishing needs grafana-client, which must not be installed beside Ray because it replaces urllib3. "
        "Make an environment for it, and run the command there:\n"
        "  python3 -m venv raydix-publisher\n"
        f"  raydix-publisher/bin/pip install -r {REQUIREMENTS}\n"
        f"  raydix-publisher/bin/pip install --no-deps {_ourselves()}\n"
        "  raydix-publisher/bin/raydix dashboards push …"
    )


def _ourselves() -> str:
    """What pip installs Raydix from: the source tree we run from, or the version that is installed."""
    from importlib.metadata import PackageNotFoundError, version

    root = Path(__file__).parents[2]
    if (root / "pyproject.toml").is_file():
        return str(root)
    try:
        return f"raydix=={version('raydix')}"
    except PackageNotFoundError:
        return "raydix"
