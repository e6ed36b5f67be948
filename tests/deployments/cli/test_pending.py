"""During a start, one line says what is pending and for how long."""

from __future__ import annotations

import io
import threading
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from deployments.cli.pending import LOG_EVERY_S, Pending, waited_for


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_a_log_has_a_line_for_each_new_thing_and_again_every_few_seconds(clock: Clock) -> None:
    log = io.StringIO()
    pending = Pending(Console(file=log), clock)
    pending.on("Ray: starting")
    clock.now += 2
    for _ in range(3):
        pending.tick()
        pending.on("Ray: starting")
    assert log.getvalue().splitlines() == ["Ray: starting, 0 s"]
    pending.on("engines: 0 of 2 ready")
    clock.now += LOG_EVERY_S
    pending.tick()
    pending.tick()
    assert log.getvalue().splitlines()[1:] == ["engines: 0 of 2 ready, 2 s", "engines: 0 of 2 ready, 7 s"]


def test_a_terminal_has_one_line_that_is_updated_and_then_gone(clock: Clock) -> None:
    screen = io.StringIO()
    with Pending(Console(file=screen, force_terminal=True, width=80), clock) as pending:
        pending.on("engines: 1 of 2 ready")
        clock.now += 6
        pending.tick()
        pending.on("the API: no healthy answer yet")
    text = screen.getvalue()
    assert "engines: 1 of 2 ready\n" not in text
    assert text.endswith("\x1b[1A\x1b[2K") or text.endswith("\x1b[2K"), repr(text[-40:])


def test_its_lines_appear_while_no_progress_is_reported() -> None:
    """Ray starts in a call that returns after seconds."""

    class Log(io.StringIO):
        def write(self, text: str) -> int:
            if text.startswith("Ray: starting, 90 s"):
                said.set()
            return super().write(text)

    said, clock = threading.Event(), Clock()
    with Pending(Console(file=Log()), clock) as pending:
        pending.on("Ray: starting")
        clock.now += 90
        assert said.wait(60)


def application(**deployments: dict[str, int]) -> Any:
    return SimpleNamespace(
        deployments={name: SimpleNamespace(replica_states=states) for name, states in deployments.items()}
    )


ENGINES_LACK = application(
    **{"EngineReplica": {"RUNNING": 1, "STARTING": 1}, "Ingress": {"RUNNING": 1}, "MetricsHub": {"RUNNING": 1}}
)
TWO_MODELS = application(
    **{
        "small": {"STARTING": 1},
        "large": {"RUNNING": 2, "STOPPING": 1},
        "Ingress": {"STARTING": 2},
        "MetricsHub": {"UPDATING": 1},
    }
)


@pytest.mark.parametrize(
    ("applications", "said"),
    [
        ({}, "raydix: being built"),
        ({"raydix": application()}, "raydix: being built"),
        ({"raydix": application(EngineReplica={}, Ingress={})}, "raydix: being built"),
        ({"raydix": ENGINES_LACK}, "engines: 1 of 2 ready"),
        ({"raydix": TWO_MODELS}, "engines: 2 of 3 ready; hub: 0 of 1 ready; ingresses: 0 of 2 ready"),
        ({"raydix": application(EngineReplica={"RUNNING": 1})}, "the API: no healthy answer yet"),
    ],
)
def test_the_state_that_is_waited_for_is_reported_in_our_words(applications: dict[str, Any], said: str) -> None:
    assert waited_for(applications, ["raydix"], ["raydix"]) == said


def test_deployments_of_other_applications_have_their_own_names() -> None:
    applications = {"raydix": ENGINES_LACK, "chat": application(Ingress={"STARTING": 1})}
    said = waited_for(applications, ["raydix", "chat"], ["raydix"])
    assert said == "chat's Ingress: 0 of 1 ready; engines: 1 of 2 ready"


def test_states_as_serve_gives_them_are_understood() -> None:
    from ray.serve.schema import DeploymentStatusOverview  # its states are a str enum that no public API names

    [states] = [
        kind for name, kind in DeploymentStatusOverview.__annotations__.items() if name == "replica_states"
    ]
    state = states.__args__[0]
    own = application(EngineReplica={state("RUNNING"): 1, state("STARTING"): 1, state("STOPPING"): 1})
    assert waited_for({"raydix": own}, ["raydix"], ["raydix"]) == "engines: 1 of 2 ready"
