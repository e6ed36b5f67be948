"""One process's view of the replicas: its own requests count at once, others' from the last heartbeat."""

from __future__ import annotations

from engine.tenants.tenant_shares import MOST_TENANTS
from router.addresses import ReplicaAddress
from router.fleet import Fleet
from router.member import ReplicaLoad


def fleet(*names: str) -> Fleet:
    made = Fleet()
    made.update({name: ReplicaAddress(name, f"tcp://{name}", "secret") for name in names})
    return made


def test_own_requests_count_immediately_and_only_once() -> None:
    view = fleet("a", "b")
    for number in range(3):
        view.open(f"r{number}")
        view.book(f"r{number}", "a")
    assert view.loads() == {"a": 3, "b": 0}
    view.record_load("a", ReplicaLoad(num_requests=5, num_own=3))  # the heartbeat has caught up
    assert view.loads()["a"] == 5
    view.release("r0")  # and is behind again
    assert view.loads()["a"] == 4


def test_a_request_booked_elsewhere_moves() -> None:
    view = fleet("a", "b")
    view.open("r")
    view.book("r", "a")
    view.book("r", "b")
    assert view.loads() == {"a": 0, "b": 1}
    assert view.placement("r") == "b"


def test_a_booking_that_comes_after_the_end_leaves_no_load_behind() -> None:
    view = fleet("a")
    view.open("r")
    view.release("r")
    view.book("r", "a")
    assert view.loads() == {"a": 0}


def test_a_replica_that_is_gone_takes_its_load_along() -> None:
    view = fleet("a", "b")
    view.open("r")
    view.book("r", "a")
    view.update({"b": ReplicaAddress("b", "tcp://b", "secret")})
    assert view.loads() == {"b": 0}
    view.release("r")


def test_the_kv_memory_of_the_fleet_is_the_sum_that_present_replicas_report() -> None:
    view = fleet("a", "b")
    assert view.kv_tokens() == 0
    view.record_load("a", ReplicaLoad(pages_total=100, page_size=16))
    view.record_load("b", ReplicaLoad(pages_total=50, page_size=32))
    view.record_load("a", ReplicaLoad(pages_total=100, page_size=16))
    assert view.kv_tokens() == 3200
    view.record_load("b", ReplicaLoad(pages_total=10, page_size=32))
    assert view.kv_tokens() == 1920
    view.update({"b": None})
    assert view.kv_tokens() == 320


def test_listeners_hear_of_changes_only() -> None:
    view = fleet("a")
    heard: list[int] = []
    unsubscribe = view.subscribe(lambda: heard.append(1))
    view.update({"a": ReplicaAddress("a", "tcp://a", "secret")})
    assert heard == []
    view.update({"a": ReplicaAddress("a", "tcp://elsewhere", "secret")})
    assert heard == [1]
    unsubscribe()
    view.update({})
    assert heard == [1]


def test_a_failing_replica_gets_nothing_however_idle_until_it_reports_that_it_is_well() -> None:
    view = fleet("a", "b")
    view.record_load("b", ReplicaLoad(num_running=9))
    for failing in ("memory", ""):
        version = view.version
        view.record_load("a", ReplicaLoad(failing=failing))
        assert view.lost() == ({"a"} if failing else set())
        assert view.version == version + 1
        by_name = {candidate.replica: candidate.is_available for candidate in view.candidates(["a", "b"])}
        assert by_name == {"a": not failing, "b": True}
    version = view.version
    view.record_load("a", ReplicaLoad(num_running=1))
    assert view.version == version


def test_replicas_are_counted_by_the_state_that_matters_most() -> None:
    now = 100.0
    view = Fleet(clock=lambda: now)
    view.update(dict.fromkeys("abcdef"))
    view.mark_lost("a")
    view.record_load("a", ReplicaLoad(is_draining=True))
    view.record_load("b", ReplicaLoad(is_draining=True))
    for _ in range(3):
        view.record_call("c", is_failure=True)
    view.record_load("d", ReplicaLoad(is_full=True))
    view.record_load("f", ReplicaLoad(failing="memory", is_draining=True))
    assert view.count_by_state() == {"available": 2, "draining": 1, "lost": 1, "failing": 1, "circuit_open": 1}
    now += 60.0
    assert view.count_by_state()["circuit_open"] == 0


def test_a_full_replica_gives_way_to_tenants_that_have_fewer_requests_there() -> None:
    view = fleet("a", "b", "c")
    for name in "abc":
        view.record_load(name, ReplicaLoad(requests_of={"loud": 6, "some": 5, name: 1}))
    view.mark_lost("c")
    tenants = ["loud", "some", "a", "new"]
    assert view.given_way(tenants, 0) == {"some", "a", "new"}
    assert view.given_way(tenants, 1) == {"a", "new"}
    assert view.given_way(tenants, 10) == {"new"}
    view.open("r")
    view.book("r", "a", 10)
    assert view.given_way(tenants, 9) == {"new"}, "what no heartbeat counts yet may be of any tenant"


def test_a_tenant_that_is_not_listed_has_no_more_requests_than_those_that_are() -> None:
    view = fleet("a")
    view.record_load("a", ReplicaLoad(requests_of={f"t{n}": 20 + n for n in range(MOST_TENANTS)}))
    most = 20 + MOST_TENANTS - 1
    assert view.given_way(["t0", "unlisted"], most - 20 - 2) == {"t0", "unlisted"}
    assert view.given_way(["t0", "unlisted"], most - 20 - 1) == set()
