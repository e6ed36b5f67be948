"""The Serve router: what it hands to Serve, with replicas and requests that only look like Serve's."""

from __future__ import annotations

import asyncio
import uuid
from dataclasses import asdict, replace
from types import SimpleNamespace
from typing import Any

import pytest
from ray.serve._private.common import DeploymentHandleSource, DeploymentID
from ray.serve.request_router import RequestRouter

from router.addresses import KVAddress, ReplicaAddress
from router.fetch.roles import ROLES
from router.member import ReplicaLoad
from router.placer import PlacerSettings
from router.ray_router import PrefixRouter, address_of
from router.state import RouterState, router_state

SETTINGS = PlacerSettings(block_tokens=4, key_blocks=2)
WIRE = {"wire_endpoint": "tcp://a:1", "wire_secret": "s", "wire_public_key": "p", "wire_epoch": "7"}


def made(app: str, settings: PlacerSettings = SETTINGS, deployment: str = "engines") -> Any:
    """Make a router as Serve does."""
    of = DeploymentID(name=deployment, app_name=app)
    router = PrefixRouter(deployment_id=of, handle_source=DeploymentHandleSource.REPLICA)
    router.initialize_state("engines", **asdict(settings))
    return router


def state_of(app: str, settings: PlacerSettings = SETTINGS) -> RouterState:
    """The state of an ingress that has three replicas."""
    state = router_state(app, "engines", settings)
    state.fleet.update(dict.fromkeys("abc"))
    return state


@pytest.fixture
def app() -> str:
    return uuid.uuid4().hex


@pytest.fixture
def state(app: str) -> RouterState:
    return state_of(app)


@pytest.fixture
def router(app: str, state: RouterState) -> Any:
    return made(app)


def replicas(names: str = "abc") -> list[Any]:
    return [SimpleNamespace(replica_id=SimpleNamespace(unique_id=name)) for name in names]


def advertising(names: str, role: str) -> list[Any]:
    """Replicas of a role as Serve hands them to a router."""
    made = replicas(names)
    for replica in made:
        replica.replica_metadata = {**WIRE, "role": role}
    return made


def call(*args: Any, call_id: str = "c") -> Any:
    """Make a pending call with these arguments, as Serve passes it to the router."""
    return SimpleNamespace(
        args=args,
        metadata=SimpleNamespace(internal_request_id=call_id),
        routing_context=SimpleNamespace(should_backoff=False),
    )


def pending(request_id: str = "r", prompt: Any = range(20), session: str | None = None) -> Any:
    request = SimpleNamespace(
        request_id=request_id,
        prompt_ids=prompt,
        output_ids=[],
        num_reusable=10**9,
        model="m",
        salt="",
        session_id=session,
        block_hashes=None,
    )
    return call(request, call_id=f"call of {request_id}")


def chosen(router: Any, request: Any, names: str = "abc") -> list[list[str]]:
    ranks = asyncio.run(router.choose_replicas(replicas(names), request))
    return [[replica.replica_id.unique_id for replica in rank] for rank in ranks]


def flat(ranks: list[list[str]]) -> list[str]:
    return sorted(name for rank in ranks for name in rank)


def test_all_replicas_are_ranked_and_retries_back_off(router: Any) -> None:
    request = pending()
    ranks = chosen(router, request)
    assert [len(rank) for rank in ranks] == [1, 1, 1]
    assert flat(ranks) == ["a", "b", "c"]
    assert request.routing_context.should_backoff
    assert chosen(router, pending("other", [*range(8), 77])) == ranks


def test_the_router_books_a_request_at_the_replica_that_it_sends_it_to(router: Any, state: RouterState) -> None:
    fleet, placer = state.fleet, state.placer
    ((first,), (second,), _) = chosen(router, pending())
    assert fleet.placement("r") == first
    router.on_request_routed(pending(), SimpleNamespace(unique_id=second), None)
    assert fleet.loads()[second] == 1
    assert placer.counts() == {("cost", "cold"): 1}
    decision = placer.decision("r")
    assert decision is not None and decision.is_overruled
    router.on_request_completed(SimpleNamespace(unique_id=second), "call of r")
    assert sum(fleet.loads().values()) == 0 and fleet.placement("r") is None


def test_a_router_with_other_settings_than_the_ingress_logs_it_and_places_as_the_ingress_does(
    app: str, state: RouterState, caplog: pytest.LogCaptureFixture
) -> None:
    router = made(app, replace(SETTINGS, expect_s=1.5))
    ((first,), *_) = chosen(router, pending())
    assert state.fleet.placement("r") == first and state.placer.decision("r") is not None
    assert "expect_s=10.0" in caplog.text and "expect_s=1.5" in caplog.text


def test_the_deployments_of_a_model_share_one_fleet_and_each_reports_its_own_replicas(
    app: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = router_state(app, "engines", SETTINGS)
    monkeypatch.setattr(RequestRouter, "update_replicas", lambda self, replicas: None)
    prefill, decode = (made(app, deployment=f"engines:{role}") for role in ROLES)
    for router, names, role in ((prefill, "ab", "prefill"), (decode, "cd", "decode")):
        router.update_replicas(advertising(names, role))
        assert chosen(router, pending(role), names)
        assert state.placer.decision(role) is not None
    fleet = state.fleet
    assert [sorted(fleet.with_role(role)) for role in ROLES] == [["a", "b"], ["c", "d"]]
    prefill.update_replicas(advertising("be", "prefill"))  # one was replaced
    assert [sorted(fleet.with_role(role)) for role in ROLES] == [["b", "e"], ["c", "d"]]
    decode.update_replicas([])
    assert fleet.names() == {"b", "e"}


def test_lost_replicas_come_last(router: Any, state: RouterState) -> None:
    ((first,), _, _) = chosen(router, pending())
    state.fleet.mark_lost(first)
    assert chosen(router, pending("s"))[2] == [first]


def test_a_watch_goes_to_its_replica_or_waits_for_it(router: Any, state: RouterState) -> None:
    watch = call(SimpleNamespace(watched_replica="b"), "ingress")
    assert chosen(router, watch) == [["b"]]
    assert chosen(router, watch, names="ac") == []
    assert watch.routing_context.should_backoff and sum(state.fleet.loads().values()) == 0


def test_a_call_that_cannot_be_told_to_back_off_is_still_routed(
    router: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """As Serve may rename what a call is told by: an exception would hang the request."""
    request = pending()
    del request.routing_context
    assert flat(chosen(router, request)) == ["a", "b", "c"]
    assert "routing_context" in caplog.text


@pytest.mark.parametrize("prompt", [None, "text", [2**70], [1.5], [None], object()])
def test_a_replica_is_chosen_for_any_prompt(router: Any, prompt: Any) -> None:
    assert flat(chosen(router, pending(prompt=prompt))) == ["a", "b", "c"]


class Broken:
    """A policy that fails."""

    def decide(self, *_: object) -> Any:
        raise ZeroDivisionError


def test_when_the_policy_fails_the_least_loaded_replica_is_taken_and_it_is_counted(app: str) -> None:
    settings = replace(SETTINGS, policy=f"{__name__}:Broken")
    state = state_of(app, settings)
    for replica, num_requests in (("a", 3), ("b", 1), ("c", 2)):
        state.fleet.record_load(replica, ReplicaLoad(num_requests=num_requests))
    assert chosen(made(app, settings), pending()) == [["b"], ["c"], ["a"]]
    assert state.placer.num_errors == 1
    assert state.fleet.placement("r") == "b"


def test_calls_that_are_no_requests_are_routed_too(router: Any) -> None:
    assert flat(chosen(router, None)) == ["a", "b", "c"]
    assert flat(chosen(router, call())) == ["a", "b", "c"]


def test_replicas_it_never_heard_of_are_chosen_from(router: Any) -> None:
    assert flat(chosen(router, pending(), names="xy")) == ["x", "y"]


def test_the_next_turn_of_a_short_conversation_goes_where_the_last_one_went(router: Any) -> None:
    """Two replicas each get a conversation; longer than the key's tokens or not, both stay where they are."""
    for start in range(20):
        first = list(range(start * 100, start * 100 + 5))  # one block and a token: shorter than the key
        home = chosen(router, pending(prompt=first))[0]
        second = [*first, *range(7, 12)]
        assert chosen(router, pending(prompt=second))[0] == home


def test_a_session_is_followed_when_no_prefix_is_known(router: Any) -> None:
    homes = {chosen(router, pending(prompt=[n], session="s"))[0][0] for n in range(20)}
    others = {chosen(router, pending(prompt=[n]))[0][0] for n in range(20)}
    assert len(homes) == 1 and len(others) > 1


def test_a_replica_is_reached_at_the_address_and_with_the_keys_that_it_advertises() -> None:
    (replica,) = replicas("a")
    replica.replica_metadata = WIRE
    assert address_of(replica) == ReplicaAddress("a", "tcp://a:1", "s", 7, "p")


def test_a_replica_lends_kv_where_it_advertises_that() -> None:
    (replica,) = replicas("a")
    lends = KVAddress("tcp://a:2", "k", "q")
    replica.replica_metadata = {**WIRE, **lends.metadata()}
    address = address_of(replica)
    assert address is not None and address.kv == lends
    for missing in lends.metadata():
        replica.replica_metadata = {
            key: value for key, value in {**WIRE, **lends.metadata()}.items() if key != missing
        }
        assert address_of(replica) == ReplicaAddress("a", "tcp://a:1", "s", 7, "p")


@pytest.mark.parametrize("missing", WIRE)
def test_a_replica_without_a_wire_or_with_another_version_s_has_no_address(missing: str) -> None:
    (replica,) = replicas("a")
    replica.replica_metadata = {key: value for key, value in WIRE.items() if key != missing}
    assert address_of(replica) is None
