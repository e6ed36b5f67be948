"""The sizes stated in the examples are those that `raydix plan` computes for their settings."""

from __future__ import annotations

import json
import re
import shlex

import pytest
from typer.testing import CliRunner

from deployments.cli.app import app
from engine.settings.config import EngineConfig
from tests.k8s.support.manifests import K8S, build, kustomize_command


@pytest.mark.skipif(kustomize_command() is None, reason="neither kubectl nor kustomize is installed")
@pytest.mark.parametrize("directory", ["examples/llama-3.1-8b", "examples/qwen3-32b", "examples/deepseek-v3"])
def test_the_stated_sizes_are_the_plans(directory: str) -> None:
    lines = (K8S / directory / "kustomization.yaml").read_text(encoding="utf-8").splitlines()
    said = " ".join(line.removeprefix("#").strip() for line in lines if line.startswith("#"))
    command = re.search(r"`raydix (plan [^`]+)`", said)
    assert command is not None
    ran = CliRunner().invoke(app, [*shlex.split(command[1]), "--json"])
    assert ran.exit_code == 0, ran.output
    plan = json.loads(ran.stdout)
    replica = plan["replica"]
    assert f"{replica['kv_bytes_per_token']:,} B per token" in said
    by_type = plan["model"]["weight_bytes"]  # fp8 only where the checkpoint has it
    assert f"{by_type.get('bfloat16', by_type['fp8']) / 1e9:.4g} GB" in said
    assert f"{replica['kv_pages']:,} pages of 16 tokens, {replica['kv_tokens']:,} tokens" in said
    assert f"{replica['concurrent_requests']}" in said
    assert f"nothing cached: {plan['replicas']} replicas" in said

    manifests = build(directory)
    engine = EngineConfig(**manifests.args["engine"])
    assert (engine.dtype, engine.kv_memory_share) == ("bfloat16", replica["kv_memory_share"])
    assert f"--max-model-len {engine.max_model_len}" in command[1]
    assert manifests.args["engines"]["autoscaling"]["max"] >= plan["replicas"]
