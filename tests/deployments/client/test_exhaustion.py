"""What clients see when an engine has no memory, disk or GPU any more, or an ingress no descriptors."""

from __future__ import annotations

import asyncio
import errno
import os
import resource
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from benchmarks.private_ray import free_port
from deployments.config.limits import Limits
from deployments.config.settings import IngressSettings
from deployments.ingress.http_server import HttpServer
from engine.loading.load_model import load_model
from engine.program.engine import Engine
from engine.settings.config import EngineConfig
from engine.settings.kv_tier import KVTier
from engine.values.sampling_params import SamplingParams
from tests.deployments.support.api_over_engines import api_over
from tests.deployments.support.failing_steps import fail_steps
from tests.deployments.support.forked import forked
from tests.deployments.support.in_process_engines import until
from tests.deployments.support.time_limit import run_scenario


def child(run: Callable[[Connection], None]) -> Any:
    """Return what a process of its own, whose limits it may change, has to report."""
    here, there = forked().Pipe()
    process = forked().Process(target=run, args=(there,), daemon=True)
    process.start()
    there.close()
    try:
        assert here.poll(100), "the process reports nothing"
        return here.recv()
    finally:
        process.kill()
        process.join()


@pytest.mark.parametrize("kind", [MemoryError, torch.OutOfMemoryError, torch.AcceleratorError])
@pytest.mark.parametrize("stream", [False, True])
def test_an_engine_that_loses_its_memory_or_gpu_fails_no_answer_while_there_is_another(
    kind: type[Exception], stream: bool
) -> None:
    async def scenario() -> None:
        async with api_over(2, kv_pages=400) as api:
            await until(lambda: len(api.client.reachable()) == 2)
            fail_steps(api.engines.runners[0], lambda plan: kind("scripted failure"))
            answers = await asyncio.gather(*(api.complete(stream=stream, prompt=[n] * 9) for n in range(6)))
            assert [answer.status_code for answer in answers] == [200] * 6
            assert not any('"error":' in answer.text for answer in answers)
            await until(lambda: api.client.reachable() == {"r1"})
            later = await api.complete(stream=stream)
            assert (later.status_code, later.headers["x-raydix-replica"]) == (200, "r1")

    run_scenario(scenario())


@pytest.mark.parametrize(("kind", "cause"), [(MemoryError, "memory"), (torch.AcceleratorError, "device")])
def test_without_another_engine_the_client_is_told_to_come_again(kind: type[Exception], cause: str) -> None:
    async def scenario() -> None:
        async with api_over(1, kv_pages=400, health={"migration_wait_s": 0.3}) as api:
            await until(lambda: len(api.client.reachable()) == 1)
            fail_steps(api.engines.runners[0], lambda plan: kind("scripted failure"))
            for _ in range(2):
                answer = await api.complete()
                assert (answer.status_code, answer.json()["error"]["code"]) == (503, "unavailable")
                assert int(answer.headers["retry-after"]) >= 1
            health = await api.http.get("/health")
            assert (health.status_code, health.json()["status"]) == (503, "unhealthy")
            assert [replica["failing"] for replica in health.json()["replicas"]] == [cause]

    run_scenario(scenario())


def _engine_in_little_memory(report: Connection) -> None:
    engine = Engine.from_config(EngineConfig(kv_pages=200, threads=1))
    ended = dict[str, str | None]()
    engine.loop.start(lambda deltas: ended.update({d.request_id: d.error_code for d in deltas if d.finish_reason}))

    def ask(name: str, num_tokens: int) -> None:
        prompt = [5 + at % 1000 for at in range(num_tokens)]
        engine.loop.submit(engine.new_request(name, prompt, SamplingParams(max_tokens=2, temperature=0.0)))
        while name not in ended:
            time.sleep(0.01)

    ask("short", 20)
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size, resource.RLIM_INFINITY))
    ask("long", 1500)
    while engine.loop.failure is None:
        time.sleep(0.01)
    resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    report.send((ended, engine.loop.failing))


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs Linux's /proc")
def test_an_engine_whose_process_can_get_no_memory_ends_after_its_first_failed_step() -> None:
    ended, cause = child(_engine_in_little_memory)
    assert (ended, cause) == ({"short": None, "long": "step_failed"}, "memory")


def test_a_full_disk_below_the_kv_of_an_engine_changes_no_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_refused = 0

    def full(*_: object) -> int:
        nonlocal num_refused
        num_refused += 1
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    async def scenario() -> None:
        monkeypatch.setattr("engine.kv_tier.open_tier.RETRY_S", 1e-6)
        tier = KVTier(str(tmp_path))
        room: dict[str, Any] = {"kv_pages": 24, "page_size": 16, "host_kv_gib": 2**-7, "host_kv_min_uses": 1}
        async with api_over(1, load=load_model, model="demo", kv_tier=tier, **room) as api:
            prompts = [[number + 10] * 200 for number in range(4)]
            before = [(await api.complete(prompt=prompt, temperature=0)).json() for prompt in prompts]
            monkeypatch.setattr(os, "writev", full)
            after = [(await api.complete(prompt=prompt, temperature=0)).json() for prompt in prompts]
            assert [one["choices"] for one in after] == [one["choices"] for one in before]
            assert num_refused > 0
            assert (await api.http.get("/health")).json()["replicas"][0]["failing"] is None
            monkeypatch.undo()

    run_scenario(scenario())


def _ingress_without_descriptors(report: Connection) -> None:
    async def scenario() -> None:
        port = free_port()
        async with api_over(1, kv_pages=400) as api:
            server = HttpServer(api.app, IngressSettings(port=port), Limits())
            server.start()
            url = f"http://127.0.0.1:{port}/v1/completions"
            body = {"model": "m", "prompt": [1, 2], "max_tokens": 3}
            async with httpx.AsyncClient(timeout=60) as open_client:
                statuses = [(await open_client.post(url, json=body)).status_code]
                lowest = os.dup(0)
                os.close(lowest)
                _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
                resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, most))
                statuses += [(await open_client.post(url, json=body)).status_code for _ in range(3)]
                resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
                async with httpx.AsyncClient(timeout=60) as new_client:
                    statuses.append((await new_client.post(url, json=body)).status_code)
            await server.drain()
        report.send(statuses)

    asyncio.run(scenario())


def test_an_ingress_without_descriptors_answers_on_open_connections() -> None:
    statuses = child(_ingress_without_descriptors)
    assert statuses == [200] * 5
