"""`raydix generate` and `raydix info`; help comes at once, and a mistake is reported in one line."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from deployments.cli import info
from deployments.cli.info import Machine, describe, describe_encoder
from deployments.cli.units import count_text
from deployments.simulator.planning.known import planned_model
from engine import EngineConfig
from engine.model_config.config import ModelConfig
from engine.model_config.encoder import EncoderConfig
from engine.model_files.model_directory import demo_model_path
from engine.model_parts.formats import Int4Format, Int8Format, WeightFormat
from tests.deployments.support.command_line import raydix
from tests.engine.support.encoders import save_encoder
from tests.engine.support.oracle import save_tiny
from tests.engine.support.published_models import PUBLISHED


def test_help_imports_nothing_heavy() -> None:
    """Of all commands, in one process: the first that imports something is named."""
    commands = [[], ["serve"], ["chat"], ["generate"], ["info"], ["plan"], ["top"]]
    script = (
        "import sys; from deployments.cli.app import app\n"
        f"for command in {commands!r}:\n"
        "    try: app([*command, '--help'])\n"
        "    except SystemExit: pass\n"
        "    heavy = {'ray', 'torch', 'transformers', 'numpy', 'fastapi', 'httpx'} & set(sys.modules)\n"
        "    assert not heavy, (command, heavy)"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("Usage: ") == len(commands)


def test_info_shows_the_size_of_the_embedded_model_and_of_its_kv() -> None:
    result = raydix("info", "demo", "--page-size", "32", "--dtype", "bfloat16", "--device", "cpu")
    assert result.returncode == 0, result.stderr
    config = ModelConfig.from_directory(demo_model_path())
    assert f"{config.num_parameters:,}" in result.stdout
    assert f"{config.kv_bytes_per_token(2):,} bytes" in result.stdout
    assert "32 tokens" in result.stdout and "KV pages here" in result.stdout


def test_info_lists_unused_keys_and_files_and_what_a_start_would_refuse(tmp_path: Path) -> None:
    model = save_tiny("llama2", tmp_path)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "swa_gate": 3, "unsloth_version": "2026.1"}))
    (model / "pytorch_model.bin").touch()
    result = raydix("info", str(model), "--device", "cpu")
    assert result.returncode == 0, result.stderr
    text = " ".join(result.stdout.replace("│", " ").split())
    assert "not used keys of config.json: swa_gate" in text and "files: pytorch_model.bin" in text
    assert "refused config.json has swa_gate, which Raydix does not know in a LlamaForCausalLM" in text


def test_info_knows_weights_that_torch_has_saved(tmp_path: Path) -> None:
    model = save_tiny("llama2", tmp_path)
    torch.save(load_file(model / "model.safetensors"), model / "pytorch_model.bin")
    (model / "model.safetensors").unlink()
    result = raydix("info", str(model), "--device", "cpu")
    assert result.returncode == 0, result.stderr
    assert "in float32, 1 file(s)" in result.stdout and "files:" not in result.stdout
    (model / "pytorch_model.bin").unlink()
    (model / "pytorch_model.bin.index.json").write_text(
        '{"metadata": {"total_size": 5000}, "weight_map": {"a": "pytorch_model-1.bin"}}'
    )
    assert "4.9 KiB in float32, not downloaded" in raydix("info", str(model), "--device", "cpu").stdout


def test_info_says_how_many_requests_fit_with_windows_apart() -> None:
    facts = ModelConfig.from_json(PUBLISHED["openai/gpt-oss-20b"], {}, "gpt-oss")
    for config, setting in ((EngineConfig(), "on"), (EngineConfig(windowed_kv="off"), "off")):
        table = describe("m", demo_model_path(), facts, config, Machine("cuda", facts.weight_bytes(2) + 2**32))
        said = dict(zip(table.columns[0].cells, table.columns[1].cells, strict=True))
        # A quarter of 4 GiB in pages of 384 KiB, 2,730 of them, or of 768 KiB, 1,365.
        assert "12 of 24, which see 128 tokens" in str(said["layers with a window"])
        assert f"{2730 // 521} of 8,192 tokens instead of {1365 // 512}" in str(said["layers with a window"])
        assert f"(engine.windowed_kv: {setting} here)" in str(said["layers with a window"])
        assert str(said["KV pages here"]).startswith("2,730 of 12 layers" if setting == "on" else "1,365 (21,840")


def test_info_counts_the_share_of_memory_that_a_server_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    for device, share in (("cpu", "at most 25%"), ("cuda", "at most 90%")):
        monkeypatch.setattr(info, "machine", lambda _device, device=device: Machine(device, 2**30))
        monkeypatch.setenv("COLUMNS", "200")
        assert share in raydix("info", "demo").stdout


def test_info_distinguishes_all_weights_from_those_a_token_uses() -> None:
    facts = planned_model("Qwen3-30B-A3B").facts
    assert facts.experts is not None
    mixed = replace(facts, experts=replace(facts.experts, layers=frozenset(range(2, 48))))
    for shown, dense in ((facts, ""), (mixed, "; 6144 in 2 dense layers")):
        table = describe("m", demo_model_path(), shown, EngineConfig(model="m"), Machine("cpu", 1 << 40))
        said = dict(zip(table.columns[0].cells, table.columns[1].cells, strict=True))
        assert str(said["parameters"]).endswith(f"({shown.num_parameters:,})")
        assert said["hidden size"] == f"2048, feed-forward 128 experts of 768, 8 for each token{dense}"
    assert said["for each token"] == f"{count_text(mixed.active_parameters)} of the parameters"


@pytest.mark.parametrize(
    ("stored", "kind"),
    [
        (Int4Format("awq", 128), "int4 and bfloat16; CPUs compute experts one after another"),
        (Int8Format(), "bfloat16, widened from int8"),
        (None, "bfloat16; experts are widened from MXFP4"),
    ],
)
def test_info_shows_which_weights_stay_quantized_and_which_are_widened(
    stored: WeightFormat | None, kind: str
) -> None:
    facts = planned_model("Qwen3-30B-A3B").facts
    assert facts.experts is not None
    experts = replace(facts.experts, are_quantized=stored is not None and stored.is_kept, is_mxfp4=stored is None)
    config = EngineConfig(model="m", dtype="bfloat16")
    shown = replace(facts, weight_format=stored, experts=experts)
    table = describe("m", demo_model_path(), shown, config, Machine("cpu", 1 << 40))
    said = dict(zip(table.columns[0].cells, table.columns[1].cells, strict=True))
    assert str(said["weights in memory"]).endswith(f" as {kind}")


def test_info_shows_that_gpus_keep_mxfp4_and_cpus_widen_it() -> None:
    facts = planned_model("gpt-oss-20b").facts
    config = EngineConfig(model="m", dtype="bfloat16")
    for device, said in (
        ("cuda", "12.8 GiB as bfloat16; experts stay in"),
        ("cpu", "39.0 GiB as bfloat16; experts are widened from"),
    ):
        table = describe("m", demo_model_path(), facts, config, Machine(device, 1 << 40))
        rows = dict(zip(table.columns[0].cells, table.columns[1].cells, strict=True))
        assert rows["weights in memory"] == f"{said} MXFP4"


def test_info_without_a_model_shows_the_backends_here_and_on_gpus() -> None:
    result = raydix("info", "--device", "cpu")
    assert result.returncode == 0, result.stderr
    for part in ("attention here", "native kernels", "attention on GPUs", "'raydix[flashinfer]'", "not native:"):
        assert part in result.stdout


def test_info_shows_the_layers_the_weights_and_the_kv_of_each_stage() -> None:
    facts = planned_model("Llama-3.1-70B-Instruct").facts
    config = EngineConfig(model="m", dtype="bfloat16", pipeline_parallel_size=2)
    table = describe("m", demo_model_path(), facts, config, Machine("cpu", 1 << 40))
    said = dict(zip(*(map(str, column.cells) for column in table.columns), strict=True))
    # A layer has 855,654,400 weights; the two tables 1,050,673,152 each, of which a step reads one.
    assert said["  stage 0"] == (
        f"layers 0 to 38: {2 * (39 * 855_654_400 + 2 * 1_050_673_152 + 8192) / 2**30:.1f} GiB of weights with the "
        f"embedding and the output head, {39 * 4096:,} bytes of KV per token"
    )
    assert said["  stage 1"] == (
        f"layers 39 to 79: {2 * (41 * 855_654_400 + 8192) / 2**30:.1f} GiB of weights, {41 * 4096:,} bytes of KV "
        "per token"
    )
    assert "raydix plan m --pipeline-parallel 2" in said["KV pages"] and "KV pages here" not in said


def test_info_shows_what_a_rank_keeps_of_divided_kv() -> None:
    facts = planned_model("Qwen3-30B-A3B").facts
    config = EngineConfig(model="m", dtype="bfloat16", tensor_parallel_size=8, context_parallel_size=2)
    table = describe("m", demo_model_path(), facts, config, Machine("cpu", 1 << 40))
    said = dict(zip(*(map(str, column.cells) for column in table.columns), strict=True))
    # 48 layers with keys and values of 128 numbers in one head: 24,576 bytes, of which a rank keeps half.
    assert said["  in parts"] == (
        "2, on ranks with the same key-value head. With tensor_parallel_size 8 (or 16, 32), a rank has 1 of 4 "
        "heads and keeps 16 tokens of each page: on average 12,288 bytes per token instead of 24,576"
    )
    assert said["KV per page"] == "3.0 MiB (32 tokens)"
    assert said["KV pages"] == "on 8 devices or more: see raydix plan m --context-parallel 2"
    both = replace(config, pipeline_parallel_size=3)
    table = describe("m", demo_model_path(), facts, both, Machine("cpu", 1 << 40))
    said = dict(zip(*(map(str, column.cells) for column in table.columns), strict=True))
    assert said["KV pages"].startswith("on 24 devices")
    assert said["KV pages"].endswith("raydix plan m --pipeline-parallel 3 --context-parallel 2")


def test_info_chooses_the_fewest_ranks_that_divide_the_kv(capsys: pytest.CaptureFixture[str]) -> None:
    info.run("demo", page_size=16, dtype="auto", device="cpu", context_parallel=2)
    assert "With tensor_parallel_size 4, a rank has 1 of 2 heads" in " ".join(
        capsys.readouterr().out.replace("│", " ").split()
    )


def test_info_shows_the_state_of_a_stage_s_recurrent_layers() -> None:
    facts = ModelConfig.from_json(PUBLISHED["Qwen/Qwen3-Next-80B-A3B-Instruct"], {}, "next")
    config = EngineConfig(model="m", pipeline_parallel_size=4)
    table = describe("m", demo_model_path(), facts, config, Machine("cuda", 1 << 40))
    said = dict(zip(*(map(str, column.cells) for column in table.columns), strict=True))
    assert all(said[f"  stage {number}"].endswith("MiB for each state") for number in range(4))


def test_info_shows_the_tasks_of_an_encoder(tmp_path: Path) -> None:
    for has_head, said in ((False, "embed: the mean of"), (True, "rerank: a score of the first token's")):
        save_encoder("xlm_roberta", tmp_path / said, "mean_tokens", head=has_head)
        columns = describe_encoder("m", demo_model_path(), EncoderConfig.from_directory(tmp_path / said)).columns
        rows = dict(zip(*(map(str, column.cells) for column in columns), strict=True))
        assert rows["served to"].startswith(said)
        assert rows["longest prompt"] == "128 tokens"


def test_info_counts_the_pages_an_engine_would_get() -> None:
    facts = ModelConfig.from_directory(demo_model_path())
    config = EngineConfig(model="demo", page_size=16)
    page = facts.kv_bytes_per_token(4) * 16
    weights = facts.num_parameters * 4
    for pages in (10, 1000):
        machine = Machine("cpu", weights + page * pages * 4)  # a quarter of what the weights leave is for KV
        assert _pages_here(facts, config, machine).startswith(f"{pages:,} ({pages * 16:,} tokens")
    assert "no memory for KV pages" in _pages_here(facts, config, Machine("cpu", weights))


def _pages_here(facts: ModelConfig, config: EngineConfig, machine: Machine) -> str:
    table = describe("demo", demo_model_path(), facts, config, machine)
    return str(dict(zip(*(column.cells for column in table.columns), strict=True))["KV pages here"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("info", "/no/such/model"), "there is no directory /no/such/model"),
        (("info", "demo", "--pipeline-parallel", "7"), "(Qwen3ForCausalLM) can be divided into at most 6 stages"),
        (("info", "--pipeline-parallel", "2"), "divides a model's layers: name the model"),
        (("info", "demo", "--context-parallel", "4"), "context_parallel_size is 4, but the number of ranks"),
        (("info", "--context-parallel", "2"), "divides a model's KV: name the model"),
        (("generate", "/no/such/model", "hello"), "there is no directory /no/such/model"),
        (("generate", "demo", ""), "the prompt is empty"),
        (("serve", "/no/such.yaml"), "cannot read /no/such.yaml"),
    ],
)
def test_a_mistake_is_one_line_on_stderr(arguments: tuple[str, ...], message: str) -> None:
    result = raydix(*arguments)
    assert result.returncode in (1, 2) and result.stdout == ""
    [line] = result.stderr.strip().splitlines()
    assert line.startswith("raydix: ") and message in line


def test_an_unsupported_model_gives_an_error_that_names_it(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["SomethingElse"], "model_type": "else"}')
    result = raydix("info", str(tmp_path))
    assert result.returncode == 1 and "SomethingElse" in result.stderr and "Traceback" not in result.stderr


def test_wrong_usage_exits_with_2() -> None:
    assert raydix("info", "demo", "--page-size", "0").returncode == 2
    assert raydix("no-such-command").returncode == 2


def test_generate_answers_and_prints_only_the_answer() -> None:
    """In a process of its own, as a user starts it."""
    command = [sys.executable, "-m", "deployments.cli", "generate", "demo", "-", "--chat", "--max-tokens", "12"]
    asked = "What does itertools.chain do?"
    result = subprocess.run(command, input=asked, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    assert len(result.stdout.split()) > 3 and "prompt tokens" not in result.stdout
    assert "12 generated" in result.stderr and "ended by length" in result.stderr


def test_hash_key_makes_or_hashes_a_key_and_refuses_one_that_no_header_could_carry() -> None:
    made = raydix("hash-key").stdout.split()
    assert made[0::2] == ["key", "hash"]
    assert raydix("hash-key", "--stdin", stdin=made[1] + "\n").stdout.strip() == made[3]
    for bad in ("", "short", "with spaces in between", "\u00e9" * 20):
        refused = raydix("hash-key", "--stdin", stdin=bad)
        assert refused.returncode == 1 and refused.stdout == "" and "a key h" in refused.stderr
