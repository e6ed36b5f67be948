"""Checkpoints that are quantized already: the models they stand for, and the errors for broken ones."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from cache import Namespace
from engine.base.errors import ModelLoadError
from engine.layers.linear import Fp8BlockLinear, Fp8Linear
from engine.loading.load_model import load_model
from engine.loading.weights import load_decoder
from engine.model_config.config import ModelConfig
from engine.parallel.collective import ALONE, Collective
from engine.parallel.shard import Shard
from engine.settings.config import EngineConfig
from engine.values.plan import Chunk, StepPlan
from engine.values.request import Request
from engine.values.sampling_params import SamplingParams
from tests.engine.support.checkpoints import (
    AWQ,
    FP8_BLOCKS,
    FP8_OF_TRANSFORMERS,
    INT8,
    Checkpoint,
    awq,
    configure,
    fp8_blocks,
    fp8_channels,
    fp8_config,
    fp8_of_transformers,
    fp8_tensor,
    gptq,
    gptq_config,
    int8_channels,
    integers_config,
    make,
    nvfp4,
    nvfp4_config,
    packed,
    rewrite,
)
from tests.engine.support.oracle import oracle_greedy, oracle_logits, oracle_model, random_ids, save_tiny
from tests.engine.support.quantized_decoders import layers, load, memory, rounded
from tests.engine.support.whole_engines import GREEDY, engine_for, run_prompts, tokens_of

CPU = torch.device("cpu")
FIRST = "model.layers.0.self_attn.q_proj"

BLOCKS_OF_128: tuple[Any, dict[str, Any]] = (
    partial(fp8_blocks, size=128),
    {**FP8_BLOCKS, "weight_block_size": [128, 128]},
)
WHOLE_BLOCKS: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 320,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
}
"""Of the inputs of all matrices but the last, whose 320 inputs end within a block."""
MAKERS: dict[str, Callable[[Path], Checkpoint]] = {
    "fp8 by outputs": lambda path: make(path, fp8_channels, fp8_config()),
    "fp8 with biases": lambda path: make(path, fp8_channels, fp8_config(), family="llama_biased"),
    "fp8 with one scale": lambda path: make(path, fp8_tensor, fp8_config("tensor"), family="llama3.1"),
    "fp8 with one scale, by transformers": lambda path: make(path, fp8_of_transformers, FP8_OF_TRANSFORMERS),
    "fp8 in blocks": lambda path: make(path, fp8_blocks, FP8_BLOCKS),
    "fp8 in blocks of 128": lambda path: make(path, *BLOCKS_OF_128, **WHOLE_BLOCKS),
    "gptq 1": lambda path: make(path, gptq(True, 1), gptq_config()),
    "gptq 2": lambda path: make(path, gptq(True, 0), gptq_config(checkpoint_format="gptq_v2"), family="qwen2"),
    "gptq 2 that says 1": lambda path: make(path, gptq(True, 0), gptq_config()),
    "gptq, asymmetric": lambda path: make(path, gptq(False, 1), gptq_config(sym=False), family="llama_tied"),
    "gptq 2, asymmetric": lambda path: make(
        path, gptq(False, 0), gptq_config(sym=False, checkpoint_format="gptq_v2")
    ),
    "awq": lambda path: make(path, awq, AWQ, family="qwen2"),
    "awq, biased": lambda path: make(path, awq, AWQ, family="llama_biased"),
    "packed": lambda path: make(path, packed(True), integers_config()),
    "packed, asymmetric": lambda path: make(path, packed(False), integers_config(symmetric=False), "llama_biased"),
}


@pytest.mark.parametrize("name", MAKERS)
def test_layers_hold_the_numbers_that_the_checkpoint_stands_for(name: str, tmp_path: Path) -> None:
    made = MAKERS[name](tmp_path)
    plain, found = load(made.plain), layers(load(made.quantized))
    assert len(found) == 4 * 3
    for layer, module in found.items():
        expected = plain.get_parameter(f"{layer}.weight")
        if name == "fp8 in blocks" or (
            isinstance(module, Fp8Linear) and name.endswith("of 128")
        ):  # rounded once more: to 1/16 of a number, or of the smallest of its row
            assert torch.allclose(
                module.dequantized(), expected, rtol=2**-4, atol=float(expected.abs().max()) / 2**14
            )
        else:
            assert torch.allclose(module.dequantized(), expected, rtol=1e-6)


@pytest.mark.parametrize("name", ["gptq 1", "gptq, asymmetric", "awq", "awq, biased", "packed, asymmetric"])
def test_the_engine_generates_the_same_as_the_model_of_plain_weights(name: str, tmp_path: Path) -> None:
    made = MAKERS[name](tmp_path)
    prompts = [random_ids(1, 5), random_ids(2, 40)]
    events = run_prompts(engine_for(made.quantized, 16, 1024), prompts)
    expected = [oracle_greedy(made.plain, prompt, GREEDY.max_tokens) for prompt in prompts]
    assert [tokens_of(each) for each in events] == expected


@pytest.mark.parametrize(
    "name", ["fp8 by outputs", "fp8 with biases", "fp8 with one scale", "fp8 in blocks", "fp8 in blocks of 128"]
)
def test_fp8_models_are_plain_ones_with_rounded_activations(name: str, tmp_path: Path) -> None:
    """Compare with transformers whose layers' inputs are rounded. A number between two that fp8
    knows may be rounded either way: that is a sixteenth of it, of few."""
    made = MAKERS[name](tmp_path)
    prompt = random_ids(3, 30)
    plain = oracle_logits(made.plain, prompt)[-1]
    model = oracle_model(made.plain)
    for layer, module in model.named_modules():
        if layer.endswith("_proj"):
            each = 128 if name.endswith("of 128") and module.in_features % 128 == 0 else None
            module.register_forward_pre_hook(lambda _, inputs, each=each: (rounded(inputs[0], each),))
            if each is None and name.endswith("of 128"):
                module.weight.data = rounded(module.weight.data)
            if name == "fp8 in blocks":
                module.weight.data = rounded(module.weight.data)
    expected = oracle_logits(made.plain, prompt)[-1]
    found = engine_logits(made.quantized, prompt)
    error = (found - expected).norm() / expected.norm()
    assert error < 0.03 < (plain - expected).norm() / expected.norm()


def engine_logits(directory: Path, prompt: list[int], **settings: Any) -> torch.Tensor:
    """Return the engine's logits after the prompt."""
    config = EngineConfig(model=str(directory), device="cpu", kv_pages=8, threads=1, **settings)
    runner = load_model(config)
    request = Request.make("r", prompt, SamplingParams(), arrival=0.0, seed=0, namespace=Namespace("m"))
    return runner.logits(StepPlan((Chunk(request, 0, len(prompt), prompt, range(8), samples=True),)))[0]


def test_layers_that_the_checkpoint_did_not_quantize_stay_plain(tmp_path: Path) -> None:
    def most(name: str, matrix: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        if ".1.mlp.down_proj" in name or ".2." in name:
            return {f"{name}.weight": matrix}, matrix
        return fp8_channels(name, matrix)

    ignored = ["lm_head", "model.layers.1.mlp.down_proj", r"re:.*\.2\..*_proj"]
    made = make(tmp_path, most, fp8_config(ignore=ignored))
    decoder, plain = load(made.quantized), load(made.plain)
    assert len(layers(decoder)) == 4 + 3
    down = "layers.1.mlp.down_proj.weight"
    assert torch.equal(decoder.get_parameter(down), plain.get_parameter(down))


SHARED: dict[str, Callable[[Path], Checkpoint]] = {
    "fp8": lambda path: make(path, fp8_channels, fp8_config(), "llama_biased", intermediate_size=128),
    "fp8 with one scale": lambda path: make(path, fp8_tensor, fp8_config("tensor"), intermediate_size=128),
    "gptq": lambda path: make(path, gptq(False, 1), gptq_config(sym=False), intermediate_size=128),
    "awq": lambda path: make(path, awq, AWQ, "mqa", intermediate_size=128),
}


@pytest.mark.parametrize("name", SHARED)
def test_each_rank_has_its_part(name: str, tmp_path: Path) -> None:
    made = SHARED[name](tmp_path)
    config = ModelConfig.from_directory(made.quantized)
    plain_config = ModelConfig.from_directory(made.plain)
    for rank in (0, 1):
        ranks = Collective(Shard(rank, 2))
        plain = load_decoder(made.plain, plain_config, torch.float32, CPU, ranks=ranks)
        found = layers(load_decoder(made.quantized, config, torch.float32, CPU, ranks=ranks))
        assert len(found) == 4 * 3
        for layer, module in found.items():
            assert torch.allclose(module.dequantized(), plain.get_parameter(f"{layer}.weight"), rtol=1e-6)


def test_blocks_that_are_whole_keep_their_scales(tmp_path: Path) -> None:
    found = layers(load(MAKERS["fp8 in blocks of 128"](tmp_path).quantized))
    assert {name.rpartition(".")[2] for name, layer in found.items() if isinstance(layer, Fp8BlockLinear)} == {
        "qkv_proj",
        "o_proj",
        "gate_up_proj",
    }
    assert all(isinstance(layer, Fp8Linear) for name, layer in found.items() if name.endswith("down_proj"))


def test_ranks_have_their_parts_of_blocks_or_round_them_again(tmp_path: Path) -> None:
    """Of two ranks each has 64 inputs of the output projection, half a block, and two blocks of the MLP's."""
    made = make(tmp_path, *BLOCKS_OF_128, **{**WHOLE_BLOCKS, "intermediate_size": 512})
    config, plain_config = (ModelConfig.from_directory(path) for path in (made.quantized, made.plain))
    for rank in (0, 1):
        ranks = Collective(Shard(rank, 2))
        plain = load_decoder(made.plain, plain_config, torch.float32, CPU, ranks=ranks)
        found = layers(load_decoder(made.quantized, config, torch.float32, CPU, ranks=ranks))
        for layer, module in found.items():
            expected = plain.get_parameter(f"{layer}.weight")
            is_whole = not layer.endswith("o_proj")
            assert isinstance(module, Fp8BlockLinear if is_whole else Fp8Linear), layer
            tolerance = 1e-6 if is_whole else 2**-4
            assert torch.allclose(module.dequantized(), expected, rtol=tolerance, atol=0 if is_whole else 1e-4)


def test_ranks_that_would_divide_a_group_are_refused(tmp_path: Path) -> None:
    made = make(tmp_path, awq, AWQ)
    with pytest.raises(ModelLoadError, match=r"down_proj has 48 inputs \(on each rank\).*groups of 32"):
        load_decoder(
            made.quantized,
            ModelConfig.from_directory(made.quantized),
            torch.float32,
            CPU,
            ranks=Collective(Shard(0, 2)),
        )


def test_a_plain_model_is_rounded_as_it_is_loaded(tmp_path: Path) -> None:
    model = save_tiny("qwen3", tmp_path)
    config = ModelConfig.from_directory(model)
    plain = load_decoder(model, config, torch.float32, CPU)
    rounded = load_decoder(model, config, torch.float32, CPU, fp8=True)
    found = layers(rounded)
    assert len(found) == 4 * 3
    for name, layer in found.items():
        expected = plain.get_parameter(f"{name}.weight")
        largest = expected.abs().amax(1, keepdim=True)
        assert ((layer.dequantized() - expected).abs() <= expected.abs() / 16 + largest / 448 / 2**9).all()
    assert torch.equal(rounded.embed.weight, plain.embed.weight)
    assert memory(rounded) == config.weight_bytes(4, "fp8") < config.weight_bytes(4)


@pytest.mark.parametrize("family", ["qwen3_next", "qwen3_5"])
def test_the_matrices_of_delta_nets_are_rounded_and_their_gates_are_not(family: str, tmp_path: Path) -> None:
    """On each of two ranks too, whose rows are in an order of their own."""
    model = save_tiny(family, tmp_path)
    config = ModelConfig.from_directory(model)
    for ranks in (ALONE, Collective(Shard(1, 2))):
        plain, found = (
            load_decoder(model, config, torch.float32, CPU, ranks=ranks, fp8=fp8) for fp8 in (False, True)
        )
        matrices = {name: layer for name, layer in layers(found).items() if name.endswith(("in_proj", "o_proj"))}
        assert sum(name.endswith("in_proj") for name in matrices) == config.num_recurrent_layers > 0
        for name, layer in matrices.items():
            assert torch.allclose(layer.dequantized(), rounded(plain.get_parameter(f"{name}.weight")), rtol=1e-6)
        for name, weight in plain.named_parameters():
            if name.endswith("gates_proj"):
                assert torch.equal(found.get_parameter(name), weight)
    assert memory(load_decoder(model, config, torch.float32, CPU, fp8=True)) == config.weight_bytes(4, "fp8")


def test_rounded_delta_nets_compute_the_same_as_plain_ones_with_rounded_numbers(tmp_path: Path) -> None:
    model, prompt = save_tiny("qwen3_5", tmp_path), random_ids(3, 30)
    plain = oracle_logits(model, prompt)[-1]
    for layer, module in oracle_model(model).named_modules():
        if layer.endswith(("_proj", "in_proj_qkv", "in_proj_z")):
            module.register_forward_pre_hook(lambda _, inputs: (rounded(inputs[0]),))
            module.weight.data = rounded(module.weight.data)
    expected = oracle_logits(model, prompt)[-1]
    error = (engine_logits(model, prompt, quantization="fp8") - expected).norm() / expected.norm()
    assert error < 0.03 < (plain - expected).norm() / expected.norm()


@pytest.mark.parametrize("kind", [(fp8_channels, fp8_config()), (fp8_blocks, FP8_BLOCKS), (awq, AWQ)])
def test_delta_nets_that_are_quantized_already_stay_so(kind: tuple[Any, dict[str, Any]], tmp_path: Path) -> None:
    """Their projections are one matrix in an order of our own, by which blocks are divided."""
    made = make(tmp_path, *kind, family="qwen3_5")
    plain, found = load(made.plain), layers(load(made.quantized))
    assert sum(name.endswith("in_proj") for name in found) == 3
    for name, module in found.items():
        expected = plain.get_parameter(f"{name}.weight")
        rtol, atol = (2**-4, 1e-4) if kind[0] is fp8_blocks else (1e-6, 1e-8)
        assert torch.allclose(module.dequantized(), expected, rtol, atol), name
    assert memory(load(made.quantized)) == ModelConfig.from_directory(made.quantized).weight_bytes(4)


@pytest.mark.parametrize("name", MAKERS)
def test_the_memory_is_as_predicted(name: str, tmp_path: Path) -> None:
    made = MAKERS[name](tmp_path)
    assert memory(load(made.quantized)) == ModelConfig.from_directory(made.quantized).weight_bytes(4)


def test_quantized_weights_are_not_rounded_again(tmp_path: Path) -> None:
    made = make(tmp_path, awq, AWQ)
    for quantization in ("int8", "fp8"):
        with pytest.raises(ValueError, match="quantized already"):
            engine_logits(made.quantized, [1], quantization=quantization)


# --- broken checkpoints --------------------------------------------------------------------------------------

UNSUPPORTED: dict[str, tuple[dict[str, Any], str]] = {
    "another method": ({"quant_method": "bitsandbytes"}, r"bitsandbytes.*supported are plain.*gptq and awq"),
    "no method": ({"bits": 4}, "unknown"),
    "gptq of 8 bits": (gptq_config(bits=8), "bits 8 is not supported, expected 4"),
    "gptq without bits": ({"quant_method": "gptq"}, "bits None"),
    "activation order": (gptq_config(desc_act=True), "desc_act"),
    "another gptq": (gptq_config(checkpoint_format="marlin"), "marlin"),
    "gptq by layer": (gptq_config(dynamic={"+:.*down.*": {"bits": 8}}), r"dynamic '\+:.*down.*"),
    "odd group": (gptq_config(group_size=24), "group_size 24.*multiple of 32"),
    "awq gemv": ({**AWQ, "version": "gemv"}, "version 'gemv'"),
    "awq without zero points": ({**AWQ, "zero_point": False}, "zero_point False"),
    "int8 by groups": (integers_config(8, "int-quantized"), "strategy 'group'.*tensor or channel"),
    "int8, packed": (integers_config(8, strategy="channel"), "pack-quantized"),
    "int8, asymmetric": (
        integers_config(8, "int-quantized", strategy="channel", symmetric=False),
        "symmetric False",
    ),
    "nvfp4 of larger groups": (nvfp4_config(group_size=32), "group_size 32 is not supported, expected 16"),
    "mxfp4 of compressed-tensors": (
        {**nvfp4_config(), "format": "mxfp4-pack-quantized"},
        "mxfp4-pack-quantized.*expected 'nvfp4-pack-quantized'",
    ),
    "int2": (integers_config(2), "int of 2 bits.*int of 4 bits"),
    "packed in activation order": (integers_config(actorder="group"), "actorder 'group'"),
    "packed fp8": (fp8_config(format="pack-quantized"), "pack-quantized"),
    "two groups": (fp8_config(config_groups={}), "0 groups"),
    "fp8 by token": (fp8_config("token"), "strategy 'token'"),
    "block of one number": ({**FP8_BLOCKS, "weight_block_size": [128]}, "blocks of \\[128\\]"),
    "e5m2": ({**FP8_BLOCKS, "fmt": "e5m2"}, "e5m2"),
    "sparse": (fp8_config(sparsity_config={"format": "sparse-24-bitmask"}), "sparse-24"),
}


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_a_format_that_is_not_supported_is_named(name: str, tmp_path: Path) -> None:
    config, said = UNSUPPORTED[name]
    model = save_tiny("qwen3", tmp_path, num_hidden_layers=1)
    configure(model, **config)
    with pytest.raises(ModelLoadError, match=said):
        ModelConfig.from_directory(model)


@pytest.mark.parametrize("family", ["qwen3", "mixtral", "deepseek_v3"])
def test_int8_is_widened(family: str, tmp_path: Path) -> None:
    made = make(tmp_path, int8_channels, INT8, family)
    plain, found = load(made.plain), load(made.quantized)
    assert not layers(found)
    for name, weight in found.named_parameters():
        assert torch.allclose(weight, plain.get_parameter(name), rtol=1e-6), name
    with pytest.raises(ValueError, match="quantized already"):
        engine_logits(made.quantized, [1], quantization="fp8")


@pytest.mark.parametrize("family", ["qwen3", "mixtral"])
@pytest.mark.parametrize("rounds_activations", [True, False])
def test_nvfp4_is_widened_and_activations_stay_unquantized(
    family: str, rounds_activations: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = nvfp4_config(rounds_activations=rounds_activations)
    made = make(tmp_path, nvfp4, config, family, num_hidden_layers=1)
    plain, found = load(made.plain), load(made.quantized)
    assert not layers(found)
    for name, weight in found.named_parameters():
        assert torch.allclose(weight, plain.get_parameter(name), rtol=1e-6), name
    facts = ModelConfig.from_directory(made.quantized)
    assert memory(found) == facts.weight_bytes(4) == facts.num_parameters * 4
    is_said = (
        "activations in NVFP4 (quantization_config.input_activations); here they stay in float32" in caplog.text
    )
    assert is_said == rounds_activations


def test_nvfp4_without_the_scale_of_a_matrix_is_refused(tmp_path: Path) -> None:
    made = make(tmp_path, nvfp4, nvfp4_config(), num_hidden_layers=1)
    name = "model.layers.0.mlp.up_proj.weight_global_scale"
    rewrite(made.quantized, lambda tensors: tensors.pop(name))
    with pytest.raises(ModelLoadError, match=f"lack {name}"):
        load(made.quantized)


def test_int8_is_rounded_again_for_the_native_kernels(tmp_path: Path) -> None:
    """That finds the same numbers: a scale for each output, which makes its largest number 127."""
    made = make(tmp_path, int8_channels, INT8, "qwen3")
    prompt = random_ids(3, 30)
    found, expected = (engine_logits(path, prompt, quantization="int8") for path in made)
    assert torch.allclose(found, expected, rtol=1e-4, atol=1e-4)


Change = Callable[[dict[str, torch.Tensor]], object]
BROKEN: dict[str, tuple[str, Change, str]] = {
    "no scale": (
        "fp8 by outputs",
        lambda t: t.pop(f"{FIRST}.weight_scale"),
        rf"lack {FIRST}.weight_scale.*quantization_config",
    ),
    "no zero points": ("awq", lambda t: t.pop(f"{FIRST}.qzeros"), rf"lack {FIRST}.qzeros"),
    "scales of another group size": (
        "gptq 1",
        lambda t: t.update({f"{FIRST}.scales": torch.ones(6, 384)}),
        rf"{FIRST}.scales has shape \(6, 384\), but \(3, 384\) by config.json",
    ),
    "scales of another output": (
        "fp8 by outputs",
        lambda t: t.update({f"{FIRST}.weight_scale": torch.ones(7, 1)}),
        rf"{FIRST}.weight_scale has shape \(7, 1\), but \(384,\) by config.json",
    ),
    "plain where fp8 is said": (
        "fp8 by outputs",
        lambda t: t.update({f"{FIRST}.weight": t[f"{FIRST}.weight"].float()}),
        rf"{FIRST} is not quantized, but .* as one matrix",
    ),
    "fp8 where plain is said": (
        "fp8 by outputs",
        lambda t: t.update({"lm_head.weight": t["lm_head.weight"].to(torch.float8_e4m3fn)}),
        "lm_head.weight is stored as F8_E4M3; supported are F32, BF16, F16",
    ),
    "activation order": (
        "gptq 1",
        lambda t: t.update({f"{FIRST}.g_idx": t[f"{FIRST}.g_idx"].flip(0)}),
        rf"{FIRST}.g_idx puts inputs into groups in another order.*expected input i in group i / 32",
    ),
    "a bias that config.json denies": (
        "gptq 1",
        lambda t: t.update({f"{FIRST}.bias": torch.ones(384)}),
        rf"{FIRST}.bias is not zero",
    ),
    "an unknown tensor": ("awq", lambda t: t.update({f"{FIRST}.smooth": torch.ones(1)}), "hold .*smooth"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_checkpoint_is_explained(name: str, tmp_path: Path) -> None:
    maker, change, said = BROKEN[name]
    model = MAKERS[maker](tmp_path).quantized
    rewrite(model, change)
    with pytest.raises(ModelLoadError, match=said):
        load(model)


def test_unneeded_zero_biases_are_accepted(tmp_path: Path) -> None:
    model = MAKERS["gptq 1"](tmp_path).quantized
    rewrite(model, lambda t: t.update({f"{FIRST}.bias": torch.zeros(384)}))
    load(model)


def test_groups_that_do_not_divide_the_inputs_are_named(tmp_path: Path) -> None:
    model = MAKERS["awq"](tmp_path).quantized
    configure(model, group_size=64)
    with pytest.raises(ModelLoadError, match=rf"{FIRST} has 96 inputs .*, and config.json has groups of 64"):
        load(model)


def test_half_of_a_fused_matrix_cannot_be_plain(tmp_path: Path) -> None:
    made = make(tmp_path, fp8_channels, fp8_config(ignore=["lm_head", FIRST]))
    q_proj = load_file(made.plain / "model.safetensors")[f"{FIRST}.weight"]
    rewrite(made.quantized, lambda t: (t.pop(f"{FIRST}.weight_scale"), t.update({f"{FIRST}.weight": q_proj})))
    with pytest.raises(ModelLoadError, match=rf"{FIRST} is not quantized, but .*k_proj.* as one matrix"):
        load(made.quantized)


AWQ_LISTS: dict[str, list[str] | None] = {
    "a part of a name with its dot": ["model.layers.0."],
    "the beginning of a projection's name": ["down"],
    "the class of a layer": [".linear"],
    "a projection that this file does not have": ["qkv_proj", "gate_up_proj"],
    "all layers": ["model"],
    "none": None,
}


@pytest.mark.parametrize("listed", AWQ_LISTS.values(), ids=AWQ_LISTS)
def test_tensors_decide_which_layers_are_plain_whatever_config_json_lists(
    listed: list[str] | None, tmp_path: Path
) -> None:
    """The writers of quantized checkpoints list the layers they left alone each in a way of their own."""

    def most(name: str, matrix: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        is_left = ".layers.0." in name or "down_proj" in name
        return ({f"{name}.weight": matrix}, matrix) if is_left else awq(name, matrix)

    made = make(tmp_path, most, {**AWQ, "modules_to_not_convert": listed})
    config = json.loads((made.quantized / "config.json").read_text())
    if listed is None:
        del config["quantization_config"]["modules_to_not_convert"]
        (made.quantized / "config.json").write_text(json.dumps(config))
    prompt = random_ids(3, 30)
    expected = oracle_logits(made.plain, prompt)[-1]
    assert torch.allclose(engine_logits(made.quantized, prompt), expected, atol=1e-3)


@pytest.mark.parametrize("kind", ["plain", "fp8"])
def test_scales_of_kv_are_left_out(kind: str, tmp_path: Path) -> None:
    made = make(tmp_path, fp8_channels, fp8_config())
    model = made.plain if kind == "plain" else made.quantized
    at = "model.layers.1.self_attn"
    names = [
        f"{at}.{name}" for name in ("kv_scale", "k_scale", "attn.v_scale", "k_proj.k_scale", "v_proj.output_scale")
    ]
    before = engine_logits(model, random_ids(2, 9))
    rewrite(model, lambda t: t.update({name: torch.tensor(0.5) for name in names}))
    assert torch.equal(engine_logits(model, random_ids(2, 9)), before)
