"""`raydix serve --dry-run`: the settings in effect with their reasons, or what a start would refuse."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
import ray

from deployments.cli import serve
from deployments.config.machine import Hardware, HardwareNode, VisibleGpu
from deployments.config.tenants import hash_key
from engine.model_files.model_directory import demo_model_path
from tests.deployments.support.command_line import raydix

GIB = 2**30


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An empty directory, on a machine without GPUs and no cluster."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with_gpus(monkeypatch, 0)
    return tmp_path


def with_gpus(patch: pytest.MonkeyPatch, count: int, cores: int = 2) -> None:
    """Have the command find such a machine."""
    node = HardwareNode(cores, cores, (VisibleGpu("NVIDIA H100", 79 * GIB),) * count, cache="/c")
    patch.setattr(serve, "this_machine", lambda: Hardware((node,)))


def shown(*arguments: str) -> dict[str, tuple[str, str]]:
    """Return value and reason of each setting that a dry run prints."""
    result = raydix("serve", "--dry-run", *arguments)
    assert result.returncode == 0, result.stderr
    assert not ray.is_initialized()
    rows = [line.split(None, 1) for line in result.stdout.splitlines()]
    return {path: (rest.partition("# ")[0].strip(), rest.partition("# ")[2]) for path, rest in rows}


def test_the_bare_command_shows_the_demo() -> None:
    settings = shown()
    assert settings["engines.count"] == ("2", "part of the demo, which is served without a file")
    assert settings["engine.device"][0] == '"cpu"'
    assert settings["engine.max_running"] == ("256", "default")
    assert settings["health.heartbeat_s"] == ("0.05", "default"), "all settings are there"


def test_a_model_inherits_nothing_of_the_demo(monkeypatch: pytest.MonkeyPatch, here: Path) -> None:
    model = str(demo_model_path())
    for _ in range(2):
        on_cpus = shown("--model", model)
        assert on_cpus["engines.count"] == ("1", "one engine computes with all cores")
        assert on_cpus["engine.threads"] == ("2", "one for each of 2 cores")
        assert on_cpus["engine.kv_pages"] == ("null", "default")
        assert on_cpus["engine.model"] == (f'"{model}"', "given by --model")
        # The same beside the file that comes with the source.
        (here / "deployments.yaml").write_text((Path(__file__).parents[3] / "deployments.yaml").read_text())
    with_gpus(monkeypatch, 2)
    on_gpus = shown("--model", model, "--port", "8123")
    assert on_gpus["engines.count"][0] == "2" and "2 GPUs are visible" in on_gpus["engines.count"][1]
    assert (on_gpus["engine.device"][0], on_gpus["engines.num_gpus"][0]) == ('"cuda"', "1.0")
    assert (on_gpus["engine.kv_memory_share"][0], on_gpus["engine.max_step_tokens"][0]) == ("0.9", "8192")
    assert on_gpus["ingresses.port"] == ("8123", "given by --port")
    both = shown("--model", model, "--tensor-parallel", "2")
    assert both["engine.tensor_parallel_size"] == ("2", "given by --tensor-parallel")
    assert both["engines.count"][0] == "1"
    stages = shown("--model", model, "--pipeline-parallel", "2")
    assert stages["engine.pipeline_parallel_size"] == ("2", "given by --pipeline-parallel")
    assert (stages["engine.tensor_parallel_size"][0], stages["engines.count"][0]) == ("1", "1")
    with_gpus(monkeypatch, 4)
    parts = shown("--model", model, "--tensor-parallel", "4", "--context-parallel", "2")
    assert parts["engine.context_parallel_size"] == ("2", "given by --context-parallel")


def test_a_file_s_settings_win_and_are_named(here: Path) -> None:
    (here / "my.yaml").write_text(
        "applications: [{name: x, import_path: 'deployments.app:build', "
        "args: {engine: {threads: 1, page_size: 8}, "
        f"limits: {{max_choices: 3}}, tenants: [{{name: secret, key_hashes: [{hash_key('a')}]}}]}}}}]"
    )
    settings = shown("my.yaml")
    for path, value in (("engine.threads", "1"), ("engine.page_size", "8"), ("limits.max_choices", "3")):
        assert settings[path] == (value, "given in my.yaml")
    assert settings["tenants"] == ("(not shown)", "given in my.yaml")
    assert settings["engines.count"][0] == "1"


def test_bad_settings_are_refused_as_by_a_start(monkeypatch: pytest.MonkeyPatch, here: Path) -> None:
    """A real start ends before Ray does where the same checks refuse."""
    monkeypatch.setattr(serve, "start_ray", lambda *_: pytest.fail("Ray starts"))
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    for number, (args, options, message) in enumerate(
        (
            ("{engine: {pages: 3}}", (), "unknown setting 'pages'"),
            ("{engine: {model: /nope}}", (), "there is no directory /nope"),
            ("{}", ("--host", "no.such.host.invalid"), "cannot listen on no.such.host.invalid:"),
            ("{engine: {device: cuda}}", (), 'engine.device is "cuda", but no GPU is visible'),
            ("{engines: {count: 9, num_cpus: 1}}", (), "reserve 9.25 CPUs in Ray, but there are 2:"),
            ("{engine: {micro_batches: 2}}", (), "micro_batches is 2, but pipeline_parallel_size is 1"),
            ("{}", ("--context-parallel", "2"), "is 2, which does not divide tensor_parallel_size 1: "),
            ("{}", ("--pipeline-parallel", "65"), "pipeline_parallel_size must be in [1, 64], got 65"),
        )
    ):
        path = here / f"{number}.yaml"
        path.write_text(f"applications: [{{name: x, import_path: 'deployments.app:build', args: {args}}}]")
        dry = raydix("serve", str(path), "--dry-run", "--port", port, *options)
        real = raydix("serve", str(path), "--port", port, *options)
        assert dry.returncode == real.returncode != 0
        assert message in dry.stderr and dry.stderr == real.stderr
        assert dry.stdout == "" and not ray.is_initialized()


def test_a_setting_that_only_serve_would_refuse_is_refused_too(here: Path) -> None:
    (here / "my.yaml").write_text(
        "applications: [{name: x, import_path: 'deployments.app:build', "
        "args: {engine: {tensor_parallel_size: 5}}}]"
    )
    result = raydix("serve", "my.yaml", "--dry-run")
    assert result.returncode == 1
    assert (
        "x did not start: " in result.stderr and "tensor_parallel_size is 5, which cannot share" in result.stderr
    )
    result = raydix("serve", "--dry-run", "--model", str(demo_model_path()), "--pipeline-parallel", "7")
    assert result.returncode == 1
    assert "pipeline_parallel_size is 7, but the 6 layers of this model" in result.stderr
    parts = ("--tensor-parallel", "4", "--context-parallel", "4")
    result = raydix("serve", "--dry-run", "--model", str(demo_model_path()), *parts)
    assert result.returncode == 1
    assert "context_parallel_size is 4, but the number of ranks with the same key-value head is 2" in result.stderr


def test_a_server_that_runs_is_no_reason_to_show_nothing() -> None:
    with socket.create_server(("127.0.0.1", 0)) as running:
        assert shown("--port", str(running.getsockname()[1]))["engines.count"][0] == "2"
