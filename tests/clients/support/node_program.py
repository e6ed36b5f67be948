"""Runs a program for Node.js in the directory with its packages."""

from __future__ import annotations

import json
import os
import subprocess
from typing import Any

from tests.clients.support.clients import NODE
from tests.clients.support.weather import BOTH, DESCRIBE, PARIS, SCHEMA, WHO

_QUESTIONS = {"WHO": WHO, "PARIS": PARIS, "BOTH": BOTH, "DESCRIBE": DESCRIBE, "SCHEMA": json.dumps(SCHEMA)}


def run_node(program: str, url: str, part: str) -> Any:
    """Run one part of `program`, and return what it prints, which is JSON."""
    environment = {**os.environ, **_QUESTIONS, "BASE_URL": url}
    result = subprocess.run(
        ["node", program, part], cwd=NODE, env=environment, capture_output=True, text=True, timeout=120
    )
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)
