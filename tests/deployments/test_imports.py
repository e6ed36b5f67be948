"""Imports decide how soon a process answers and how much memory it takes: only engines import torch."""

from __future__ import annotations

import subprocess
import sys

import pytest

LOADS_AN_ENGINE = """
from engine.config import EngineConfig
from engine.engine import Engine
from deployments.replica.liveness import prove_step
engine = Engine.from_config(EngineConfig(kv_pages=16, max_running=4))
prove_step(engine)
"""
READS_REQUESTS = """
import deployments.ingress.deployment, router.ray_router
from engine.loading.model_directory import demo_model_path
from engine.tokenizer import load_tokenizer
tokenizer = load_tokenizer(demo_model_path())
tokenizer.apply_chat_template([{"role": "user", "content": "Hello"}], add_generation_prompt=True)
"""


@pytest.mark.parametrize(
    ("role", "code", "unwanted"),
    [
        ("builds the application", "import deployments.app", {"torch", "transformers"}),
        ("is an ingress", READS_REQUESTS, {"torch"}),
        # Seconds of compilers and of algebra that nothing here uses: torch loads them on certain calls.
        ("is an engine", LOADS_AN_ENGINE, {"transformers", "sympy", "torch._dynamo"}),
    ],
)
def test_no_process_imports_what_it_does_not_need(role: str, code: str, unwanted: set[str]) -> None:
    check = f"{code}\nimport sys\nprint(*sorted({unwanted!r} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [], f"who {role} imports it"
