"""`raydix serve` shows the lines that its ingresses write."""

from __future__ import annotations

import asyncio
import io
import threading
from typing import Any

from rich.console import Console

from deployments.cli.request_lines import shown_requests
from deployments.telemetry.line_file import LineFile


class Noted(io.StringIO):
    """A terminal that says when it has shown a text."""

    def __init__(self, awaited: str) -> None:
        super().__init__()
        self._awaited, self.has_shown = awaited, threading.Event()

    def write(self, text: str) -> int:
        written = super().write(text)
        if self._awaited in self.getvalue():
            self.has_shown.set()
        return written


def application(**args: Any) -> dict[str, Any]:
    return {"import_path": "deployments.app:build", "args": args}


def test_lines_of_all_ingresses_are_shown_as_they_are() -> None:
    screen = Noted("[bold]500")
    config = {
        "applications": [application(), application(logging={"level": "ERROR"}), {"import_path": "other:app"}]
    }
    with shown_requests(config, Console(file=screen)):
        one, two, _ = config["applications"]
        assert one["args"]["logging"]["access_log"] == two["args"]["logging"]["access_log"]
        assert two["args"]["logging"]["level"] == "ERROR"

        async def write() -> None:
            for app, line in ((one, "GET /a 200 1 ms"), (two, "POST /b 503 2 ms: [bold]500")):
                lines = LineFile(app["args"]["logging"]["access_log"])
                lines.add(line)
                lines.flush()
                lines.close()

        asyncio.run(write())
        assert screen.has_shown.wait(60)
    assert screen.getvalue().splitlines() == ["GET /a 200 1 ms", "POST /b 503 2 ms: [bold]500"]


def test_a_file_that_the_config_names_stays() -> None:
    config = {"applications": [application(logging={"access_log": "/var/log/requests"})]}
    with shown_requests(config, Console(file=io.StringIO())):
        assert config["applications"][0]["args"]["logging"]["access_log"] == "/var/log/requests"


def test_errors_have_a_colour_and_a_line_that_comes_in_parts_is_one() -> None:
    screen = Noted("last")
    config = {"applications": [application()]}
    terminal = Console(file=screen, force_terminal=True, color_system="standard", width=10)
    with shown_requests(config, terminal):
        with open(config["applications"][0]["args"]["logging"]["access_log"], "wb", buffering=0) as pipe:
            for part in (b"GET /a 200 1 ms\nGET /b 40", b"4 1 ms\nGET /c 404 1 ms\nGET /d 500 1 ms\nlast\n"):
                pipe.write(part)
        assert screen.has_shown.wait(60)
    assert screen.getvalue() == (
        "GET /a 200 1 ms\n"
        "\x1b[33mGET /b 404 1 ms\x1b[0m\n"
        "\x1b[33mGET /c 404 1 ms\x1b[0m\n"
        "\x1b[31mGET /d 500 1 ms\x1b[0m\n"
        "last\n"
    )
