"""Two models in one application: `examples/config/two_models.yaml`, with an admin key."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import ray
import yaml

from tests.deployments.support.otlp_receiver import Collector, Received, collector
from tests.e2e.conftest import ROOT, Service, engine_pids, running

pytestmark = pytest.mark.e2e

KEY = "a key for this test"
ADMIN = {"authorization": f"Bearer {KEY}"}


@pytest.fixture(scope="module")
def sink() -> Iterator[Collector]:
    """The collector of the application's traces."""
    with collector() as made:
        yield made


@pytest.fixture(scope="module")
def logs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of the application's logs."""
    return tmp_path_factory.mktemp("logs")


@pytest.fixture(scope="module")
def models(service: Service, sink: Collector, logs: Path) -> Iterator[Service]:
    """The application of the YAML, and a third model that is not loaded, beside the other tests' application."""
    (application,) = yaml.safe_load((ROOT / "examples/config/two_models.yaml").read_text())["applications"]
    key_hash = hashlib.sha256(KEY.encode()).hexdigest()
    specified = application["args"]["models"]
    specified[0]["engine"]["tasks"] = ["generate", "embed"]
    later = {**specified[1], "engine": {**specified[1]["engine"], "served_name": "later"}, "load_at_start": False}
    arguments = {
        **application["args"],
        **{"models": [*specified, later], "admin_key_hash": key_hash},
        "tracing": {"otlp_endpoint": sink.url, "export_period_s": 0.2},
        "logging": {"encoding": "json", "directory": str(logs)},
    }
    with running("two", arguments, external_scaler_enabled=application["external_scaler_enabled"]) as models:
        yield models


def states(models: Service) -> dict[str, str]:
    listed = httpx.get(f"{models.url}/v1/models", timeout=60).raise_for_status().json()["data"]
    return {model["id"]: model["state"] for model in listed}


def complete(models: Service, model: str | None) -> httpx.Response:
    body = {"prompt": "What is a list?", "max_tokens": 4, "temperature": 0}
    return httpx.post(f"{models.url}/v1/completions", json=body | ({"model": model} if model else {}), timeout=60)


def test_a_request_goes_to_the_model_it_names(models: Service) -> None:
    assert states(models) == {"demo-long": "loaded", "demo-short": "loaded", "later": "unloaded"}
    replicas = {}
    for name in ("demo-long", "demo-short"):
        answer = complete(models, name).raise_for_status()
        assert answer.json()["model"] == name
        replicas[name] = answer.headers["x-raydix-replica"]
    assert replicas["demo-long"] != replicas["demo-short"]
    for name, status in (("demo-long", 200), ("demo-short", 400)):
        answer = httpx.post(f"{models.url}/detokenize", json={"tokens": [5] * 600, "model": name}, timeout=60)
        assert answer.status_code == status
    for asked, status in (("demo", 404), (None, 400)):
        refused = complete(models, asked)
        assert refused.status_code == status
        assert "demo-long" in refused.json()["error"]["message"]


def test_a_model_embeds_and_answers(models: Service) -> None:
    """The same numbers in both forms; the other model is not served for it."""
    asked = {"model": "demo-long", "input": ["def main(", "import os", "def main("]}
    plain, packed = (
        httpx.post(f"{models.url}/v1/embeddings", json={**asked, "encoding_format": form}, timeout=60).json()
        for form in ("float", "base64")
    )
    first, second, third = (one["embedding"] for one in plain["data"])
    assert sum(value * value for value in first) == pytest.approx(1, abs=1e-4)
    assert first == pytest.approx(third, abs=1e-4) and first != pytest.approx(second, abs=1e-2)
    unpacked = struct.unpack(f"<{len(first)}f", base64.b64decode(packed["data"][0]["embedding"]))
    assert list(unpacked) == pytest.approx(first, abs=1e-4)
    refused = httpx.post(f"{models.url}/v1/embeddings", json={**asked, "model": "demo-short"}, timeout=60)
    assert refused.status_code == 400 and "engine.tasks" in refused.json()["error"]["message"]


def test_each_model_counts_for_itself(models: Service) -> None:
    complete(models, "demo-short").raise_for_status()
    for part in ("requests_total", "generation_tokens_total"):
        models.wait_until(lambda part=part: models.metric(f"raydix_{part}", model_name="demo-short") > 0)  # type: ignore[misc]


def test_a_request_can_be_followed_through_logs_and_traces(models: Service, sink: Collector, logs: Path) -> None:
    """The ingress's line and the spans of one request bear its id."""
    body = {"model": "demo-long", "prompt": "What is a list?", "max_tokens": 4, "ignore_eos": True}
    answer = httpx.post(
        f"{models.url}/v1/completions", json=body, headers={"x-request-id": "followed"}, timeout=60
    ).raise_for_status()

    def lines() -> list[dict[str, Any]]:
        files = logs.glob("*Ingress*.log")
        every = [json.loads(line) for file in files for line in file.read_text().splitlines()]
        return [line for line in every if line.get("request_id") == "followed"]

    def spans() -> list[Received]:
        return [span for span in list(sink.spans) if span.attributes.get("raydix.request_id") == "followed"]

    models.wait_until(lambda: bool(spans() and lines()))
    (root,) = spans()
    (line,) = [line for line in lines() if line.get("event") == "request"]
    assert (line["trace_id"], line["response_id"]) == (root.trace_id, answer.json()["id"])
    assert (line["model"], line["outcome"], line["output_tokens"]) == ("demo-long", "finished", 4)
    assert line["replica"] == answer.headers["x-raydix-replica"] and line["ingress"] != line["replica"]
    assert root.name == "text_completion demo-long" and root.attributes["gen_ai.usage.output_tokens"] == 4
    own = [span for span in sink.spans if span.parent_id == root.span_id]
    assert [span.name for span in own] == ["prepare", "admission", "route", "queue", "prefill", "decode"]
    times = [at for span in own for at in (span.start, span.end)]
    assert times == sorted(times) and root.start <= times[0] and times[-1] <= root.end


def test_only_the_admin_loads_and_unloads(models: Service) -> None:
    for headers, status in (({}, 401), ({"authorization": "Bearer wrong"}, 403)):
        for method, path in (("POST", "demo-short/load"), ("DELETE", "demo-short")):
            answer = httpx.request(method, f"{models.url}/v1/models/{path}", headers=headers, timeout=60)
            assert answer.status_code == status, answer.text
    assert states(models)["demo-short"] == "loaded"


def test_the_admin_empties_the_caches_of_one_model(models: Service) -> None:
    def cached(model: str) -> int:
        body = {"model": model, "prompt": "What is a list? " * 20, "max_tokens": 1}
        usage = (
            httpx.post(f"{models.url}/v1/completions", json=body, timeout=60).raise_for_status().json()["usage"]
        )
        tokens: int = usage["prompt_tokens_details"]["cached_tokens"]
        return tokens

    for model in ("demo-long", "demo-short"):
        models.wait_until(lambda model=model: cached(model) > 0)  # type: ignore[misc]
    emptied = httpx.post(f"{models.url}/reset_prefix_cache?model=demo-long", headers=ADMIN, timeout=60)
    (reset,) = emptied.raise_for_status().json()["data"]
    assert reset["id"] == "demo-long" and sum(reset["freed_pages"].values()) > 0
    assert cached("demo-long") == 0
    assert cached("demo-short") > 0


def test_a_model_is_unloaded_when_its_streams_have_ended_and_comes_back(models: Service) -> None:
    """One stream follows the other, so that some are open when it goes, however fast the machine is."""
    is_over = asyncio.Event()

    async def read(client: httpx.AsyncClient, model: str) -> int:
        count = 0
        while not is_over.is_set() and (tokens := await _stream(client, model, 500)) is not None:
            assert tokens == 500
            count += 1
        return count

    async def scenario() -> None:
        async with httpx.AsyncClient(base_url=models.url, timeout=120) as client:
            own = asyncio.gather(*(read(client, "demo-short") for _ in range(8)))
            other = asyncio.create_task(read(client, "demo-long"))
            await asyncio.to_thread(models.wait_until, lambda: _num_running(models) >= 9)
            for _ in range(2):
                answer = await client.delete("/v1/models/demo-short", headers=ADMIN)
                assert (answer.status_code, answer.json()["state"]) == (202, "draining")
            assert min(await own) >= 1
            is_over.set()
            assert await other >= 1

    asyncio.run(scenario())
    models.wait_until(lambda: states(models)["demo-short"] == "unloaded")
    assert states(models)["demo-long"] == "loaded"
    refused = complete(models, "demo-short")
    assert refused.status_code == 503 and int(refused.headers["retry-after"]) >= 1
    assert "POST /v1/models/demo-short/load" in refused.json()["error"]["message"]
    assert complete(models, "demo-long").status_code == 200
    health = models.health()
    assert health["status"] == "healthy" and health["models"]["demo-short"]["status"] == "unloaded"
    answer = httpx.post(f"{models.url}/v1/models/demo-short/load", headers=ADMIN, timeout=60)
    assert (answer.status_code, answer.json()["state"]) == (202, "loading")
    models.wait_until(lambda: complete(models, "demo-short").status_code == 200)
    models.wait_until(lambda: states(models)["demo-short"] == "loaded")


def test_the_cluster_is_reported_as_it_is(models: Service) -> None:
    for path in ("status", "nodes"):
        assert httpx.get(f"{models.url}/v1/cluster/{path}", timeout=60).status_code == 401
    models.wait_until(lambda: models.health()["status"] == "healthy")
    status = httpx.get(f"{models.url}/v1/cluster/status", headers=ADMIN, timeout=60).raise_for_status().json()
    assert status["missing"] == {} and status["nodes"] == {"alive": 1, "dead": 0}
    assert status["resources"]["total"] == {"cpus": ray.cluster_resources()["CPU"], "gpus": 0}
    assert status["versions"]["ray"] == ray.__version__
    pids = set(engine_pids())
    pages = {"demo-long": 2048, "demo-short": 512}
    assert [(model["id"], model["state"]) for model in status["models"]][2:] == [("later", "unloaded")]
    for model in status["models"][:2]:
        (replica,) = model["replicas"]
        assert (model["state"], model["replicas_wanted"], replica["state"]) == ("loaded", 1, "RUNNING")
        assert replica["pid"] in pids and replica["is_connected"]
        assert model["totals"]["kv_pages_total"] == pages[model["id"]]
    assert status["totals"]["kv_pages_total"] == sum(pages.values())
    nodes = httpx.get(f"{models.url}/v1/cluster/nodes", headers=ADMIN, timeout=60).raise_for_status().json()
    (node,) = nodes["data"]
    assert nodes["missing"] == {} and node["is_alive"] and "gpu_devices" not in node
    assert sorted(replica["model"] for replica in node["replicas"]) == ["demo-long", "demo-short"]
    assert node["node_id"] == ray.nodes()[0]["NodeID"]


def test_a_model_that_was_not_loaded_at_the_start_comes_when_it_is_asked_for(models: Service) -> None:
    assert states(models)["later"] == "unloaded" and complete(models, "later").status_code == 503
    assert httpx.post(f"{models.url}/v1/models/later/load", headers=ADMIN, timeout=60).status_code == 202
    models.wait_until(lambda: complete(models, "later").status_code == 200)
    assert httpx.delete(f"{models.url}/v1/models/later", headers=ADMIN, timeout=60).status_code == 202
    models.wait_until(lambda: states(models)["later"] == "unloaded")


def _num_running(models: Service) -> int:
    return sum(replica["num_running"] for replica in models.health()["replicas"])


async def _stream(client: httpx.AsyncClient, model: str, max_tokens: int) -> int | None:
    """Tokens that came, None when the model is not there; fails when the stream broke off."""
    body: dict[str, Any] = {
        "model": model,
        "prompt": "A story",
        "max_tokens": max_tokens,
        "stream": True,
        "ignore_eos": True,
        "stream_options": {"include_usage": True},
    }
    async with client.stream("POST", "/v1/completions", json=body) as response:
        if response.status_code == 503:
            return None
        lines = [line async for line in response.aiter_lines() if line]
    assert lines.pop() == "data: [DONE]"
    tokens: int = json.loads(lines[-1][6:])["usage"]["completion_tokens"]
    return tokens
