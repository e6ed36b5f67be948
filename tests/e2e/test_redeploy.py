"""A service with one ingress and one engine, under load: ten changes and four broken files, and no client notices.

Every stream opens a connection of its own. From the first change to the last, none is refused or breaks off.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
import ray
import yaml
from ray import serve
from ray.serve.schema import ServeDeploySchema

from benchmarks.private_ray import free_port
from deployments.cli.effective import in_effect
from deployments.cli.serve import read_live
from deployments.cli.serve_config import Overrides, load
from deployments.config.serve_schema import read_serve_config
from deployments.config.tenants import hash_key
from deployments.control.hardware import cluster
from deployments.control.model_files import known_facts
from engine.model_files.model_directory import demo_model_path
from router.ray_internals import deploy, serve_details
from tests.e2e.conftest import Service

pytestmark = pytest.mark.e2e

APP = "redeployed"
KEY = {"authorization": "Bearer key-t"}
ADMIN = {"authorization": "Bearer key-of-the-admin"}
PATIENCE_S = 300.0
USERS = 3
REPLACED = ("Ingress", "EngineReplica")


def plain_file(port: int) -> dict[str, Any]:
    """The file as a user writes it, with all settings under `args`."""
    tenant = {"name": "t", "key_hashes": [hash_key("key-t")], "requests_per_minute": 60_000}
    return {
        "proxy_location": "Disabled",
        "applications": [
            {
                "name": APP,
                "route_prefix": f"/{APP}",
                "import_path": "deployments.app:build",
                "args": {
                    "engine": {"model": "demo", "kv_pages": 1024, "threads": 1},
                    "engines": {"count": 1, "num_cpus": 0.1},
                    "ingresses": {"count": 1, "num_cpus": 0.1, "port": port},
                    "tenants": [tenant],
                    "protect_metrics": False,
                },
            }
        ],
    }


@dataclass
class Load:
    """Users who open one stream after the other; what went wrong is kept."""

    url: str
    num_done: list[int] = field(default_factory=lambda: [0] * USERS)
    failures: list[str] = field(default_factory=list)
    is_over: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        asyncio.run(self._all())

    async def _all(self) -> None:
        await asyncio.gather(*(self._user(number) for number in range(USERS)))

    async def _user(self, number: int) -> None:
        while not self.is_over.is_set():
            try:
                await self._stream()
            except Exception as error:
                self.failures.append(repr(error))
            self.num_done[number] += 1
            await asyncio.sleep(0.1)  # with less, this process takes half a core

    async def _stream(self) -> None:
        body = {"model": "demo", "prompt": "A story", "max_tokens": 60, "ignore_eos": True, "stream": True}
        async with (
            httpx.AsyncClient(base_url=self.url, timeout=PATIENCE_S, headers=KEY) as client,
            client.stream("POST", "/v1/completions", json=body) as response,
        ):
            lines = [line async for line in response.aiter_lines() if line]
        assert response.status_code == 200, lines
        assert lines[-1] == "data: [DONE]" and not [line for line in lines if '"error":' in line], lines[-2:]


def as_deployed(path: Path) -> ServeDeploySchema:
    """What `raydix deploy` hands to Serve."""
    return read_live(in_effect(load(path, Overrides()), cluster(), known_facts)[0])


@dataclass
class Redeployed:
    """The running application, its file, and its load."""

    service: Service
    config: dict[str, Any]
    path: Path
    load: Load

    def changed(self, **args: Any) -> dict[str, Any]:
        """The file with other sections of `args`."""
        config = deepcopy(self.config)
        ours = config["applications"][0]["args"]
        for section, values in args.items():
            ours[section] = {**ours.get(section, {}), **values} if isinstance(values, dict) else values
        return config

    def write(self, config: dict[str, Any]) -> Path:
        self.path.write_text(yaml.safe_dump(config))
        return self.path

    def replicas(self) -> dict[str, int]:
        """Ids of all replicas that run, with their processes' ids."""
        deployments = serve_details(60.0)[APP]["deployments"]
        return {
            one["replica_id"]: one["pid"]
            for name in REPLACED
            for one in deployments[name]["replicas"]
            if one["state"] == "RUNNING"
        }

    def status(self) -> tuple[str, str]:
        application = serve.status().applications[APP]
        return application.status.value, application.message

    def settle(self) -> None:
        """Wait until the change is in effect, and each user has had a whole stream since."""
        self.service.wait_until(lambda: self.status()[0] == "RUNNING", PATIENCE_S)
        before = list(self.load.num_done)
        self.service.wait_until(
            lambda: all(now >= then + 2 for now, then in zip(self.load.num_done, before, strict=True)), PATIENCE_S
        )
        assert self.load.failures == []

    def take(self, config: dict[str, Any], *, restarts: bool = False) -> None:
        """Deploy a changed file as `raydix deploy` does; by default, check that no process is another."""
        before = self.replicas()
        deploy(as_deployed(self.write(config)))
        self.config = config
        self.settle()
        if not restarts:
            assert before.items() <= self.replicas().items()

    def ask(self, path: str, headers: dict[str, str] = KEY, **body: Any) -> httpx.Response:
        url = f"{self.service.url}{path}"
        if not body:
            return httpx.get(url, headers=headers, timeout=60)
        return httpx.post(url, json={"model": "demo", "max_tokens": 1, **body}, headers=headers, timeout=60)

    def shown(self) -> Any:
        """The settings that the ingress says it has."""
        return self.ask("/server_info", ADMIN).json()

    def wait_until(self, condition: Callable[[], bool]) -> None:
        self.service.wait_until(condition, PATIENCE_S)


@contextmanager
def under_load(load: Load) -> Iterator[None]:
    thread = threading.Thread(target=load.run)
    thread.start()
    try:
        yield
    finally:
        load.is_over.set()
        thread.join()


@pytest.fixture
def running(service: Service, tmp_path: Path) -> Iterator[Redeployed]:
    port = free_port()
    config = plain_file(port)
    started = Service(f"http://127.0.0.1:{port}")
    app = Redeployed(started, config, tmp_path / "my.yaml", Load(started.url))
    deploy(as_deployed(app.write(config)))
    started.wait_until(lambda: started.health().get("status") == "healthy", PATIENCE_S)
    with under_load(app.load):
        yield app
    serve.delete(APP)


def raydix_deploy(path: Path) -> subprocess.CompletedProcess[str]:
    """`raydix deploy` in a process of its own."""
    env = {**os.environ, "RAY_ADDRESS": ray.get_runtime_context().gcs_address}
    command = [sys.executable, "-m", "deployments.cli", "deploy", str(path)]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=PATIENCE_S)


def test_ten_changes_and_four_broken_files_under_load(running: Redeployed, tmp_path: Path) -> None:
    app = running
    app.settle()

    # --- what running processes take over
    app.take(app.changed(limits={"max_choices": 3}))  # 1
    refused = app.ask("/v1/completions", prompt="a", n=4)
    assert refused.status_code == 400 and "limits.max_choices" in refused.text
    [tenant] = app.config["applications"][0]["args"]["tenants"]
    app.take(app.changed(tenants=[{**tenant, "requests_per_minute": 30_000}]))  # 2
    assert app.ask("/v1/completions", prompt="a").headers["x-ratelimit-limit-requests"] == "30000"
    hashes = [*tenant["key_hashes"], hash_key("key-new")]
    app.take(app.changed(tenants=[{**tenant, "key_hashes": hashes}]))  # 3
    assert app.ask("/v1/models", {"authorization": "Bearer key-new"}).status_code == 200
    app.take(app.changed(admin_key_hash=hash_key("key-of-the-admin")))  # 4
    assert app.ask("/v1/router/decisions", ADMIN).status_code == 200
    app.take(app.changed(router={"policy": "least_loaded"}))  # 5
    decisions = app.ask("/v1/router/decisions?limit=1", ADMIN).json()
    assert "least_loaded" in str(decisions)
    app.take(app.changed(logging={"level": "WARNING"}, slo={"ttft_s": 2.0}))  # 6
    assert '"WARNING"' in app.ask("/server_info", ADMIN).text
    app.take(app.changed(admission={"max_wait_s": 20.0}))  # 7
    live = app.replicas()

    # --- broken files
    typo = app.changed(limits={"max_choicez": 3})
    told = raydix_deploy(app.write(typo))
    assert told.returncode == 2 and "args.limits: unknown setting 'max_choicez'" in told.stderr
    assert app.status()[0] == "RUNNING", "Serve was given a file with a mistake"
    broken = Path(shutil.copytree(demo_model_path(), tmp_path / "broken"))
    weights = broken / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    told = raydix_deploy(app.write(app.changed(engine={"model": str(broken)})))
    assert told.returncode == 1 and "not a complete safetensors file" in told.stderr
    for config, message in (
        (typo, "args.limits: unknown setting 'max_choicez'"),
        (app.changed(engine={"model": "/nonexistent/model"}), "there is no directory /nonexistent/model"),
    ):
        deploy(read_serve_config(config))  # as `serve deploy` does
        app.wait_until(lambda: app.status()[0] == "DEPLOY_FAILED")
        assert message in app.status()[1] and "Traceback" not in app.status()[1]
    wrong = as_deployed(app.write(app.config))
    ours = wrong.applications[0].deployments
    [ingress] = [entry for entry in ours if entry.name == "Ingress"]
    good = ingress.user_config
    assert isinstance(good, dict)
    ingress.user_config = {**good, "limits": {"max_choices": -1}}
    deploy(wrong)  # Serve checks no user_config
    app.wait_until(lambda: app.status()[0] == "RUNNING" and app.service.health()["refuses_settings"])
    assert "limits.max_choices" in app.ask("/v1/completions", prompt="a", n=4).text, "the settings before are gone"
    assert app.replicas() == live

    # --- back to a good file, by the command
    told = raydix_deploy(app.write(app.changed(limits={"max_choices": 5})))  # 8
    assert told.returncode == 0 and "is in effect" in told.stderr, told.stderr
    assert app.ask("/v1/completions", prompt="a", n=4).status_code == 200
    assert app.service.health()["refuses_settings"] is False
    assert app.replicas() == live

    # --- numbers of replicas, and a change that replaces all
    app.config = app.changed(limits={"max_choices": 5})
    app.take(app.changed(engines={"count": 2}))  # 9
    app.wait_until(lambda: app.service.health()["replicas_expected"] == app.service.health()["replicas_up"] == 2)
    app.take(app.changed(engine={"max_running": 32}, engines={"count": 1}), restarts=True)  # 10
    app.wait_until(lambda: not live.keys() & app.replicas().keys())
    app.settle()
    app.load.is_over.set()
    assert app.load.failures == [] and min(app.load.num_done) > 20
