"""Loading: what is read, and the error for every kind of broken model directory."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.base.errors import ModelLoadError
from engine.kernels import native
from engine.loading.weights import load_decoder, prefers_input_major
from engine.model_config.config import ModelConfig
from engine.models.decoder import Decoder
from engine.settings.config import DType
from engine.values.plan import StepPlan
from tests.engine.support.oracle import oracle_logits, oracle_model, random_ids, save_tiny
from tests.engine.support.steps_by_hand import RequestByHand, load_runner

CPU = torch.device("cpu")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return save_tiny("qwen3", tmp_path / "model")


def load(directory: Path, dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    return load_decoder(directory, ModelConfig.from_directory(directory), dtype, CPU)


def edit(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_fused_parameters_hold_the_checkpoints_rows(model: Path) -> None:
    decoder, theirs = load(model), oracle_model(model).model.layers[1].self_attn
    attention = decoder.get_submodule("layers.1.attention")
    fused = torch.cat((theirs.q_proj.weight, theirs.k_proj.weight, theirs.v_proj.weight))
    assert torch.equal(attention.get_parameter("qkv_proj.weight"), fused)
    assert torch.equal(attention.get_parameter("qk_norm")[5], theirs.q_norm.weight)
    assert torch.equal(attention.get_parameter("qk_norm")[6], theirs.k_norm.weight)


def test_sharded_and_single_files_are_the_same_model(model: Path, tmp_path: Path) -> None:
    sharded = tmp_path / "sharded"
    oracle_model(model).save_pretrained(sharded, max_shard_size="40KB")
    assert len(list(sharded.glob("*.safetensors"))) > 2
    for a, b in zip(load(model).parameters(), load(sharded).parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe_mixed"])
def test_experts_are_stacked(family: str, tmp_path: Path) -> None:
    """Transformers has experts stacked in memory, and saves them one by one, as both families were published."""
    ours = load(save_tiny(family, tmp_path)).get_submodule("layers.1.mlp")
    theirs = oracle_model(tmp_path).model.layers[1].mlp
    assert torch.equal(ours.get_parameter("gate_up_proj"), theirs.experts.gate_up_proj)
    assert torch.equal(ours.get_parameter("down_proj"), theirs.experts.down_proj)
    assert torch.equal(ours.get_parameter("router"), theirs.gate.weight)


def test_an_expert_too_few_is_missed(tmp_path: Path) -> None:
    model = save_tiny("mixtral", tmp_path)
    edit(model / "config.json", num_local_experts=6)
    with pytest.raises(ModelLoadError, match=r"lack model.layers.0.block_sparse_moe.experts.5.w1.weight"):
        load(model)


def test_weights_are_converted_to_the_wanted_type(model: Path) -> None:
    decoder = load(model, torch.bfloat16)
    assert {parameter.dtype for parameter in decoder.parameters()} == {torch.bfloat16}
    assert not any(parameter.requires_grad for parameter in decoder.parameters())


def test_a_tied_head_and_old_rotary_buffers_are_ignored(tmp_path: Path) -> None:
    model = save_tiny("llama_tied", tmp_path)
    path = model / "model.safetensors"
    tensors = load_file(path)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
    save_file(tensors, path)
    load(model)


def test_a_head_that_differs_from_the_table_is_not_tied_to_it(tmp_path: Path) -> None:
    """Whatever config.json says, as in transformers: a model was tuned, and its head with it."""
    model = save_tiny("qwen3", tmp_path)
    expected = oracle_logits(model, random_ids(1, 20))[-1]
    edit(model / "config.json", tie_word_embeddings=True)
    runner = load_runner(model)
    row = RequestByHand(random_ids(1, 20), range(5))
    assert torch.allclose(runner.logits(StepPlan((row.chunk(),)))[0], expected, atol=1e-4)


def test_layers_that_predict_further_tokens_are_left_out_and_others_are_not(tmp_path: Path) -> None:
    model = save_tiny("glm4_moe", tmp_path)
    rewrite(model, lambda t: t.update({"model.layers.3.eh_proj.weight": torch.ones(2)}))
    load(model)
    rewrite(model, lambda t: t.update({"model.layers.2.eh_proj.weight": torch.ones(2)}))
    with pytest.raises(ModelLoadError, match=r"hold model.layers.2.eh_proj.weight, which"):
        load(model)


# --- broken directories --------------------------------------------------------------------------------------


def rewrite(model: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(model / "model.safetensors")
    change(tensors)
    save_file(tensors, model / "model.safetensors")


def shard_index(model: Path, **weight_map: str) -> None:
    write_index(model, json.dumps({"weight_map": weight_map}))


def write_index(model: Path, content: str) -> None:
    (model / "model.safetensors").unlink()
    (model / "model.safetensors.index.json").write_text(content)


def truncate(model: Path) -> None:
    path = model / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])


def renamed(model: Path, name: str) -> None:
    (model / "model.safetensors").rename(model / name)


BREAKS: dict[str, tuple[Callable[[Path], object], str]] = {
    "no config": (lambda m: (m / "config.json").unlink(), "no config.json"),
    "bad json": (lambda m: (m / "config.json").write_text("{"), "not readable JSON"),
    "json list": (lambda m: (m / "config.json").write_text("[]"), "JSON object"),
    "binary config": (lambda m: (m / "config.json").write_bytes(b"\xff\xfe\x00"), "not readable JSON"),
    "field missing": (
        lambda m: (m / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}'),
        "lacks the key 'num_attention_heads'",
    ),
    "field of wrong type": (lambda m: edit(m / "config.json", hidden_size=[48]), "wrong type"),
    "no architecture": (lambda m: edit(m / "config.json", architectures=None), "none named"),
    "other architecture": (
        lambda m: edit(m / "config.json", architectures=["GPT2LMHeadModel"]),
        "GPT2LMHeadModel.*GraniteForCausalLM, LlamaForCausalLM, .*Qwen3ForCausalLM, .*Qwen3MoeForCausalLM",
    ),
    "quantized": (lambda m: edit(m / "config.json", quantization_config={"quant_method": "awq"}), "awq"),
    "activation": (lambda m: edit(m / "config.json", hidden_act="gelu"), "gelu"),
    "activation of experts": (
        lambda m: edit(save_tiny("mixtral", m) / "config.json", hidden_act="gelu_pytorch_tanh"),
        "activation of experts: gelu_tanh; supported is silu",
    ),
    "kind of layer": (
        lambda m: edit(save_tiny("olmo3", m) / "config.json", layer_types=["linear_attention"] * 4),
        "layer type 'linear_attention'; supported here are sliding_attention, full_attention",
    ),
    "rope": (
        lambda m: edit(m / "config.json", rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4}),
        "dynamic.*default, linear, llama3, yarn, longrope",
    ),
    "partial rope": (
        lambda m: edit(m / "config.json", rope_parameters={"rope_theta": 1e4, "partial_rotary_factor": 1.5}),
        r"rope_parameters.partial_rotary_factor = 1.5; expected a number from 1e-06 to 1",
    ),
    "longrope": (
        lambda m: edit(m / "config.json", rope_parameters={"rope_type": "longrope", "short_factor": [1.0]}),
        "1 short and 0 long factors, expected 32 of each",
    ),
    "heads": (lambda m: edit(m / "config.json", num_key_value_heads=4), "evenly"),
    "no weights": (lambda m: (m / "model.safetensors").unlink(), "no weights in .*: none are there"),
    "pickle of another name": (lambda m: renamed(m, "model.pt"), r"such names are not read \(model.pt\)"),
    "no pickle": (
        lambda m: renamed(m, "pytorch_model.bin"),
        "bin is not a file in which torch.save",
    ),
    "truncated": (truncate, "not a complete safetensors file"),
    "empty": (lambda m: (m / "model.safetensors").write_bytes(b""), "not a complete safetensors file"),
    "bad index": (lambda m: write_index(m, "{}"), "not a weight index"),
    "empty index": (lambda m: shard_index(m), "not a weight index.*names no files"),
    "missing shard": (lambda m: shard_index(m, a="model-1.safetensors"), "1 of 1 weight files are missing"),
    "path traversal": (lambda m: shard_index(m, a="../../secret.safetensors"), "same directory"),
    "absolute shard": (lambda m: shard_index(m, a="/etc/x.safetensors"), "same directory"),
    "pickled shard": (lambda m: shard_index(m, a="model.bin"), r"only \*\.safetensors is read"),
    "tensor missing": (lambda m: rewrite(m, lambda t: t.pop("model.norm.weight")), "lack model.norm.weight"),
    "tensor unknown": (
        lambda m: rewrite(m, lambda t: t.update(surprise=torch.ones(1))),
        "hold surprise.*do not belong together",
    ),
    "wrong shape": (
        lambda m: rewrite(m, lambda t: t.update({"model.norm.weight": torch.ones(7)})),
        r"model.norm.weight has shape \(7,\), but \(96,\) by config.json",
    ),
    "wrong type": (
        lambda m: rewrite(m, lambda t: t.update({"model.norm.weight": torch.ones(96, dtype=torch.int8)})),
        "stored as I8",
    ),
}


@pytest.mark.parametrize("name", BREAKS)
def test_a_broken_directory_is_explained(model: Path, name: str) -> None:
    damage, said = BREAKS[name]
    damage(model)
    with pytest.raises(ModelLoadError, match=said):
        load(model)


@pytest.mark.parametrize("isa", ["avx2", "avx512", "avx512_bf16", "amx"])
def test_which_weights_lie_input_by_input_on_a_cpu(isa: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of 32 bits, and of bfloat16 where the processor has products of it."""
    monkeypatch.setattr(native, "kernels", lambda dtype: SimpleNamespace(isa=isa))
    assert prefers_input_major(torch.float32)
    assert prefers_input_major(torch.bfloat16) == (isa in ("avx512_bf16", "amx"))
    assert not prefers_input_major(torch.float16)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_that_torch_multiplies_on_a_cpu_lie_as_it_prefers(tmp_path: Path, dtype: DType) -> None:
    decoder = load_runner(save_tiny("ministral3", tmp_path), dtype=dtype).decoder
    assert isinstance(decoder, Decoder)
    weight = decoder.get_parameter("layers.0.mlp.down_proj.weight")
    assert weight.t().is_contiguous() == prefers_input_major(weight.dtype)
    assert weight.is_contiguous() != prefers_input_major(weight.dtype)
