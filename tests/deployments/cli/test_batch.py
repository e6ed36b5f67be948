"""`raydix batch` against a server whose behaviour is known."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from deployments.batch.runner import NoReply, Reply
from deployments.cli.batch import Server
from tests.deployments.support.command_line import raydix
from tests.support.fake_openai import Server as FakeServer

PATIENCE_S = 60.0


class Workplace:
    """A folder with an input, in which the command runs."""

    def __init__(self, root: Path, url: str, *prompts: str) -> None:
        self.input, self.output = root / "in.jsonl", root / "out.jsonl"
        self.partial = root / "out.jsonl.partial"
        self._url, self._environment = url, dict(os.environ)
        self._environment.pop("RAYDIX_API_KEY", None)
        self.ask(*prompts)

    def ask(self, *prompts: str) -> None:
        lines = [
            {"custom_id": f"id {prompt}", "method": "POST", "url": "/v1/completions", "body": {"prompt": prompt}}
            for prompt in prompts
        ]
        self.input.write_text("".join(json.dumps(line) + "\n" for line in lines))

    def start(self, *options: str) -> subprocess.Popen[str]:
        """Start the command in a process of its own, which can be interrupted and killed."""
        command = [sys.executable, "-m", "deployments.cli", "batch", str(self.input), str(self.output)]
        return subprocess.Popen(
            [*command, "--url", self._url, *options],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=self._environment,
        )  # fmt: skip

    def run(self, *options: str) -> tuple[int | None, str]:
        """Return the exit code, and what was written on standard error in one line."""
        ran = raydix("batch", str(self.input), str(self.output), "--url", self._url, *options)
        assert ran.stdout == "" and "Traceback" not in ran.stderr
        return ran.returncode, " ".join(ran.stderr.split())

    def answers(self) -> list[tuple[str, Any]]:
        lines = [json.loads(line) for line in self.output.read_text().splitlines()]
        return [(line["custom_id"], line["response"]["body"]["choices"][0]["text"]) for line in lines]

    def wait_for_answers(self, count: int) -> None:
        wait_until(lambda: self.partial.exists() and self.partial.read_bytes().count(b"\n") >= 1 + count)


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_file_is_answered_in_its_order(fake_server: FakeServer, tmp_path: Path) -> None:
    prompts = [f"prompt {number}" for number in range(20)]
    place = Workplace(tmp_path, fake_server.url, *prompts)
    assert place.run("--concurrency", "4") == (0, f"20 of 20 requests are answered in {place.output}.")
    assert place.answers() == [(f"id {prompt}", prompt) for prompt in prompts]
    assert fake_server.most_open <= 4
    assert {body["priority"] for body in fake_server.bodies} == {10}
    line = json.loads(place.output.read_text().splitlines()[0])
    assert line["response"]["status_code"] == 200 and line["response"]["request_id"] == "req-1"


def test_without_a_priority_bodies_are_sent_as_they_are(fake_server: FakeServer, tmp_path: Path) -> None:
    assert Workplace(tmp_path, fake_server.url, "a").run("--priority", "0")[0] == 0
    assert fake_server.bodies == [{"prompt": "a"}]


@pytest.mark.parametrize("sign", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_an_interrupted_batch_resumes_where_it_stopped(
    fake_server: FakeServer, tmp_path: Path, sign: signal.Signals
) -> None:
    prompts = [f"prompt {number}" for number in range(20)]
    place = Workplace(tmp_path, fake_server.url, *prompts)
    fake_server.permits = threading.Semaphore(10)
    process = place.start("--concurrency", "3")
    place.wait_for_answers(10)
    wait_until(lambda: len(fake_server.bodies) == 13)  # Three are open: a killed process cannot take them back.
    process.send_signal(sign)
    _, errors = process.communicate(timeout=PATIENCE_S)
    if sign == signal.SIGKILL:
        assert process.returncode == -signal.SIGKILL
    else:
        kept = f"10 of 20 lines are answered and kept in {place.partial}; the same command continues"
        assert process.returncode == 130 and f"Interrupted. {kept}" in " ".join(errors.split())
    answered = {json.loads(line)["custom_id"] for line in place.partial.read_text().splitlines()[1:]}
    fake_server.bodies.clear()
    fake_server.permits.release(1_000_000)
    code, said = place.run()
    assert code == 0 and "10 of 20 lines were answered before. 20 of 20 requests are answered" in said
    sent = {f"id {body['prompt']}" for body in fake_server.bodies}
    assert len(sent) == len(fake_server.bodies) == 10 and not sent & answered
    assert place.answers() == [(f"id {prompt}", prompt) for prompt in prompts]


def test_failed_requests_are_lines_of_the_output_and_can_be_sent_again(
    fake_server: FakeServer, tmp_path: Path
) -> None:
    place = Workplace(tmp_path, fake_server.url, "good", "cut this")
    place.input.write_text(place.input.read_text() + "nonsense\n")
    code, said = place.run("--attempts", "1", "--concurrency", "1")
    assert code == 1
    assert f"1 of 3 requests are answered in {place.output}, 2 failed: their lines say why." in said
    good, cut, nonsense = [json.loads(line) for line in place.output.read_text().splitlines()]
    assert good["error"] is None and cut["response"] is None
    assert cut["custom_id"] == "id cut this" and cut["error"]["code"] == "no_reply"
    assert f"{fake_server.url} gave no answer" in cut["error"]["message"]
    assert nonsense["custom_id"] is None and nonsense["error"]["code"] == "invalid_line"
    code, said = place.run()
    assert code == 2 and f"{place.output} exists already" in said
    place.input.write_text(place.input.read_text().replace("cut this", "mended").replace("nonsense\n", ""))
    place.input.write_text(place.input.read_text().replace("id mended", "id cut this"))
    fake_server.bodies.clear()
    assert place.run("--retry-failed")[0] == 0
    assert place.answers() == [("id good", "good"), ("id cut this", "mended")]
    assert [body["prompt"] for body in fake_server.bodies] == ["mended"]


def test_a_server_that_is_not_there_is_one_line_on_stderr(tmp_path: Path) -> None:
    place = Workplace(tmp_path, "http://127.0.0.1:9", "a")
    code, said = place.run()
    assert code == 1 and "cannot reach http://127.0.0.1:9" in said and "is `raydix serve` running there?" in said
    assert not place.partial.exists()


def test_a_server_that_refuses_for_too_long_ends_the_batch(fake_server: FakeServer, tmp_path: Path) -> None:
    place = Workplace(tmp_path, fake_server.url, "good", "refuse this")
    code, said = place.run("--patience", "1")
    assert code == 1 and "the API has accepted no request for 1 seconds" in said and "HTTP 429" in said
    assert f"1 of 2 lines are answered and kept in {place.partial}; the same command continues" in said


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--url", "http://[::x"), "is not a URL"),
        (("--key-env", "NOT_SET_ANYWHERE"), "this environment variable is not set or empty"),
        (("--key", "a b"), "visible ASCII characters"),
        (("--concurrency", "0"), "Invalid value"),
    ],
)
def test_wrong_options_are_explained(
    fake_server: FakeServer, tmp_path: Path, options: tuple[str, ...], message: str
) -> None:
    code, said = Workplace(tmp_path, fake_server.url, "a").run(*options)
    assert code == 2 and message in said


def test_a_file_that_is_no_batch_is_refused_before_anything_is_sent(
    fake_server: FakeServer, tmp_path: Path
) -> None:
    place = Workplace(tmp_path, fake_server.url, "a", "b", "a")
    code, said = place.run()
    assert code == 2 and "has the custom_id 'id a' twice, in lines 1 and 3" in said
    assert fake_server.bodies == [] and not place.partial.exists()


class Answers(httpx.AsyncBaseTransport):
    """Answers with what a test gives, and keeps the requests."""

    def __init__(self, *responses: httpx.Response | Exception) -> None:
        self._responses, self.requests = list(responses), list[httpx.Request]()

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        self.requests.append(request)
        response = self._responses.pop(0)
        if isinstance(response, Exception):
            raise response
        return response


def post(transport: Answers, key: str | None = None) -> Reply:
    async def scenario() -> Reply:
        async with Server("http://test/v1/", key, 5.0, transport) as server:
            return await server.post("/v1/completions", b"{}")

    return asyncio.run(scenario())


def test_the_key_is_sent() -> None:
    transport = Answers(httpx.Response(200, json={}))
    post(transport, "secret")
    [request] = transport.requests
    assert request.headers["authorization"] == "Bearer secret" and str(request.url) == "http://test/v1/completions"


def test_an_answer_of_several_lines_becomes_one() -> None:
    assert post(Answers(httpx.Response(200, content=b'{\n  "a": [1,\n 2.50]\n}'))).body == b'{"a":[1,2.50]}'


@pytest.mark.parametrize("content", [b"<html>not found</html>", b"[]", b"", b'"text"', b"\xff"])
@pytest.mark.parametrize(("status", "expected"), [(200, 502), (404, 404), (503, 503)])
def test_an_answer_that_is_no_object_is_a_failure(content: bytes, status: int, expected: int) -> None:
    reply = post(Answers(httpx.Response(status, content=content)))
    assert (
        reply.status == expected
        and b"without a JSON object" in json.loads(reply.body)["error"]["message"].encode()
    )


@pytest.mark.parametrize(
    ("given", "seconds"), [("7", 7.0), ("0.5", 0.5), ("Wed, 21 Oct 2026 07:28:00 GMT", None), (None, None)]
)
def test_the_retry_after_header_of_the_server_is_read(given: str | None, seconds: float | None) -> None:
    headers = {} if given is None else {"retry-after": given}
    assert post(Answers(httpx.Response(429, json={}, headers=headers))).retry_after_s == seconds


@pytest.mark.parametrize("headers", [{}, {"x-raydix-ignored-fields": "shiny, tools.0:web_search"}])
def test_the_ignored_fields_header_of_the_server_is_read(headers: dict[str, str]) -> None:
    reply = post(Answers(httpx.Response(200, json={}, headers=headers)))
    assert reply.ignored_fields == headers.get("x-raydix-ignored-fields", "")


def test_a_broken_connection_is_no_reply() -> None:
    with pytest.raises(NoReply, match="gave no answer: closed"):
        post(Answers(httpx.RemoteProtocolError("closed")))
