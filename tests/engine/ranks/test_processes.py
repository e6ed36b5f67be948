"""Ranks as processes: they start, they end with the engine, and an engine ends with them."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from pathlib import Path
from typing import Any

import pytest

from engine import LLM
from engine.base.awake_clock import STILL_S
from engine.base.errors import EngineStopped, RankLost
from engine.program.engine import Engine
from engine.ranks.entrance import Entrance
from engine.ranks.launcher import ChildProcesses, RankSpec
from engine.ranks.rank_group import RankGroup
from engine.settings.config import EngineConfig
from engine.values.sampling_params import SamplingParams
from engine.values.stream_delta import StreamDelta
from tests.engine.support.rank_processes import Watched

PROMPT = list(range(5, 25))
LONG = SamplingParams(temperature=0, max_tokens=400)
SETTINGS: dict[str, Any] = {"device": "cpu", "kv_pages": 64, "threads": 1}


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
        return True
    except ProcessLookupError:
        return False


def eventually(condition: Callable[[], object], seconds: float = 60.0) -> None:
    """Wait until a condition holds; the generous limit only makes sure that the test ends."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


STAGES: dict[str, Any] = {"tensor_parallel_size": 1, "pipeline_parallel_size": 3}


@pytest.mark.parametrize("sizes", [{"tensor_parallel_size": 2}, STAGES])
def test_the_offline_api_answers_alike_and_leaves_no_process(sizes: dict[str, Any]) -> None:
    params = SamplingParams(temperature=0, max_tokens=12)
    alone = LLM("demo", **SETTINGS).generate([PROMPT], params, progress=False)
    launcher = Watched()
    engine = Engine.from_config(EngineConfig(**sizes, **SETTINGS), launcher=launcher)
    llm = LLM(engine=engine)
    shared = llm.generate([PROMPT], params, progress=False)
    assert shared[0].token_ids == alone[0].token_ids
    assert all(map(is_alive, launcher.pids))
    llm.close()
    llm.close()
    assert not any(map(is_alive, launcher.pids))


@pytest.mark.parametrize(
    ("is_busy", "sizes"),
    [(True, {"tensor_parallel_size": 4}), (False, {"tensor_parallel_size": 2}), (True, STAGES), (False, STAGES)],
)
def test_a_killed_rank_ends_the_engine_immediately(is_busy: bool, sizes: dict[str, Any]) -> None:
    """Its requests do not fail: clients resume them elsewhere. No operation waits for its timeout."""
    launcher, config = Watched(), EngineConfig(**sizes, **SETTINGS)
    engine = Engine.from_config(config, launcher=launcher)
    events: list[StreamDelta] = []
    engine.loop.start(events.extend)
    if is_busy:
        engine.loop.submit(engine.new_request("a", PROMPT, LONG))
        eventually(lambda: events)
    os.kill(launcher.pids[-1], signal.SIGKILL)
    eventually(lambda: engine.loop.failure is not None)
    # The other ranks fail too, because of it.
    assert str(engine.loop.failure).startswith(f"rank {config.num_ranks - 1} ended, killed by signal 9")
    assert not [event for event in events if event.finish_reason is not None]
    with pytest.raises(EngineStopped, match="rank"):
        engine.loop.submit(engine.new_request("b", PROMPT, LONG))
    engine.close()
    assert not any(map(is_alive, launcher.pids))


def test_a_stage_that_stands_still_stops_no_other_for_good() -> None:
    """The first stage waits for the second and goes on with it; nothing is computed twice or left out."""
    alone = LLM("demo", **SETTINGS).generate([PROMPT], LONG, progress=False)
    launcher = Watched()
    engine = Engine.from_config(EngineConfig(**STAGES, **SETTINGS), launcher=launcher)
    events: list[StreamDelta] = []
    engine.loop.start(events.extend)
    engine.loop.submit(engine.new_request("a", PROMPT, LONG))
    eventually(lambda: events)
    for pid in launcher.pids:
        os.kill(pid, signal.SIGSTOP)
        engine.loop.submit(engine.new_request(f"while {pid}", PROMPT, LONG))
        time.sleep(0.05)  # Shorter or longer, the tokens are the same.
        os.kill(pid, signal.SIGCONT)
    eventually(lambda: sum(event.finish_reason is not None for event in events) == 3)
    for name in ("a", *(f"while {pid}" for pid in launcher.pids)):
        tokens = [token for event in events if event.request_id == name for token in event.token_ids]
        assert tokens == alone[0].token_ids
    engine.close()


def test_offline_a_killed_rank_is_an_error() -> None:
    launcher = Watched()
    engine = Engine.from_config(EngineConfig(tensor_parallel_size=2, **SETTINGS), launcher=launcher)
    os.kill(launcher.pids[0], signal.SIGKILL)
    with pytest.raises(RankLost, match="rank 1 ended, killed by signal 9"):
        LLM(engine=engine).generate([PROMPT], LONG, progress=False)
    engine.close()


def test_ranks_end_with_a_process_that_is_killed(tmp_path: Path) -> None:
    """Ranks get no message: their connection closes. The script is not run anew for them."""
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent("""
            from tests.engine.ranks.test_processes import SETTINGS, Engine, EngineConfig, Watched
            launcher = Watched()
            engine = Engine.from_config(EngineConfig(tensor_parallel_size=2, **SETTINGS), launcher=launcher)
            print(launcher.pids[0], flush=True)
            input()
        """)
    )
    env = {**os.environ, "PYTHONPATH": os.getcwd()}
    with subprocess.Popen(
        [sys.executable, str(script)], env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        assert is_alive(pid)
        parent.kill()
    eventually(lambda: not is_alive(pid))


def test_a_rank_that_cannot_start_is_reported_with_its_exit_status(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(RankLost, match="rank 1 ended, with exit status 1"):
        Engine.from_config(EngineConfig(tensor_parallel_size=2, **SETTINGS))


def test_a_rank_that_ends_on_its_way_to_the_others_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rank had reported that it is ready, and torch would wait for it as long as for a slow one."""
    python = tmp_path / "python"
    code = (
        "import os, sys, msgspec; from engine.ranks import worker; worker.join = lambda *_: os._exit(3); "
        "worker.work(msgspec.msgpack.decode(sys.stdin.buffer.read(), type=worker.RankSpec), lambda: os._exit(0))"
    )
    python.write_text(f'#!/bin/sh\nexec {sys.executable} -c "{code}"\n')
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    with pytest.raises(RankLost, match="rank 1 ended, with exit status 3"):
        Engine.from_config(EngineConfig(tensor_parallel_size=2, **SETTINGS))


class Crowded(Watched):
    """Before any rank, strangers connect; each does and says what one of `visits` does."""

    def __init__(self, *visits: Callable[[socket.socket], object]) -> None:
        self._visits = visits
        self.strangers: list[socket.socket] = []

    def launch(self, specs: Sequence[RankSpec]) -> ChildProcesses:
        for visit in self._visits:
            self.strangers.append(socket.create_connection(("127.0.0.1", specs[0].port)))
            visit(self.strangers[-1])
        return super().launch(specs)


def says(data: bytes) -> Callable[[socket.socket], object]:
    return lambda stranger: stranger.sendall(data)


def test_strangers_are_not_let_in_and_hold_up_no_rank() -> None:
    """A connection that does not prove the key is refused; the ranks, which have it, are let in meanwhile.

    One leaves, one says nothing, one says half of what it announces or announces much, and one guesses.
    """
    launcher = Crowded(
        socket.socket.close, says(b""), says(b"\0\0"), says(b"\x7f\xff\xff\xff"), says(b"\0\0\0\x10" + bytes(16))
    )
    engine = Engine.from_config(EngineConfig(tensor_parallel_size=2, **SETTINGS), launcher=launcher)
    engine.close()
    for stranger in launcher.strangers:
        stranger.close()


def test_a_rank_that_ends_while_a_stranger_is_silent_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(RankLost, match="rank 1 ended, with exit status 1"):
        RankGroup.start(Crowded(says(b"")), 2)


def test_silent_strangers_are_cut_when_they_are_many_or_late(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.ranks.entrance.MAX_PROVING", 4)
    key = secrets.token_bytes(32)
    server = socket.create_server(("127.0.0.1", 0))
    with Entrance(server, key):
        many = [socket.create_connection(server.getsockname(), timeout=60) for _ in range(8)]
        for stranger in many[:4]:
            read_to_end(stranger)  # of the challenge
        monkeypatch.setattr("engine.ranks.entrance.PROOF_S", 0.0)
        with socket.create_connection(server.getsockname(), timeout=60) as late:
            read_to_end(late)
    for stranger in many:
        read_to_end(stranger)
        stranger.close()


def test_a_process_that_stood_still_lets_ranks_in_and_cuts_off_silent_peers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The clock is the test's, and goes on by so much between two readings that the time is over at once."""
    monkeypatch.setattr("engine.ranks.entrance.PROOF_S", 1.0)
    now, num_readings, key = 0.0, 0, secrets.token_bytes(32)

    def clock() -> float:
        nonlocal num_readings
        num_readings += 1
        return now

    def pass_time(seconds: float) -> None:
        nonlocal now
        now, seen = now + seconds, num_readings
        eventually(lambda: num_readings >= seen + 3)  # it has looked since

    server = socket.create_server(("127.0.0.1", 0))
    with Entrance(server, key, clock) as entrance:
        rank, silent = (socket.create_connection(server.getsockname(), timeout=60) for _ in range(2))
        for peer in (rank, silent):
            assert peer.recv(1, socket.MSG_PEEK)  # of the challenge: it waits for the proof
        pass_time(3600.0)
        rank.settimeout(None)
        with Connection(rank.detach()) as connection:
            answer_challenge(connection, key)
            deliver_challenge(connection, key)
            entrance.admit(ChildProcesses()).close()
        for _ in range(3):
            pass_time(STILL_S)
        read_to_end(silent)
        silent.close()


def read_to_end(peer: socket.socket) -> None:
    with contextlib.suppress(ConnectionError):
        while peer.recv(4096):
            pass
