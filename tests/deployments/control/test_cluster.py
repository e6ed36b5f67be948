"""The cluster's state is correct, collected in bounded time, and leaves out what no source reported."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping
from typing import Any

from deployments.client.protocol import (
    FleetHealth,
    FoundPart,
    FoundStream,
    GenerateRequest,
    Generation,
    ReplicaHealth,
)
from deployments.control.cluster import Cluster, ClusterModel
from deployments.control.controller_client import AppView, ControllerUnavailable, DeploymentView, ReplicaView

GPU = {"name": "H", "uuid": "u1", "memory_bytes": 80, "free_memory_bytes": 20}
NODES = [
    {
        "NodeID": "n1",
        "NodeManagerAddress": "192.0.2.1",
        "NodeManagerHostname": "one",
        "Alive": True,
        "Resources": {"CPU": 8.0, "GPU": 1.0, "memory": 1e9, "accelerator_type:H100": 1.0, "node:192.0.2.1": 1.0},
    },
    {"NodeID": "n2", "NodeManagerAddress": "192.0.2.2", "NodeManagerHostname": "two", "Alive": False},
]
VIEW = AppView(
    {
        "E-a": DeploymentView(
            2, (ReplicaView("a1", "RUNNING", "n1", "192.0.2.1", 7), ReplicaView("a2", "STARTING"))
        ),
        "E-b": DeploymentView(0),
    }
)


class HealthOnlyClient:
    """An engine client that answers only for its health."""

    def __init__(self, *replicas: ReplicaHealth) -> None:
        self._replicas = replicas

    async def health(self) -> FleetHealth:
        return FleetHealth("healthy", 1, self._replicas)

    async def generate(self, request: GenerateRequest) -> Generation:
        raise NotImplementedError

    async def find(self, name: str, tenant: str) -> FoundStream | None:
        raise NotImplementedError

    async def adopt(self, request: GenerateRequest, found: FoundPart) -> Generation:
        raise NotImplementedError

    def decisions(self, limit: int) -> list[dict[str, Any]]:
        raise NotImplementedError


def cluster(**changes: Any) -> Cluster:
    async def view() -> AppView:
        return VIEW

    async def describe() -> list[Mapping[str, Any]]:
        return [{"replica": "a1", "gpus": [GPU]}]

    health = ReplicaHealth("a1", True, 0.1, num_running=3, num_waiting=2, kv_pages_free=10, kv_pages_total=40)
    models = [
        ClusterModel("a", "E-a", ("E-a",), HealthOnlyClient(health), describe),
        ClusterModel("b", "E-b", ("E-b",), HealthOnlyClient(), describe),
    ]
    sources: dict[str, Any] = {
        "models": models,
        "view": view,
        "ray_nodes": lambda: NODES,
        "ray_available": lambda: {"CPU": 5.5},
        "versions": {"ray": "9"},
        "timeout_s": 10.0,
    }
    return Cluster(**{**sources, **changes})


def test_status_combines_all_sources() -> None:
    status = asyncio.run(cluster().status())
    assert status["nodes"] == {"alive": 1, "dead": 1} and status["missing"] == {}
    assert status["resources"] == {"total": {"cpus": 8, "gpus": 1}, "available": {"cpus": 5.5, "gpus": 0}}
    a, b = status["models"]
    assert [(replica["replica"], replica["state"]) for replica in a["replicas"]] == [
        ("a1", "RUNNING"),
        ("a2", "STARTING"),
    ]
    assert (a["state"], a["replicas_wanted"], a["replicas"][0]["num_running"]) == ("loaded", 2, 3)
    assert (b["state"], b["replicas_wanted"], b["replicas"]) == ("unloaded", 0, [])
    assert status["totals"] == a["totals"]
    assert (status["totals"]["num_waiting"], status["totals"]["kv_pages_free"]) == (2, 10)


def test_nodes_have_their_replicas_and_the_gpus_these_see() -> None:
    answer = asyncio.run(cluster().nodes())
    one, two = answer["data"]
    assert (one["gpus"], one["accelerators"], one["gpu_devices"]) == (1, ["H100"], [GPU])
    assert [replica["replica"] for replica in one["replicas"]] == ["a1"]
    assert (two["is_alive"], two["cpus"], two["replicas"]) == (False, 0, []) and "gpu_devices" not in two


def test_a_slow_source_is_missing_and_the_others_are_reported_meanwhile() -> None:
    hung, num_asked = threading.Event(), 0

    def nodes() -> list[Any]:
        nonlocal num_asked
        num_asked += 1
        hung.wait()
        return NODES

    async def scenario() -> None:
        slow = cluster(ray_nodes=nodes, timeout_s=1.0)
        for _ in range(2):
            status = await slow.status()
            assert status["missing"] == {"nodes": "no answer within 1 s"}
            assert status["nodes"] is None and "total" not in status["resources"]
            assert status["resources"]["available"]["cpus"] == 5.5
            assert status["models"][0]["state"] == "loaded"
        assert num_asked == 1
        hung.set()
        while (status := await slow.status())["missing"]:
            pass
        assert status["nodes"] == {"alive": 1, "dead": 1}

    try:
        asyncio.run(scenario())
    finally:
        hung.set()


def test_a_failed_source_is_missing_and_asked_again() -> None:
    async def silent() -> AppView:
        raise ControllerUnavailable("Serve's controller does not answer")

    def refuse() -> dict[str, float]:
        raise ConnectionError("secret address")

    async def scenario() -> None:
        broken = cluster(view=silent, ray_available=refuse)
        for _ in range(2):
            status = await broken.status()
            assert status["missing"] == {
                "replicas": "Serve's controller does not answer",
                "available_resources": "failed with ConnectionError",
            }
        model = status["models"][0]
        assert (model["state"], model["replicas_wanted"]) == (None, None)
        assert [replica["replica"] for replica in model["replicas"]] == ["a1"], "known from the wire"
        answer = await broken.nodes()
        assert answer["data"][0]["cpus"] == 8 and "replicas" not in answer["data"][0]

    asyncio.run(scenario())
