"""Imports decide how soon a process answers and how much memory it takes: only engines import torch."""

from __future__ import annotations

import subprocess
import sys

import pytest

LOADS_AN_ENGINE = """
from engine.settings.config import EngineConfig
from engine.program.engine import Engine
from deployments.replica.liveness import prove_step
engine = Engine.from_config(EngineConfig(kv_pages=16, max_running=4))
prove_step(engine)
"""
READS_REQUESTS = """
import deployments.ingress.deployment, router.ray_router
from engine.model_files.model_directory import demo_model_path
from engine.text.tokenizer import load_tokenizer
tokenizer = load_tokenizer(demo_model_path())
tokenizer.apply_chat_template([{"role": "user", "content": "Hello"}], add_generation_prompt=True)
"""

CHECKS_FILES = """
import shutil, tempfile
from deployments.control.model_files import fault_of
from engine.settings.config import EngineConfig
from engine.model_files.model_directory import demo_model_path
with tempfile.TemporaryDirectory() as directory:
    model = shutil.copytree(demo_model_path(), directory, dirs_exist_ok=True)
    assert fault_of(EngineConfig(model=model)) is None
"""
IS_THE_HUB = "import deployments.hub.deployment"
STARTS_THE_SERVER = """
from pathlib import Path
from deployments.cli import serve
config = serve.load(Path("deployments.yaml"), serve.Overrides(None, None, None, None, None))
serve.read_live(config)
serve.in_effect(config, serve.this_machine(), serve.facts)
"""
# Serve's controller unpickles each deployment's options, and asks the autoscaling policy.
IS_SERVES_CONTROLLER = """
import ray.serve._private.controller, deployments.replica.autoscaling
"""

# OpenTelemetry may be loaded by FastAPI (its API) and Ray Serve (its SDK), but not by Raydix without an endpoint.
BUILDS_THE_APPLICATION = """
import sys
import deployments.api, deployments.telemetry.tracing, deployments.telemetry.request_log, deployments.config.args
from deployments.config.settings import TracingSettings
assert deployments.telemetry.tracing.open_tracing(TracingSettings(), "i") is None
sdk = ("opentelemetry.sdk", "opentelemetry.exporter")
assert not [name for name in sys.modules if name.startswith(sdk)], "the API"
import deployments.app
assert not [name for name in sys.modules if name.startswith("opentelemetry.exporter.otlp")]
"""
NOT_FOR_AN_APPLICATION = {"torch", "transformers", "deployments.telemetry.spans"}


@pytest.mark.parametrize(
    ("role", "code", "unwanted"),
    [
        ("builds the application", BUILDS_THE_APPLICATION, NOT_FOR_AN_APPLICATION),
        ("checks a model's files", CHECKS_FILES, {"torch"}),
        ("starts the server", STARTS_THE_SERVER, {"torch", "transformers", "tokenizers"}),
        ("is Serve's controller", IS_SERVES_CONTROLLER, {"torch", "transformers", "tokenizers"}),
        ("is the hub", IS_THE_HUB, {"torch", "transformers", "tokenizers", "deployments.api.application.app"}),
        ("is an ingress", READS_REQUESTS, {"torch"}),
        # Seconds of compilers and of algebra that nothing here uses: torch loads them on certain calls.
        ("is an engine", LOADS_AN_ENGINE, {"transformers", "sympy", "torch._dynamo"}),
    ],
)
def test_no_process_imports_what_it_does_not_need(role: str, code: str, unwanted: set[str]) -> None:
    check = f"{code}\nimport sys\nprint(*sorted({unwanted!r} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [], f"who {role} imports it"
