"""Calls of a model's replicas through Serve, where each role is a deployment of its own."""

from __future__ import annotations

import asyncio
from typing import Any

from ray.serve._private.common import DeploymentID
from ray.serve.exceptions import DeploymentUnavailableError

from deployments.config.roles import Pool
from deployments.ingress.engine_handles import EngineHandles
from router.addresses import ReplicaAddress
from router.fleet import Fleet


class ScriptedHandle:
    """A deployment's handle, whose replicas answer a broadcast with these answers."""

    def __init__(self, *answers: Any) -> None:
        self.answers, self.asked = answers, list[str]()
        self.describe = self

    async def remote(self) -> None:
        self.asked.append("one")

    def broadcast(self, method: str) -> ScriptedHandle:
        if not self.answers:
            raise DeploymentUnavailableError(DeploymentID("E", "app"))
        self.asked.append(method)
        return self

    async def results_async(self, return_exceptions: bool) -> list[Any]:
        assert return_exceptions
        return list(self.answers)


def apart(**handles: Any) -> EngineHandles:
    pools = {"E:prefill": Pool("prefill", 1), "E:decode": Pool("decode", 2)}
    fleet = Fleet()
    for role in ("prefill", "decode"):
        fleet.update({role[0]: ReplicaAddress(role[0], "tcp://a", "s", role=role)}, f"E:{role}")
    named = {f"E:{role}": handle for role, handle in handles.items()}
    return EngineHandles({"E-other": ScriptedHandle(), **named}, pools, fleet)


def test_a_replica_is_called_through_the_handle_of_its_deployment() -> None:
    prefill, decode = ScriptedHandle(), ScriptedHandle()
    handles = apart(prefill=prefill, decode=decode)
    assert (handles.of("p"), handles.of("d")) == (prefill, decode)
    assert handles.of("gone") in (prefill, decode)  # whose call waits until it is given up
    assert handles.counts == {"E:prefill": 1, "E:decode": 2}


def test_all_deployments_are_asked_and_one_without_replicas_hides_no_other() -> None:
    prefill, decode = ScriptedHandle(), ScriptedHandle(1, KeyError("x"))
    handles = apart(prefill=prefill, decode=decode)
    first, second = asyncio.run(handles.ask_all("empty_cache"))
    assert first == 1 and isinstance(second, KeyError)
    asyncio.run(handles.start_routers())
    assert prefill.asked == ["one"] and decode.asked == ["empty_cache", "one"]


def test_without_roles_there_is_one_deployment() -> None:
    only = ScriptedHandle(1)
    fleet = Fleet()
    fleet.update({"r": ReplicaAddress("r", "tcp://a", "s")}, "E")
    handles = EngineHandles({"E": only}, {"E": Pool(None, 3)}, fleet)
    assert handles.of("r") is only and asyncio.run(handles.ask_all("describe")) == [1]
