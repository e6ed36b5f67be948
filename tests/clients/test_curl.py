"""curl: plain requests as people type them, with its own ways to send a body."""

from __future__ import annotations

import json
import subprocess

import pytest

from tests.clients.support.weather import I_AM, WHO

BODY = json.dumps({"model": "plain", "messages": [{"role": "user", "content": WHO}]})
JSON = ("-H", "content-type: application/json")


def curl(*arguments: str) -> str:
    command = ["curl", "--silent", "--show-error", "--max-time", "60", *arguments]
    return subprocess.run(command, capture_output=True, check=True, timeout=90).stdout.decode()


def content(answer: str) -> str:
    found = json.loads(answer)["choices"][0]["message"]["content"]
    assert isinstance(found, str)
    return found


def test_a_chat_is_answered(api: str) -> None:
    assert content(curl(f"{api}/chat/completions", *JSON, "-d", BODY)) == I_AM


def test_a_form_is_refused_with_the_option_to_add(api: str) -> None:
    error = json.loads(curl(f"{api}/chat/completions", "-d", BODY))["error"]
    assert "-H 'content-type: application/json'" in error["message"]


def test_a_stream_ends_with_done(api: str) -> None:
    streamed = json.dumps({**json.loads(BODY), "stream": True})
    events = [line for line in curl("-N", f"{api}/chat/completions", *JSON, "-d", streamed).splitlines() if line]
    assert events[-1] == "data: [DONE]"
    chunks = [json.loads(line.removeprefix("data: "))["choices"][0]["delta"] for line in events[:-1]]
    assert "".join(chunk.get("content") or "" for chunk in chunks) == I_AM


@pytest.mark.parametrize(
    "way",
    [
        ("-H", "transfer-encoding: chunked"),
        ("-H", "expect: 100-continue"),
        ("--http1.0",),
    ],
)
def test_a_body_can_be_chunked_or_expected_or_in_http_1_0(api: str, way: tuple[str, ...]) -> None:
    assert content(curl(f"{api}/chat/completions", *JSON, *way, "-d", BODY)) == I_AM


def test_head_and_get_of_the_health_page_agree(base_url: str) -> None:
    head = curl("--head", f"{base_url}/health")
    assert head.splitlines()[0].split()[1] == "200"
    assert json.loads(curl(f"{base_url}/health"))["status"] == "healthy"


def test_a_path_that_does_not_exist_is_a_404(api: str) -> None:
    assert curl("--output", "/dev/null", "--write-out", "%{http_code}", f"{api}/absent") == "404"
