"""`raydix plan`: tables, JSON and a deployments.yaml, without a network."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from ray.serve.schema import ServeDeploySchema
from rich.console import Console
from typer.testing import CliRunner

from deployments.cli import plan_view
from deployments.cli.app import app
from deployments.cli.errors import UserError
from deployments.config.args import AppArgs
from deployments.simulator.planning import report
from deployments.simulator.planning.known import PlannedModel, gpu_named, gpus, planned_model
from deployments.simulator.planning.load import RequestShape
from deployments.simulator.planning.replica import ReplicaPlan
from engine.model_config.config import ELEMENT_BYTES, ModelConfig
from engine.model_files.model_directory import demo_model_path
from engine.settings.config import EngineConfig
from tests.engine.support.published_models import PUBLISHED

RUNNER = CliRunner()


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.snapshot_download", _no_network)


def _no_network(*_: object, **__: object) -> str:
    raise ConnectionError("there is no network")


def plan(*arguments: object) -> str:
    result = RUNNER.invoke(app, ["plan", *map(str, arguments)], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def args_of(text: str) -> dict[str, Any]:
    config = yaml.safe_load(text)
    ServeDeploySchema.model_validate(config)
    [application] = config["applications"]
    args: dict[str, Any] = application["args"]
    AppArgs.model_validate(args)
    return args


def test_a_known_model_is_planned_without_a_network() -> None:
    document = json.loads(plan("meta-llama/Llama-3.1-8B-Instruct", "--gpu", "h100", "--json"))
    assert document["model"]["parameters"] == 8_030_261_248
    assert document["model"]["weight_bytes"] == {
        "float32": 32_121_044_992, "bfloat16": 16_060_522_496, "float16": 16_060_522_496,
        # 32 layers of 218,103,808 weights in matrices with 43,008 outputs; int8 the head of 128,256 x 4096 too
        "fp8": 16_060_522_496 - 32 * (218_103_808 - 4 * 43_008),
        "int8": 16_060_522_496 - 32 * (218_103_808 - 4 * 43_008) - 128_256 * (4096 - 4),
    }  # fmt: skip
    anywhere = ["bfloat16", "float16", "float32", "fp8", "int4"]
    runs = {"cuda": [*anywhere, "mxfp4"], "cpu": [*anywhere, "int8"]}
    assert document["model"]["weight_types_run"] == runs
    replica = document["replica"]
    assert (replica["kv_bytes_per_token"], replica["kv_bytes_per_token_per_layer"]) == (131_072, 4096)
    assert (replica["kv_pages"], replica["kv_tokens"]) == (28_635, 458_160)
    assert (document["replicas"], document["gpus"], document["warnings"]) == (1, 1, [])
    assert "demand" not in document


def test_a_load_gives_the_replicas() -> None:
    load = ("--requests-per-s", 40, "--prompt-tokens", 2000, "--output-tokens", 300)
    cold = json.loads(plan("Llama-3.1-8B", *load, "--json"))
    warm = json.loads(plan("Llama-3.1-8B", *load, "--hit-rate", 0.8, "--json"))
    assert cold["replicas"] > warm["replicas"] > 1
    assert 0 < warm["demand"]["each"]["busy_share"] <= 0.85
    assert warm["demand"]["targets"]["ttft_target_s"] == 1.0


def test_serve_accepts_the_yaml(tmp_path: Path) -> None:
    path = tmp_path / "my.yaml"
    output = plan("llama-3.1-8b", "--count", 3, "--max-model-len", 32768, "--yaml", path)
    assert "3 replicas, 3 GPUs" in output
    args = args_of(path.read_text())
    assert args["engine"]["model"] == "meta-llama/Llama-3.1-8B"
    assert args["engine"]["max_model_len"] == 32768
    assert args["engines"] == {"count": 3}
    assert "WARNING" not in path.read_text()


def test_a_model_too_large_for_one_gpu_is_shared_by_two() -> None:
    text = plan("Qwen/Qwen3-32B", "--gpu", "h100", "--yaml", "-")
    args = args_of(text)
    assert args["engine"]["tensor_parallel_size"] == 2
    assert AppArgs.model_validate(args).served["EngineReplica"].gpus_per_engine == 2
    assert "WARNING" not in text
    assert "tensor_parallel_size" not in args_of(plan("Qwen/Qwen3-32B", "--gpu", "h200", "--yaml", "-"))["engine"]


def test_a_model_too_large_for_one_host_is_planned_in_stages_on_several() -> None:
    large = ("Llama-3.1-70B-Instruct", "--gpu", "l4", "--count", 2)
    document = json.loads(plan(*large, "--json"))
    replica = document["replica"]
    assert [replica[name] for name in ("tensor_parallel_size", "pipeline_parallel_size", "hosts")] == [2, 5, 2]
    assert (document["replicas"], document["gpus"]) == (2, 20)
    assert [stage["layers"] for stage in replica["stages"]][::4] == [[0, 14], [63, 79]]
    assert replica["kv_pages"] == min(stage["kv_pages"] for stage in replica["stages"])
    assert replica["weight_bytes_per_gpu"] == max(stage["weight_bytes_per_gpu"] for stage in replica["stages"])
    assert replica["pipeline"]["burst_bubble"] == 4 / 5
    assert any("No pipeline has run on GPUs yet" in warning for warning in document["warnings"])
    text = plan(*large, "--yaml", "-")
    engine = args_of(text)["engine"]
    assert (engine["tensor_parallel_size"], engine["pipeline_parallel_size"]) == (2, 5)
    assert AppArgs.model_validate(args_of(text)).served["EngineReplica"].gpus_per_engine == 10
    assert "# WARNING: No pipeline has run on GPUs yet" in text


def test_stages_and_micro_batches_that_are_asked_for_are_planned_and_written() -> None:
    asked = ("Llama-3.1-8B", "--pipeline-parallel", 2, "--micro-batches", 3)
    document = json.loads(plan(*asked, "--json"))
    assert (document["gpus"], document["replica"]["hosts"]) == (2, 1)
    assert document["replica"]["pipeline"]["micro_batches"] == 3
    engine = args_of(plan(*asked, "--yaml", "-"))["engine"]
    assert (engine["pipeline_parallel_size"], engine["micro_batches"]) == (2, 3)
    apart = plan(*asked, "--gpus-per-host", 1, "--tensor-parallel", 1)
    assert "A replica on 2 x H100 SXM 80 GB: 2 stages of 1, on 2 hosts" in apart
    one_stage = json.loads(plan("Llama-3.1-8B", "--json"))["replica"]
    assert one_stage["pipeline"] is None and len(one_stage["stages"]) == 1


def test_a_link_that_is_the_limit_is_warned_of() -> None:
    slow = json.loads(plan("Llama-3.1-8B", "--pipeline-parallel", 2, "--link-gb-s", 0.1, "--json"))
    fast = json.loads(plan("Llama-3.1-8B", "--pipeline-parallel", 2, "--json"))
    assert any("The link between stages limits prefill, which would take" in each for each in slow["warnings"])
    assert not any("link" in warning for warning in fast["warnings"])
    assert slow["replica"]["prefill_tokens_per_s"] == pytest.approx(0.1e9 / (4096 * 2))
    assert slow["replica"]["prefill_tokens_per_s"] < fast["replica"]["prefill_tokens_per_s"]


def test_kv_in_parts_is_planned_and_written(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = ("Qwen3-30B-A3B", "--context-parallel", 2, "--prompt-tokens", 30_000)
    replica = json.loads(plan(*asked, "--json"))["replica"]
    whole = json.loads(plan("Qwen3-30B-A3B", "--tensor-parallel", 8, "--json"))["replica"]
    assert [replica[name] for name in ("tensor_parallel_size", "context_parallel_size")] == [8, 2]
    assert (replica["kv_tokens"], replica["page_size_tokens"]) == (2 * whole["kv_tokens"], 32)
    assert replica["kv_tokens"] == replica["kv_pages"] * replica["page_size_tokens"]
    assert replica["context"]["parts"] == 2 and whole["context"] is None
    text = plan(*asked, "--yaml", "-")
    engine = args_of(text)["engine"]
    assert (engine["tensor_parallel_size"], engine["context_parallel_size"], engine["page_size"]) == (8, 2, 16)
    assert "# WARNING: KV in parts has not run on several GPUs yet" in text
    monkeypatch.setenv("COLUMNS", "160")
    slow = plan(*asked, "--peer-gb-s", 0.5)
    rows = {cells[1].strip(): cells for line in slow.splitlines() if len(cells := line.split("│")) > 2}
    assert "of 32 tokens" in rows["KV pages"][3] and rows["KV in parts"][2].strip() == "2"
    assert "of the 0.5 GB/s of --peer-gb-s: queries and partial results" in rows["exchange, decode"][3]
    assert "earlier KV, while attention computes" in rows["exchange, prefill"][3]
    few = plan(*asked, "--hit-rate", 0.99)
    assert "earlier KV" not in few and few.count("queries and partial results") == 2


def test_a_directory_and_a_config_file_need_no_network_either(tmp_path: Path) -> None:
    by_name = json.loads(plan("demo", "--gpu", "l4", "--json"))
    by_path = json.loads(plan(demo_model_path(), "--gpu", "l4", "--json"))
    assert by_name["model"]["parameters"] == by_path["model"]["parameters"] > 1e6
    config = tmp_path / "some.json"
    config.write_text((demo_model_path() / "config.json").read_text())
    by_config = json.loads(plan("my/model", "--config", config, "--gpu", "l4", "--json"))
    assert by_config["model"]["parameters"] == by_name["model"]["parameters"]
    assert by_config["model"]["name"] == "my/model"


def test_pages_too_few_for_the_longest_request_are_warned_of() -> None:
    document = json.loads(plan("Llama-3.1-8B", "--gpu", "l4", "--json"))
    [warning] = document["warnings"]
    assert (
        "A request may have 131,072 tokens" in warning and f"{document['replica']['kv_tokens']:,} fit" in warning
    )


def shown(model: PlannedModel, replica: ReplicaPlan, width: int) -> str:
    console = Console(width=width, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    plan_view.show(report.CapacityPlan(model, replica, 2, RequestShape()), console)
    return console.export_text()


@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize("width", [80, 120])
def test_the_tables_keep_to_the_terminal(width: int, stages: int) -> None:
    model = planned_model("Qwen3-32B")
    engine = EngineConfig(kv_memory_share=0.9, pipeline_parallel_size=stages)
    text = shown(model, ReplicaPlan(model.facts, gpu_named("h100"), 2, engine), width)
    assert max(map(len, text.splitlines())) <= width
    assert "estimates" in text and "65,524,246,528" not in text and "61.0 GiB" in text
    assert ("bubble of a burst" in text) == ("Each GPU of a stage" in text) == (stages > 1)
    mixture = planned_model("Qwen3-30B-A3B")
    halves = replace(engine, tensor_parallel_size=8, context_parallel_size=2)
    parts = shown(mixture, ReplicaPlan(mixture.facts, gpu_named("h100"), 8, halves), width)
    assert max(map(len, parts.splitlines())) <= width and "KV in parts" in parts


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["some/model"],
            r"cannot plan for some/model: it is not a directory here, .*Qwen/Qwen3-32B.*--config",
        ),
        (["no-such-model"], "there is no directory no-such-model"),
        (["demo", "--gpu", "h999"], "unknown GPU 'h999'; choose one of h100"),
        (["demo", "--count", "2", "--requests-per-s", "3"], "cannot be combined"),
        (["demo", "--requests-per-s", "-3"], "requests per second must be above 0"),
        (["demo", "--tensor-parallel", "7"], "tensor_parallel_size is 7, .* it can be 1, 2, 4"),
        (["demo", "--tensor-parallel", "16"], "tensor_parallel_size is 16"),
        (["demo", "--pipeline-parallel", "7"], "the 6 layers of this model .* into at most 6 stages"),
        (["demo", "--pipeline-parallel", "65"], r"pipeline_parallel_size must be in \[1, 64\], got 65"),
        (
            ["demo", "--context-parallel", "4"],
            r"context_parallel_size is 4, but .* is 2 \(.* is 4, and the model has 2\); it can be 1, 2",
        ),
        (["demo", "--context-parallel", "3", "--tensor-parallel", "4"], "does not divide tensor_parallel_size 4:"),
        (["demo", "--context-parallel", "65"], "context_parallel_size must be in"),
        (
            ["Qwen3-30B-A3B", "--context-parallel", "2", "--gpus-per-host", "4"],
            "for which 8 GPUs or more share each layer .* a host has 4; .*--gpus-per-host",
        ),
        (["demo", "--micro-batches", "2"], "micro_batches is 2, but pipeline_parallel_size is 1"),
        (
            ["demo", "--pipeline-parallel", "3", "--tensor-parallel", "4", "--hosts", "1"],
            r"3 stages of 4 GPUs take 2 hosts of 8 GPUs, but there may be 1 \(--hosts\)",
        ),
        (["demo", "--max-running", "100000"], "max_step_tokens must be at least max_running"),
        (["demo", "--kv-memory-share", "0"], r"kv_memory_share must be in \(0, 1\]"),
        (["demo", "--config", "/no/such.json"], "no file /no/such.json"),
        (["demo", "--yaml", "/no/such/dir/x.yaml"], "--yaml /no/such/dir/x.yaml"),
    ],
)
def test_mistakes_are_reported(arguments: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        RUNNER.invoke(app, ["plan", *arguments], catch_exceptions=False)


def test_help_names_all_gpus() -> None:
    text = " ".join(RUNNER.invoke(app, ["plan", "--help"], env={"COLUMNS": "200"}).output.split())
    assert ", ".join(list(gpus())[:-1]) + f" or {list(gpus())[-1]}." in text


def test_latent_kv_is_one_key_for_all_heads(tmp_path: Path) -> None:
    small = {**PUBLISHED["deepseek-ai/DeepSeek-V3-0324"], "num_hidden_layers": 16, "dtype": "bfloat16"}
    (tmp_path / "config.json").write_text(json.dumps(small))
    found = json.loads(plan(tmp_path, "--gpu", "h200", "--json"))["replica"]
    each = 16 * (512 + 64) * 2  # bytes; every GPU has all of it
    assert found["tensor_parallel_size"] == 4 and found["kv_bytes_per_token"] == 4 * each


def test_other_experts_of_deepseek_and_unknown_quantization_are_refused(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps({**PUBLISHED["deepseek-ai/DeepSeek-V3-0324"], "scoring_func": "softmax"}))
    with pytest.raises(UserError, match=r"scoring_func is 'softmax', which is not supported: expected 'sigmoid'"):
        RUNNER.invoke(app, ["plan", str(tmp_path)], catch_exceptions=False)
    raw = json.loads((demo_model_path() / "config.json").read_text())
    config.write_text(json.dumps({**raw, "quantization_config": {"quant_method": "bitsandbytes"}}))
    with pytest.raises(UserError, match=r"quantized weights \(bitsandbytes\) are not supported"):
        RUNNER.invoke(app, ["plan", str(tmp_path)], catch_exceptions=False)


def test_there_is_nothing_to_plan_for_encoders(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"architectures": ["XLMRobertaModel"], "model_type": "xlm-roberta"}))
    for arguments in (["bge", "--config", str(config)], ["bge", "--config", str(tmp_path)], [str(tmp_path)]):
        with pytest.raises(UserError, match=r"XLMRobertaModel is an encoder, which keeps no KV"):
            RUNNER.invoke(app, ["plan", *arguments], catch_exceptions=False)


def test_quantization_leaves_more_room_for_kv() -> None:
    plain = json.loads(plan("Llama-3.1-8B", "--json"))
    rounded = json.loads(plan("Llama-3.1-8B", "--quantization", "fp8", "--json"))
    saved = 16_060_522_496 - plain["model"]["weight_bytes"]["fp8"]
    assert rounded["replica"]["weight_bytes_per_gpu"] == 16_060_522_496 - saved
    assert rounded["replica"]["free_bytes_per_gpu"] == plain["replica"]["free_bytes_per_gpu"] + saved
    assert args_of(plan("Llama-3.1-8B", "--quantization", "fp8", "--yaml", "-"))["engine"]["quantization"] == "fp8"


def test_a_quantized_checkpoint_is_planned_as_it_is(tmp_path: Path) -> None:
    raw = json.loads((demo_model_path() / "config.json").read_text())
    stored = {"quant_method": "awq", "bits": 4, "group_size": 64, "zero_point": True, "version": "gemm"}
    (tmp_path / "config.json").write_text(json.dumps({**raw, "quantization_config": stored}))
    weights = json.loads(plan(tmp_path, "--json"))["model"]["weight_bytes"]
    facts = ModelConfig.from_directory(tmp_path)
    assert weights == {"int4": facts.weight_bytes(ELEMENT_BYTES[facts.dtype])}
    assert weights["int4"] < facts.num_parameters * 2


def test_gpt_oss_is_planned_with_the_bytes_of_its_files() -> None:
    """13.76 and 65.25e9 bytes of tensors, by the indices of their files; one H100 holds the larger model."""
    small, large = (
        json.loads(plan(f"gpt-oss-{size}", "--tensor-parallel", 1, "--json")) for size in ("20b", "120b")
    )
    assert small["model"]["weight_bytes"] == {"mxfp4": 13_761_264_768}
    assert large["model"]["weight_bytes"] == {"mxfp4": 65_248_815_744}
    assert large["gpus"] == 1 and large["replica"]["kv_tokens"] > 131_072, "a request of the longest context"
    with pytest.raises(UserError, match="90 groups of 32 inner columns of an expert evenly"):
        plan("gpt-oss-120b", "--tensor-parallel", 4)


def test_an_empty_or_missing_config_is_reported(tmp_path: Path) -> None:
    (tmp_path / "empty.json").touch()
    with pytest.raises(UserError, match=r"empty\.json is not readable JSON: it is empty"):
        plan("Llama-3.1-8B", "--config", tmp_path / "empty.json")
    with pytest.raises(UserError, match=r"no file .*nope\.json: --config takes a model's config\.json"):
        plan("Llama-3.1-8B", "--config", tmp_path / "nope.json")


def test_the_plan_shows_where_eight_bits_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    rows = {
        cells[1].strip(): line for line in plan("Llama-3.1-8B").splitlines() if len(cells := line.split("│")) > 2
    }
    assert "on CPUs only, by engine.quantization: int8" in rows["weights, int8"]
    assert "layers' matrices and their scales" in rows["weights, fp8"]


def test_weights_that_no_engine_would_round_are_not_planned_as_rounded(tmp_path: Path) -> None:
    """Weights of eight bits are widened when they are loaded, and only a CPU rounds them again."""
    raw = json.loads((demo_model_path() / "config.json").read_text())
    weights = {"type": "int", "num_bits": 8, "strategy": "channel", "symmetric": True}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    stored = {"quant_method": "compressed-tensors", "format": "int-quantized", "config_groups": groups}
    (tmp_path / "config.json").write_text(json.dumps({**raw, "quantization_config": stored}))
    types = json.loads(plan(tmp_path, "--json"))["model"]["weight_bytes"]
    assert list(types) == ["float32", "bfloat16", "float16", "int8"]
    with pytest.raises(UserError, match="quantization is 'fp8', but the model's weights are quantized already"):
        plan(tmp_path, "--quantization", "fp8")
