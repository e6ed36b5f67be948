"""`raydix info` shows the settings that `raydix serve` would choose for the machine, each with its reason."""

from __future__ import annotations

import pytest

from deployments.config.machine import Hardware, HardwareNode, VisibleGpu
from deployments.control import hardware
from engine.model_files.model_directory import demo_model_path
from tests.deployments.support.command_line import raydix

GIB = 2**30
GPU = VisibleGpu("NVIDIA H100", 79 * GIB)


def chosen(monkeypatch: pytest.MonkeyPatch, node: HardwareNode, *arguments: str) -> str:
    """Return what the command prints on such a machine, in one line and without the table's frame."""
    monkeypatch.setattr(hardware, "this_machine", lambda: Hardware((node,)))
    monkeypatch.setenv("COLUMNS", "300")
    result = raydix("info", *arguments)
    assert result.returncode == 0, result.stderr
    return " ".join(result.stdout.replace("│", " ").split())


def test_a_machine_with_gpus_shows_what_they_change(monkeypatch: pytest.MonkeyPatch) -> None:
    said = chosen(monkeypatch, HardwareNode(16, 16, (GPU,) * 2, cache="/c"))
    gpus = "2 GPUs are visible (NVIDIA H100, 79.0 GiB)"
    for line in (
        f"serve chooses engine.device: cuda ({gpus})",
        f"engines.count: 2 (one engine for each GPU, and {gpus})",
        "engines.num_gpus: 1.0 (an engine, or each of its ranks, has a GPU to itself)",
        "engine.kv_memory_share: 0.9 (of the GPU memory that weights, the largest step and CUDA graphs leave",
        "engine.max_step_tokens: 8192 (a GPU computes longer steps at a better rate)",
        "ingresses.count: 4 (16 cores, one for each 4, at most 4)",
    ):
        assert line in said
    assert "tensor_parallel_size" not in said, "that depends on the model"


def test_a_model_shows_how_many_gpus_share_it(monkeypatch: pytest.MonkeyPatch) -> None:
    said = chosen(monkeypatch, HardwareNode(16, 16, (GPU,), cache="/c"), str(demo_model_path()))
    assert (
        "engine.tensor_parallel_size: 1 (weights and the longest request's KV fit on one GPU of 79.0 GiB)" in said
    )
    said = chosen(monkeypatch, HardwareNode(16, 16, (GPU,)), str(demo_model_path()), "--device", "cpu")
    assert "engine.device" not in said and "engine.max_step_tokens" not in said, "it was given"
    assert "engine.threads: 15 (one for each of 16 cores, but for one" in said


def test_a_machine_that_serve_refuses_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    said = chosen(monkeypatch, HardwareNode(4, 4, unknown="the driver does not answer: give engine.device"))
    assert "serve refuses the driver does not answer: give engine.device" in said
