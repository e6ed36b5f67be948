"""Shows the requests to the ingresses in the console of `raydix serve`: they write lines into its pipe."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import groupby
from typing import Any

from rich.console import Console

from deployments.cli.serve_config import IMPORT_PATH

_STATUS = re.compile(r"^\S+ \S+ (\d)\d\d ")
_STYLES = {"4": "yellow", "5": "red"}
_READ_BYTES = 65_536


@contextmanager
def shown_requests(config: dict[str, Any], console: Console) -> Iterator[None]:
    """Show the config's requests meanwhile, except those of applications with `logging.access_log`."""
    logs = [_logging(app) for app in config["applications"] if app.get("import_path") == IMPORT_PATH]
    without = [log for log in logs if log.get("access_log") is None]
    directory = tempfile.mkdtemp(prefix="raydix-")
    path = os.path.join(directory, "requests")
    os.mkfifo(path, 0o600)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    writer = os.open(path, os.O_WRONLY)  # While one writer is open, the reader waits for the next ingress.
    os.set_blocking(reader, True)
    for log in without:
        log["access_log"] = path
    thread = threading.Thread(target=_show, args=(reader, console), name="requests", daemon=True)
    thread.start()
    try:
        yield
    finally:
        os.close(writer)
        shutil.rmtree(directory, ignore_errors=True)


def _logging(application: dict[str, Any]) -> dict[str, Any]:
    args = application["args"]
    args["logging"] = dict(args.get("logging") or {})
    found: dict[str, Any] = args["logging"]
    return found


def _show(reader: int, console: Console) -> None:
    """Show lines as they come. Lines that came together are printed together, which costs a tenth."""
    with open(reader, "rb", buffering=0) as pipe:
        rest = b""
        while data := pipe.read(_READ_BYTES):
            *lines, rest = (rest + data).split(b"\n")
            for style, alike in groupby((line.decode("utf-8", "replace") for line in lines), _style):
                console.out("\n".join(alike), style=style, highlight=False)


def _style(line: str) -> str | None:
    status = _STATUS.match(line)
    return _STYLES.get(status[1]) if status else None
