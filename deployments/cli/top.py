"""`raydix top`: show the state of a running service in the terminal or as JSON."""

from __future__ import annotations

import json
import time
from dataclasses import asdict

from rich.console import Console
from rich.live import Live

from deployments.cli.api_key import given_key
from deployments.cli.errors import UserError
from deployments.cli.top_client import TopClient, TopClientError
from deployments.cli.top_state import TopView, ViewBuilder
from deployments.cli.top_view import Outage, Screen

DEFAULT_KEY_ENV = "RAYDIX_ADMIN_KEY"


def run(url: str, key: str | None, key_env: str | None, interval: float, *, once: bool, as_json: bool) -> None:
    """Show the service until Ctrl-C, or once after two readings. Raises UserError when it cannot be read."""
    console = Console()
    with TopClient(url, given_key(key, key_env, DEFAULT_KEY_ENV)) as client:
        top = Top(client, console, as_json)
        try:
            if once:
                top.once(interval)
            else:
                top.follow(interval)
        except KeyboardInterrupt:
            return


class Top:
    """Shows one server's reports on one console."""

    def __init__(self, client: TopClient, console: Console, as_json: bool) -> None:
        self._client, self._console, self._as_json = client, console, as_json
        self._views = ViewBuilder(client.url)
        self._view: TopView | None = None
        self._outage: Outage | None = None

    def once(self, interval: float) -> None:
        """Show one view of two readings. Raises UserError when either fails."""
        try:
            self._views.see(self._client.read())
            time.sleep(interval)
            self._view = self._views.see(self._client.read())
        except TopClientError as error:
            raise self._failed(error) from None
        self._print()

    def follow(self, interval: float) -> None:
        """Show reading after reading. Raises UserError when the first one fails for a lasting reason."""
        if self._as_json or not self._console.is_terminal:
            while True:
                self._step()
                self._print()
                time.sleep(interval)
        self._step()
        live = Live(console=self._console, screen=True, auto_refresh=False)
        try:  # not `with`: Ctrl-C during start() must restore the terminal as well
            live.start()
            while True:
                live.update(self._screen(), refresh=True)
                time.sleep(interval)
                self._step()
        finally:
            live.stop()

    def _step(self) -> None:
        try:
            self._view, self._outage = self._views.see(self._client.read()), None
        except TopClientError as error:
            if self._view is None and not error.is_temporary:
                raise self._failed(error) from None
            now = time.time()
            self._outage = Outage(self._outage.since if self._outage is not None else now, now, str(error))

    def _failed(self, error: TopClientError) -> UserError:
        return UserError(f"{self._client.url}: {error}")

    def _screen(self) -> Screen:
        fits_height = self._console.is_terminal
        return Screen(self._client.url, self._view, self._outage, fits_height)

    def _print(self) -> None:
        if not self._as_json:
            self._console.print(Screen(self._client.url, self._view, self._outage))
            return
        document = self._view.as_json() if self._view is not None else {"url": self._client.url}
        outage = asdict(self._outage) if self._outage is not None else None
        self._console.out(json.dumps({**document, "away": outage}), highlight=False)
