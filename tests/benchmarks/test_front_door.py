"""What the measurement of the front door does with its servers; no Raydix is started."""

from __future__ import annotations

import sys

import pytest

from benchmarks import front_door
from benchmarks.peers.process import PeerFailed


def test_a_bare_server_that_ends_at_its_start_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "false")
    with pytest.raises(PeerFailed, match="starlette ended before it answered"), front_door.bare("starlette"):
        pass
