"""Other people's programs against the real application: `make clients` runs them, in their own environment.

Applications run from .venv, once for all clients: that of deployments.yaml, and one whose two models replay
scripts (`tests/clients/support/scripts.py`): `agent` thinks and calls tools, `plain` does not. Where a client is
not installed, its file is left out, and the report's header says so; from .venv itself, all are.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml

from tests.clients.support.clients import CLIENTS, left_out
from tests.clients.support.ports import free_port
from tests.clients.support.table import Outcomes
from tests.deployments.support.chat_templates import HERMES

ROOT = Path(__file__).resolve().parents[2]
PYTHON = ROOT / ".venv/bin/python"
"""The interpreter that has Raydix, its engine, and transformers to compare with."""
_READY_S = 180.0
_DEMO = ROOT / "deployments/demo_model"
_LEFT_OUT = left_out()
collect_ignore = list(CLIENTS if find_spec("ray") else _LEFT_OUT)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option that writes the page with the results."""
    parser.addoption("--table", type=Path, help="write the clients and what they saw into this page")


def pytest_configure(config: pytest.Config) -> None:
    """Collect the outcomes for the table, if it is asked for."""
    page = config.getoption("--table", default=None)
    if page is not None:
        config.pluginmanager.register(Outcomes(page))


def pytest_report_header() -> list[str]:
    """Say which clients are not tried here, and why."""
    return [f"{name} is left out: {reason}" for name, reason in sorted(_LEFT_OUT.items())]


@pytest.fixture(scope="session")
def base_url() -> Iterator[str]:
    """The URL of the application whose models replay scripts."""
    with tempfile.TemporaryDirectory(prefix="rdx") as directory:
        port, config = free_port(), Path(directory) / "deployments.yaml"
        config.write_text(yaml.safe_dump(_config(port, _scripted_model(Path(directory) / "agent"))))
        with _serving(port, str(config)) as url:
            yield url


@pytest.fixture(scope="session")
def embedded_url() -> Iterator[str]:
    """The URL of the application of deployments.yaml, with the embedded model."""
    port = free_port()
    with _serving(port, "deployments.yaml", "--port", str(port)) as url:
        yield url


@pytest.fixture(scope="session")
def api(base_url: str) -> str:
    """The base URL that clients of OpenAI's API are given."""
    return f"{base_url}/v1"


def _config(port: int, scripted: Path) -> dict[str, object]:
    """Return the configuration of an application whose scripted models lie in the directory `scripted`."""
    engines = {"count": 1, "num_cpus": 0.1}

    def model(name: str, **chat: str) -> dict[str, object]:
        engine = {"model": str(scripted), "served_name": name, "kv_pages": 4096}
        return {"engine": engine, "engines": engines, "chat": chat}

    models = [model("agent"), model("plain", reasoning="none")]
    args = {"models": models, "ingresses": {"port": port, "num_cpus": 0.1, "cors_origins": ["*"]}}
    application = {"name": "clients", "import_path": "tests.clients.support.scripted_app:build", "args": args}
    # `raydix serve` waits for the address of `http_options`, where an application that it does not know has none.
    return {
        "proxy_location": "Disabled",
        "http_options": {"host": "127.0.0.1", "port": port},
        "applications": [application],
    }


def _scripted_model(directory: Path) -> Path:
    """Make a directory with the embedded model's tokenizer and a template that shows tools and reasoning."""
    directory.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(_DEMO / name, directory)
    config = (_DEMO / "config.json").read_text()
    longer = config.replace('"max_position_embeddings": 4096', '"max_position_embeddings": 32768')
    (directory / "config.json").write_text(longer)
    (directory / "chat_template.jinja").write_text(HERMES)
    return directory


@contextmanager
def _serving(port: int, *arguments: str) -> Iterator[str]:
    """Run `raydix serve`, and yield its URL once it is ready."""
    command = [str(PYTHON), "-m", "deployments.cli", "serve", *arguments]
    with tempfile.NamedTemporaryFile() as output:
        server = subprocess.Popen(
            command, cwd=ROOT, stdout=output, stderr=output, env={**os.environ, "PYTHONPATH": str(ROOT)}
        )
        try:
            _wait_until_ready(server, f"http://127.0.0.1:{port}", Path(output.name))
            yield f"http://127.0.0.1:{port}"
        finally:
            server.send_signal(signal.SIGINT)
            try:
                server.wait(timeout=90)
            except subprocess.TimeoutExpired:
                server.kill()


def _wait_until_ready(server: subprocess.Popen[bytes], url: str, output: Path) -> None:
    """Wait until all models have their engines: with the first of them, an ingress says that it is ready."""
    deadline = time.monotonic() + _READY_S
    while time.monotonic() < deadline and server.poll() is None:
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=5) as answer:
                if json.load(answer)["status"] == "healthy":
                    return
        except OSError:
            pass
        time.sleep(0.5)
    pytest.fail(f"the application did not start:\n{output.read_text(errors='replace')[-4000:]}")
