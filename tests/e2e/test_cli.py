"""The `raydix` command against the real application."""

from __future__ import annotations

import json
import os
import pty
import select
import signal
import subprocess
import sys
import time
from contextlib import suppress
from ipaddress import ip_address
from pathlib import Path

import httpx
import psutil
import pytest
import yaml

from deployments.cli.serve_config import Overrides, load
from tests.e2e.support.own_server import READY_S, a_server, own_environment, wait_for

pytestmark = pytest.mark.e2e

RAYDIX = [sys.executable, "-m", "deployments.cli"]


def test_chat_reuses_the_conversation(base_url: str) -> None:
    lines = "What does itertools.chain do?\nAnd what does os.path.join do?\n/stats\n/reset\nHello\n/stats\n/quit\n"
    command = [*RAYDIX, "chat", "--url", base_url, "--max-tokens", "24"]
    result = subprocess.run(command, input=lines, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    rows = [cells for line in result.stdout.splitlines() if len(cells := line.split("│")) == 8]
    assert [cells[1].strip() for cells in rows] == ["1", "2", "1"]
    [first, second, _] = [[int(cells[i].split()[0]) for i in (2, 3, 4)] for cells in rows]
    # The second prompt holds the first one and its answer, all of which a replica has computed.
    prompt, _, generated = first
    assert second[0] > prompt and second[1] >= prompt - 1 and 0 < generated <= 24


def test_chat_shows_an_error_of_the_server_and_continues(base_url: str) -> None:
    lines = "word " * 20_000 + "\nWhat does len do?\n/stats\n"
    command = [*RAYDIX, "chat", "--url", base_url, "--max-tokens", "8"]
    result = subprocess.run(command, input=lines, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    [error] = [line for line in result.stdout.splitlines() if line.startswith("error: ")]
    assert "HTTP 4" in error
    assert [line for line in result.stdout.splitlines() if line.startswith("│")]


def test_serve_is_ready_answers_and_leaves_nothing_behind(port: str, ray_directory: Path, tmp_path: Path) -> None:
    """Meanwhile neither Ray nor Raydix opens anything to the network, metric pages included, and `raydix deploy`
    reaches its Ray.
    """
    log, url = tmp_path / "serve.log", f"http://127.0.0.1:{port}"
    with a_server([*RAYDIX, "serve", "--port", port, "--replicas", "1"], ray_directory, log) as server:
        assert httpx.get(f"{url}/health", timeout=60).json()["status"] == "healthy"
        listening = addresses(server)
        assert int(port) in {port for _, _, port in listening}
        assert "raylet" in {name for name, _, _ in listening}
        # ::ffff:127.0.0.1 is how a socket for both versions of IP shows an address of version 4.
        away = {each for each in listening if not ip_address(each[1].removeprefix("::ffff:")).is_loopback}
        assert not away, sorted(away)
        (tmp_path / "my.yaml").write_text(yaml.safe_dump(load(None, Overrides(port=int(port), replicas=1))))
        env = {**own_environment(ray_directory), "RAY_ADDRESS": ray_address(server), "RAY_AUTH_MODE": "token"}
        command = [*RAYDIX, "deploy", "my.yaml"]
        done = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0 and "my.yaml is in effect" in done.stderr, done.stderr
        assert "GET /" not in log.read_text(), "its own look whether it is ready is shown as a client's"
        body = {"model": "demo", "messages": [{"role": "user", "content": "What does len do?"}], "max_tokens": 4}
        answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60).raise_for_status().json()
        assert answer["usage"]["completion_tokens"] > 0
        assert httpx.post(f"{url}/v1/completions", json={"model": "demo"}, timeout=60).status_code == 400
        wait_for("POST /v1/chat/completions 200 ", log, server)
        wait_for("POST /v1/completions 400 ", log, server)
        assert "ms: prompt is " in log.read_text(), "what was wrong is not shown"
        family = psutil.Process(server.pid).children(recursive=True)
        assert family
        story = {"model": "demo", "prompt": "x", "max_tokens": 500, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", f"{url}/v1/completions", json=story, timeout=60) as stream:
            lines = stream.iter_lines()
            assert next(lines).startswith("data:")
            server.send_signal(signal.SIGINT)
            assert "data: [DONE]" in lines, "an open stream was cut off"
        assert server.wait(timeout=60) == 0, log.read_text()
        assert "Traceback" not in log.read_text()
        assert psutil.wait_procs(family, timeout=60)[1] == []


def addresses(server: subprocess.Popen[bytes]) -> set[tuple[str, str, int]]:
    """Where a server's processes listen: name, address and port."""
    family = [one := psutil.Process(server.pid), *one.children(recursive=True)]
    return {
        (process.name(), connection.laddr.ip, connection.laddr.port)
        for process in family
        for connection in process.net_connections("inet")
        if connection.status == psutil.CONN_LISTEN
    }


def ray_address(server: subprocess.Popen[bytes]) -> str:
    """The address of the Ray that a server has started."""
    [raylet] = [one for one in psutil.Process(server.pid).children(recursive=True) if one.name() == "raylet"]
    [address] = [word for word in raylet.cmdline() if word.startswith("--gcs-address=")]
    return address.partition("=")[2]


def processes_of(ray_directory: Path) -> list[psutil.Process]:
    """All processes that have inherited this environment, whoever their parents are by now."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.environ().get("RAY_TMPDIR") == str(ray_directory):
                found.append(process)
    return found


@pytest.mark.parametrize("moment", ["Ray: starting", "engines: 0 of 1 ready"])
def test_ctrl_c_during_the_start_leaves_nothing_behind(
    moment: str, port: str, ray_directory: Path, tmp_path: Path
) -> None:
    log, temporary = tmp_path / "serve.log", ray_directory / "t"
    temporary.mkdir()
    command = [*RAYDIX, "serve", "--port", port, "--replicas", "1"]
    with a_server(command, ray_directory, log, until=moment, TMPDIR=str(temporary)) as server:
        assert "is ready at" not in log.read_text()
        server.send_signal(signal.SIGINT)
        assert server.wait(timeout=READY_S) == 0, log.read_text()
    assert "Traceback" not in log.read_text() and "is ready at" not in log.read_text()
    assert psutil.wait_procs(processes_of(ray_directory), timeout=60)[1] == []
    assert not list(temporary.glob("raydix-*")), "the pipe of request lines is left"


def test_serve_ends_with_a_message_when_its_raylet_dies(port: str, ray_directory: Path, tmp_path: Path) -> None:
    log = tmp_path / "serve.log"
    with a_server([*RAYDIX, "serve", "--port", port, "--replicas", "1"], ray_directory, log) as server:
        family = psutil.Process(server.pid).children(recursive=True)
        next(process for process in family if process.name() == "raylet").kill()
        assert server.wait(timeout=60) == 1, log.read_text()
        assert "Ray's raylet ended" in log.read_text() and "Traceback" not in log.read_text()
        assert psutil.wait_procs(family, timeout=60)[1] == []


def test_top_shows_the_running_service(base_url: str) -> None:
    body = {"model": "demo", "prompt": "What does itertools.chain do?", "max_tokens": 8, "ignore_eos": True}
    httpx.post(f"{base_url}/v1/completions", json=body, timeout=60).raise_for_status()
    command = [*RAYDIX, "top", "--url", base_url, "--once", "--interval", "1"]
    result = subprocess.run([*command, "--json"], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    document = json.loads(result.stdout)
    [model] = document["models"]
    assert (model["model"], model["replicas_expected"]) == ("demo", 2) and model["requests_per_s"] >= 0
    states = [replica for replica in document["replicas"] if replica["state"] == "up"]
    assert len(states) == 2 and {replica["model"] for replica in states} == {"demo"}
    for replica in states:
        pages = [replica[f"kv_pages_{state}"] for state in ("free", "active", "cached")]
        assert sum(pages) == 2048 and replica["heartbeat_age_s"] < 60
    assert document["interval_s"] >= 1 and document["decisions"] is None
    screen = subprocess.run(
        command, capture_output=True, text=True, timeout=120, env={**os.environ, "COLUMNS": "80"}
    )
    assert screen.returncode == 0 and max(map(len, screen.stdout.splitlines())) <= 80
    assert "hidden: router decisions (needs an admin key, and the server has none" in screen.stdout


def test_top_in_a_terminal_ends_at_ctrl_c_and_leaves_it_as_it_was(base_url: str) -> None:
    primary, secondary = pty.openpty()
    env = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "80", "LINES": "24"}
    top = subprocess.Popen([*RAYDIX, "top", "--url", base_url], stdin=secondary, stdout=secondary, env=env)
    os.close(secondary)
    try:
        seen = _read_until(primary, b"replica")
        top.send_signal(signal.SIGINT)
        seen += _read_until(primary, b"\x1b[?1049l")
        assert top.wait(timeout=60) == 0
    finally:
        if top.poll() is None:
            top.kill()
            top.wait()
        os.close(primary)
    assert seen.find(b"\x1b[?1049h") < seen.find(b"replica") < seen.rfind(b"\x1b[?1049l")


def _read_until(terminal: int, text: bytes) -> bytes:
    seen, deadline = b"", time.monotonic() + READY_S
    while text not in seen:
        assert select.select([terminal], [], [], deadline - time.monotonic())[0], seen
        try:
            seen += os.read(terminal, 65536)
        except OSError as error:  # the other end is closed
            raise AssertionError(seen) from error
    return seen
