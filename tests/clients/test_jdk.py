"""JDK HttpClient, as it is by default: it asks for an upgrade to HTTP/2 with each first request."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

from tests.clients.support.weather import I_AM, WHO

BODY = {"model": "plain", "messages": [{"role": "user", "content": WHO}]}
PROGRAM = Path(__file__).parent / "support/Ask.java"


def ask(api: str, **fields: object) -> list[str]:
    command = ["java", "-Dfile.encoding=UTF-8", "-Dstdout.encoding=UTF-8", "-Dsun.jnu.encoding=UTF-8"]
    body = json.dumps({**BODY, **fields})  # ASCII alone, whatever the locale does to arguments
    arguments = [str(PROGRAM), f"{api}/chat/completions", body]
    result = subprocess.run([*command, *arguments], capture_output=True, timeout=120)
    assert result.returncode == 0, result.stderr.decode()
    status, *lines = result.stdout.decode().splitlines()
    assert status == "200"
    return lines


def test_a_chat_is_answered_although_an_upgrade_is_asked_for(api: str) -> None:
    (line,) = ask(api)
    assert json.loads(line)["choices"][0]["message"]["content"] == I_AM


def test_a_stream_is_read_line_by_line(api: str) -> None:
    events = [line.removeprefix("data: ") for line in ask(api, stream=True) if line]
    assert events.pop() == "[DONE]"
    assert "".join(json.loads(event)["choices"][0]["delta"].get("content") or "" for event in events) == I_AM
