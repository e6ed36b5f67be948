"""Each process has one state per deployment, with one set of settings, made on the first request for it."""

from __future__ import annotations

import threading
import uuid

import pytest

from router.placer import PlacerSettings
from router.state import RouterState, SettingsDiffer, router_state

SETTINGS = PlacerSettings()


def test_deployments_do_not_share_a_state() -> None:
    app = uuid.uuid4().hex
    one = router_state(app, "one", SETTINGS)
    assert router_state(app, "one", PlacerSettings()) is one
    others = [router_state(app, "two", SETTINGS), router_state(uuid.uuid4().hex, "one", SETTINGS)]
    assert all(other.fleet is not one.fleet and other.placer is not one.placer for other in others)


def test_the_state_is_made_once_when_threads_ask_at_the_same_time() -> None:
    app, states = uuid.uuid4().hex, list[RouterState]()
    threads = [
        threading.Thread(target=lambda: states.append(router_state(app, "one", SETTINGS))) for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(states) == 8 and len(set(map(id, states))) == 1


def test_other_settings_for_a_state_that_exists_are_refused() -> None:
    app = uuid.uuid4().hex
    state = router_state(app, "one", SETTINGS)
    with pytest.raises(SettingsDiffer, match=rf"{app}#one with .*block_tokens=16.*=32.*restart it") as refused:
        router_state(app, "one", PlacerSettings(block_tokens=32))
    assert refused.value.state is state


def test_settings_that_the_placer_can_take_over_make_no_other_state() -> None:
    """Serve's router has those of `args`, an ingress those of its `user_config` too."""
    app = uuid.uuid4().hex
    state = router_state(app, "one", PlacerSettings(policy="random", key_blocks=2))
    assert router_state(app, "one", PlacerSettings()) is state
    assert state.placer.settings.policy == "random"
