"""Thousands of prompts: a file that `raydix batch` sends, and a program's that go to an ingress in one call."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import pytest
from ray import serve
from ray.exceptions import ActorDiedError

from deployments.batch.errors import BatchStopped
from deployments.batch.prompts import Answer
from deployments.config.tenants import hash_key
from tests.e2e.conftest import Service, kill, running
from tests.support.waiting import PATIENCE_S

pytestmark = pytest.mark.e2e

KEY = "the-key-of-the-nightly-batch"
GREEDY = {"max_tokens": 8, "temperature": 0}
LONG = {"max_tokens": 200, "ignore_eos": True}


@pytest.fixture(scope="module")
def guarded(service: Service, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """An application with one engine, whose only tenant may have three generations at once."""
    tenant = {"name": "nightly", "key_hashes": [hash_key(KEY)], "max_concurrency": 3}
    arguments = {
        "engine": {"model": "demo", "kv_pages": 1024, "threads": 1},
        "engines": {"num_cpus": 0.1},
        "ingresses": {"num_cpus": 0.1},
        "tenants": [tenant],
        "protect_metrics": False,
        "files": {"directory": str(tmp_path_factory.mktemp("files")), "poll_s": 0.2},
    }
    with running("batches", arguments) as application:
        yield application


def prompts(count: int) -> list[str]:
    names = ("itertools.chain", "math.sqrt", "os.path.join", "functools.reduce", "shutil.copy")
    return [f"{number}. What does {names[number % len(names)]} do?" for number in range(count)]


def flat(answers: Iterable[list[Answer]]) -> Iterator[Answer]:
    return chain.from_iterable(answers)


def many(application: str) -> Any:
    return serve.get_app_handle(application).options(stream=True).generate_many


# --- generate_many -----------------------------------------------------------------------------------------------


def test_one_call_answers_many_prompts_as_single_requests_would(service: Service) -> None:
    asked = prompts(300)
    before = service.metric("raydix_requests_total")
    answers = sorted(flat(many("raydix").remote(asked, GREEDY)), key=lambda answer: answer.index)
    assert [answer.index for answer in answers] == list(range(300))
    assert {answer.status for answer in answers} == {200}
    for index in (0, 123, 299):
        body = {"model": "demo", "prompt": asked[index], **GREEDY}
        alone = httpx.post(f"{service.url}/v1/completions", json=body, timeout=60).json()
        assert answers[index].text == alone["choices"][0]["text"]
    service.wait_until(lambda: service.metric("raydix_requests_total") >= before + 303)


def test_answers_arrive_while_others_are_still_generated(service: Service) -> None:
    long = {"prompt": "A long story", "max_tokens": 1500, "ignore_eos": True}
    answers = many("raydix").remote([long, *prompts(20)], GREEDY)
    order = [answer.index for answer in flat(answers)]
    assert len(order) == 21 and order[-1] == 0


def test_a_caller_that_leaves_frees_the_engines(service: Service) -> None:
    long = {"max_tokens": 2000, "ignore_eos": True}
    answers = many("raydix").remote([{"prompt": "short", "max_tokens": 1}, *prompts(200)], long)
    assert next(answers)[0].status == 200
    answers.cancel()

    def are_free() -> bool:
        return all(replica["num_running"] + replica["num_waiting"] == 0 for replica in service.replicas().values())

    service.wait_until(are_free)


def test_a_call_that_makes_no_sense_is_refused(service: Service) -> None:
    with pytest.raises(ValueError, match="there is no tenant 'unknown'"):
        list(many("raydix").remote(prompts(3), tenant="unknown"))


def test_prompts_that_a_killed_ingress_did_not_answer_can_be_sent_again(
    service: Service, guarded: Service
) -> None:
    asked = prompts(40)
    done: dict[int, str | None] = {}
    with pytest.raises(ActorDiedError):
        for answer in flat(many("batches").remote(asked, LONG, max_in_flight=4)):
            done[answer.index] = answer.text
            if len(done) == 8:
                kill(_ingress_of("batches"))
    assert 8 <= len(done) < 40
    guarded.wait_until(lambda: guarded.health()["status"] == "healthy")
    rest = [index for index in range(40) if index not in done]
    answers = list(flat(many("batches").remote([asked[index] for index in rest], GREEDY)))
    assert {rest[answer.index] for answer in answers} | done.keys() == set(range(40))


def _ingress_of(application: str) -> int:
    [pid] = [
        process.pid
        for process in psutil.Process(os.getpid()).children(recursive=True)
        if f"ServeReplica:{application}:Ingress" in "".join(process.cmdline())
    ]
    return pid


# --- raydix batch ------------------------------------------------------------------------------------------------


def write(path: Path, asked: list[str]) -> None:
    """Write a file of chats and completions, with two lines that are no requests and one for another model."""
    lines: list[dict[str, Any]] = []
    for number, prompt in enumerate(asked):
        url = "/v1/completions" if number % 2 else "/v1/chat/completions"
        given = {"prompt": prompt} if number % 2 else {"messages": [{"role": "user", "content": prompt}]}
        body = {"model": "demo", **GREEDY, **given}
        lines.append({"custom_id": f"c{number}", "method": "POST", "url": url, "body": body})
    lines[3]["method"] = "GET"
    lines[5]["body"]["model"] = "other"
    texts = [json.dumps(line) for line in lines]
    texts.insert(4, "nonsense")
    path.write_text("\n".join(texts))


def batch(url: str, folder: Path, *options: str) -> subprocess.Popen[str]:
    command = [
        sys.executable,
        "-m",
        "deployments.cli",
        "batch",
        str(folder / "in.jsonl"),
        str(folder / "out.jsonl"),
    ]
    return subprocess.Popen([*command, "--url", url, *options], stderr=subprocess.PIPE, text=True)


def check(path: Path, count: int) -> None:
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    names = [f"c{number}" for number in range(count)]
    assert [line["custom_id"] for line in lines] == [*names[:4], None, *names[4:]]
    assert [lines[index]["error"]["code"] for index in (3, 4)] == ["invalid_line"] * 2
    assert lines[6]["response"]["status_code"] == 404
    assert "'other' does not exist" in lines[6]["response"]["body"]["error"]["message"]
    good = [line for index, line in enumerate(lines) if index not in (3, 4, 6)]
    assert {line["response"]["status_code"] for line in good} == {200}
    assert all(line["response"]["request_id"] for line in good)
    for line in good:
        kind = "text_completion" if int(line["custom_id"][1:]) % 2 else "chat.completion"
        assert line["response"]["body"]["object"] == kind
        assert line["response"]["body"]["usage"]["completion_tokens"] > 0


def test_a_killed_batch_is_continued_and_its_answers_are_whole(any_url: str, tmp_path: Path) -> None:
    write(tmp_path / "in.jsonl", prompts(400))
    first = batch(any_url, tmp_path, "--concurrency", "8")
    partial = tmp_path / "out.jsonl.partial"
    deadline = time.monotonic() + PATIENCE_S
    while not partial.exists() or partial.read_bytes().count(b"\n") < 50:
        assert time.monotonic() < deadline and first.poll() is None
        time.sleep(0.005)
    first.kill()
    first.communicate()
    assert not (tmp_path / "out.jsonl").exists()
    second = batch(any_url, tmp_path, "--concurrency", "32")
    _, errors = second.communicate(timeout=PATIENCE_S)
    assert second.returncode == 1, errors
    assert "398 of 401 requests are answered" in " ".join(errors.split()) and "were answered before" in errors
    check(tmp_path / "out.jsonl", 400)


def test_a_tenant_with_few_places_has_its_batch_answered(guarded: Service, tmp_path: Path) -> None:
    write(tmp_path / "in.jsonl", prompts(60))
    process = batch(guarded.url, tmp_path, "--key", KEY)
    _, errors = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 1, errors
    check(tmp_path / "out.jsonl", 60)
    guarded.wait_until(lambda: guarded.metric("raydix_admission_rejections_total", reason="max_concurrency") > 0)


def test_a_wrong_key_is_reported_immediately(guarded: Service, tmp_path: Path) -> None:
    write(tmp_path / "in.jsonl", prompts(60))
    process = batch(guarded.url, tmp_path, "--key", "another")
    _, errors = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 1 and "refuses the key" in errors and "--key-env" in errors
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]


# --- /v1/batches -------------------------------------------------------------------------------------------------


def test_a_batch_outlives_its_ingress(guarded: Service) -> None:
    """OpenAI's client leaves a file. The ingress that answers it is killed; its successor answers the rest."""
    ai = openai.OpenAI(base_url=f"{guarded.url}/v1", api_key=KEY, max_retries=20)
    bodies = [{"model": "demo", "prompt": prompt, **LONG} for prompt in prompts(30)]
    lines = [
        {"custom_id": f"c{number}", "method": "POST", "url": "/v1/completions", "body": body}
        for number, body in enumerate(bodies)
    ]
    content = "\n".join(map(json.dumps, lines)).encode()
    file = ai.files.create(file=("in.jsonl", content), purpose="batch")
    left = ai.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="1h")  # type: ignore[arg-type]

    def num_done() -> int:
        counts = ai.batches.retrieve(left.id).request_counts
        return 0 if counts is None else counts.completed

    guarded.wait_until(lambda: num_done() >= 3)
    kill(_ingress_of("batches"))
    guarded.wait_until(lambda: ai.batches.retrieve(left.id).status == "completed")
    done = ai.batches.retrieve(left.id)
    assert done.request_counts is not None and done.request_counts.completed == 30 and done.output_file_id
    answers = [json.loads(line) for line in ai.files.content(done.output_file_id).text.splitlines()]
    assert [answer["custom_id"] for answer in answers] == [f"c{number}" for number in range(30)]
    assert {answer["response"]["body"]["usage"]["completion_tokens"] for answer in answers} == {200}
    refused = httpx.get(f"{guarded.url}/v1/files", headers={"authorization": "Bearer another"})
    assert refused.status_code == 401


# --- the end -----------------------------------------------------------------------------------------------------


def test_an_application_that_is_deleted_finishes_the_requests_that_a_call_has_begun(guarded: Service) -> None:
    """Runs last, as it deletes the application."""
    done = []
    with pytest.raises(BatchStopped, match="the ingress is being stopped"):
        for answer in flat(many("batches").remote(prompts(2000), LONG, max_in_flight=4)):
            done.append(answer)
            if len(done) == 1:
                serve.delete("batches", _blocking=False)
    assert {answer.status for answer in done} == {200} and len(done) < 2000
