"""The wheel, installed where there is no checkout."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import psutil
import pytest
from openai import OpenAI

from deployments.config.version import raydix_version
from tests.e2e.support.own_server import a_server
from tests.support.packages import script, source_distribution, wheel_of

pytestmark = pytest.mark.e2e

QUICK = """
case "$*" in *-mavx*) exit 1 ;; esac
exec gcc "$@"
"""
"""A compiler for the kernels that all processors have; those for others, in the same file, would take a minute."""


def test_an_installed_wheel_serves_and_leaves_no_process_behind_when_it_is_killed(
    tmp_path: Path, ray_directory: Path, port: str
) -> None:
    """In an environment of its own, which has this one's packages but not Raydix: paths that a .pth file adds have
    no .pth files of theirs read, and so a checkout that is installed here is not found there. It starts without
    bytecode, as in a container whose image was built without: each process compiles all that it imports.
    """
    archive = source_distribution(tmp_path)
    wheel = wheel_of(archive, tmp_path / "sources", script(tmp_path / "cc", QUICK))
    environment, empty = tmp_path / "venv", tmp_path / "empty"
    empty.mkdir()
    python = environment / "bin/python"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", environment], check=True, timeout=120)
    subprocess.run(
        [sys.executable, "-m", "pip", "--python", python, "install", "-q", "--no-deps", "--no-index", wheel],
        check=True,
        timeout=120,
    )
    [packages] = environment.glob("lib/python*/site-packages")
    (packages / "others.pth").write_text(sysconfig.get_path("purelib") + "\n", encoding="utf-8")

    raydix = str(environment / "bin/raydix")
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}

    def output(*command: str) -> str:
        ran = subprocess.run(command, cwd=empty, env=variables, capture_output=True, text=True, timeout=120)
        assert ran.returncode == 0, ran.stderr
        return ran.stdout

    assert output(str(python), "-c", "import engine; print(engine.__file__)").startswith(str(packages))
    assert output(raydix, "--version") == f"raydix {raydix_version()}\n"
    assert "generic of generic" in output(raydix, "info", "demo", "--device", "cpu"), "no kernels in the wheel"
    bytecode = tmp_path / "bytecode"
    bytecode.mkdir()
    without = {"PYTHONDONTWRITEBYTECODE": "1", "PYTHONPYCACHEPREFIX": str(bytecode)}
    log = empty / "serve.log"
    command = [raydix, "serve", "--port", port, "--replicas", "1"]
    with a_server(command, ray_directory, log, imports="", **without) as server:
        client = OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none")
        answer = client.chat.completions.create(
            model="demo",
            messages=[{"role": "user", "content": "What does itertools.chain do?"}],
            temperature=0,
            max_tokens=16,
        )
        assert list(bytecode.iterdir()) == []
        family = psutil.Process(server.pid).children(recursive=True)
        server.kill()
        server.wait()
        assert psutil.wait_procs(family, timeout=60)[1] == []
    assert answer.choices[0].message.content and answer.usage is not None and answer.usage.completion_tokens > 0
