"""EAGLE-3 checkpoints: their forms, their logits, their vocabulary, and what is refused."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from safetensors.torch import load_file, save_file

from engine import Speculation
from engine.base.errors import ModelLoadError
from engine.loading.check_model import check_model
from engine.model_config.eagle3 import Eagle3Config
from engine.program.engine import Engine
from engine.program.load_with_layer import load_with_layer
from engine.settings.config import EngineConfig
from engine.values.plan import Chunk, StepPlan
from engine.values.sampling_params import SamplingParams
from tests.engine.support.eagle3_models import DRAFTED, Reference, save_eagle3
from tests.engine.support.engine_run import Run
from tests.engine.support.gguf_models import write_gguf
from tests.engine.support.grammar_models import DEMO
from tests.engine.support.oracle import Tiny, save_tiny
from tests.engine.support.watched_drafts import config_of, request


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    """The directory of a family's tiny model, with a tokenizer for `check_model`."""

    @cache
    def saved(family: str) -> Path:
        directory = save_tiny(family, tmp_path_factory.mktemp("models") / family)
        for file in DEMO.glob("*token*"):
            shutil.copy(file, directory)
        return directory

    return saved


def config_for(model: Path, layer: Path, **settings: Any) -> EngineConfig:
    drafting = Speculation("eagle3", model=str(layer), max_drafts=3, adaptive=False)
    return config_of(model, **{"speculation": drafting, **settings})


FORMS: Mapping[str, dict[str, Any]] = {
    "some tokens": {},
    "speculators": {"nested": True, "norms_residual": True},
    "speculators that norm states": {"nested": True, "norms_states": True},
    "EAGLE-3.1": {"nested": True, "norms_each": True, "norms_output": True},
    "EAGLE-3.1, whose output is not normed": {"norms_each": True, "norms_residual": True},
    "all tokens without a map": {"drafted": None},
    "all tokens with a map": {"drafted": range(101)},
    "an embedding of its own": {"has_embedding": True},
    "narrower than the model": {"has_embedding": True, "hidden_size": 64, "nested": True},
    "biases": {"attention_bias": True},
}


@pytest.mark.parametrize("attention", ["auto", "reference"])
@pytest.mark.parametrize("form", FORMS)
def test_logits_are_those_of_plain_torch(model: Tiny, tmp_path: Path, form: str, attention: str) -> None:
    """Of a chain of draft tokens, after a model that native kernels compute, or torch."""
    layer = save_eagle3(tmp_path / "layer", model("llama3.1"), **FORMS[form])
    runner, drafter = load_with_layer(config_for(model("llama3.1"), layer, attention=attention))
    one, found = request(range(30, 57)), list[torch.Tensor]()
    predict = drafter._layer.predict

    def recorded(plan: StepPlan, before: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits, own = predict(plan, before)
        found.append(logits[0].clone())
        return logits, own

    drafter._layer.predict = recorded  # type: ignore[method-assign]
    result = runner.run(StepPlan((Chunk(one, 0, 27, one.tokens, [0, 1, 2], True),)))
    one.tokens += result.token_ids
    [draft] = drafter.propose([one], [3])
    reference = Reference(layer, model("llama3.1"))
    before, known = reference.states(one.tokens)[:, :-1], [*one.tokens, *draft]
    # A norm of the small states of a random layer magnifies their rounding at each token of a draft.
    bound = 5e-4 if "norms_output" in FORMS[form] else 1e-4
    for number, logits in enumerate(found):
        expected, own = reference.logits(known[1 : len(one.tokens) + number], before)
        torch.testing.assert_close(logits, expected, atol=bound, rtol=bound)
        before = torch.cat((before, own), 1)
    assert len(found) == len(draft) == 3
    allowed = FORMS[form].get("drafted", DRAFTED)
    assert int(found[0].isfinite().sum()) == (101 if allowed is None else len(set(allowed)))


@pytest.mark.parametrize("form", ["tied", "GGUF"])
def test_models_whose_table_is_stored_otherwise_are_drafted_for(model: Tiny, tmp_path: Path, form: str) -> None:
    """The layer uses the embedding table of a model that has packed its own."""
    plain = model("qwen3_tied" if form == "tied" else "llama2")
    layer, stored = save_eagle3(tmp_path / "layer", plain), plain
    if form == "GGUF":
        stored = write_gguf(
            plain, tmp_path / "model.gguf", dict.fromkeys(("token_embd", "attn", "ffn"), Kind.Q8_0)
        )
    runner, drafter = load_with_layer(config_for(stored, layer))
    one = request(range(30, 57))
    one.tokens += runner.run(StepPlan((Chunk(one, 0, 27, one.tokens, [0, 1, 2], True),))).token_ids
    assert drafter.propose([one], [4]) == [Reference(layer, plain).drafts(one.tokens, 4)]


def save_cycle(directory: Path) -> tuple[Path, Path]:
    """A model that only looks at the last token, after which a certain odd one follows, and a layer that does so
    too: its attention sees only its own token, whose embedding it passes on. Returns the directories of both.
    """
    model = save_tiny("llama2", directory / "model", num_hidden_layers=3)
    weights = load_file(model / "model.safetensors")
    odd = torch.arange(1, 101, 2)
    follows = odd[torch.randperm(len(odd), generator=torch.Generator().manual_seed(1))]
    table = torch.nn.functional.normalize(torch.randn(101, 96, generator=torch.Generator().manual_seed(2)))
    for name, weight in weights.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            weight.zero_()
        elif name.endswith("norm.weight"):
            weight.fill_(1.0)
    weights["model.embed_tokens.weight"] = table
    weights["lm_head.weight"] = head = torch.zeros(101, 96).index_copy(0, follows, table[odd])
    save_file(weights, model / "model.safetensors", {"format": "pt"})

    heads: dict[str, Any] = {"num_attention_heads": 3, "num_key_value_heads": 3, "attention_bias": True}
    layer = save_eagle3(directory / "layer", model, drafted=odd.tolist(), norms_residual=True, **heads)
    weights = load_file(layer / "model.safetensors")
    own = torch.eye(96)
    norms = [name for name in weights if name.endswith("norm.weight") and "hidden" not in name]
    others = [name for name in weights if name.startswith(("midlayer", "fc"))]
    changed = {name: torch.full_like(weights[name], name in norms) for name in (*others, *norms)}
    attention = "midlayer.self_attn"
    changed |= {
        f"{attention}.q_proj.bias": torch.full((96,), 20.0),
        f"{attention}.k_proj.bias": torch.full((96,), 20.0),
        f"{attention}.v_proj.weight": torch.cat((own, torch.zeros(96, 96)), 1),
        f"{attention}.o_proj.weight": own,
        "lm_head.weight": head[odd],
    }
    save_file({**weights, **changed}, layer / "model.safetensors", {"format": "pt"})
    return model, layer


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_layer_that_predicts_as_its_model_does_is_right(tmp_path: Path, temperature: float) -> None:
    model, layer = save_cycle(tmp_path)
    run = Run(config_for(model, layer))
    plain = Run(config_for(model, layer, speculation=None))
    sampling = SamplingParams(max_tokens=40, temperature=temperature, seed=3)
    for each in (run, plain):
        for number in range(3):
            each.submit(str(number), [number, 51], sampling)
        each.finish()
    tokens = [run.tokens(str(number)) for number in range(3)]
    assert tokens == [plain.tokens(str(number)) for number in range(3)]
    # At a temperature, the model sometimes chooses a token that the layer cannot draft.
    assert run.num_accepted >= (0.8 if temperature else 1.0) * run.num_drafts > 50
    assert len(run.steps) < 0.4 * len(plain.steps)


def test_pages_are_shared_out_for_the_kv_of_both(
    model: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.loading.load_model.available_ram", lambda: 2**22)
    layer = save_eagle3(tmp_path / "layer", model("llama3.1"))
    config = config_for(model("llama3.1"), layer, kv_pages=None, kv_memory_share=0.5, max_running=4)
    runner, drafter = load_with_layer(config)
    bytes_of_a_token = 4 * 2 * 2 * (3 * 32 + 32)  # float32, keys and values, 2 heads of each layer
    states = 4 * 512 * 96 * 4  # of 512 tokens of each request, float32
    expected = int((2**22 - states) * 0.5) // (16 * bytes_of_a_token)
    assert runner.num_pages == drafter.cache.num_pages == expected > 8


def test_requests_longer_than_the_layer_s_context_get_no_drafts(model: Tiny, tmp_path: Path) -> None:
    layer = save_eagle3(tmp_path / "layer", model("llama3.1"), max_position_embeddings=40)
    run = Run(config_for(model("llama3.1"), layer))
    sampling = SamplingParams(max_tokens=20, temperature=0)
    run.submit("short", range(20, 50), sampling)
    run.finish()
    assert 0 < run.num_drafts <= 3 * 11
    before = run.num_drafts
    run.submit("long", range(20, 70), sampling)
    run.finish()
    assert run.num_drafts == before and len(run.tokens("long")) == 20


# --- configurations -------------------------------------------------------------------------------------------

IDS = "eagle_aux_hidden_state_layer_ids"
SPECFORGE = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 46, 90], "use_aux_hidden_state": True},
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "draft_vocab_size": 32000,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 24576,
    "max_position_embeddings": 40960,
    "model_type": "llama",
    "num_attention_heads": 64,
    "num_hidden_layers": 1,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "rope_scaling": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 151936,
}
"""For Qwen3-235B-A22B, which has 94 layers."""
NVIDIA = {
    **SPECFORGE,
    "eagle_config": {
        "eagle_aux_hidden_state_layer_ids": [],
        "use_aux_hidden_state": True,
        "use_input_layernorm_in_first_layer": True,
        "use_last_layernorm": True,
        "use_mtp_layernorm": False,
        "next_layer_regular": True,
        "parallel_draft_step": 1,
        "parallel_draft_heads_num_layers": 1,
    },
}
"""The keys that NVIDIA's Model Optimizer writes, without numbers of layers."""
SAFEAI = {
    "architectures": ["LlamaForCausalLM"],
    "bos_token_id": 128000,
    "eos_token_id": 128001,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 14336,
    "max_position_embeddings": 2048,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_hidden_layers": 1,
    "pad_token_id": 0,
    "rms_norm_eps": 1e-05,
    "tie_word_embeddings": False,
    "torch_dtype": "float16",
    "vocab_size": 128256,
    "draft_vocab_size": 32000,
}
"""For Llama-3.1-8B, which has 32 layers."""
SPECULATORS = {
    "architectures": ["Eagle3DraftModel"],
    "auto_map": {"": "eagle3.Eagle3SpeculatorConfig"},
    "draft_vocab_size": 32000,
    "eagle_aux_hidden_state_layer_ids": [2, 16, 29],
    "embed_requires_grad": False,
    "norm_before_fc": False,
    "norm_before_residual": True,
    "speculators_config": {"algorithm": "eagle3", "verifier": {"name_or_path": "meta-llama/Llama-3.1-8B"}},
    "speculators_model_type": "eagle3",
    "speculators_version": "0.3.0",
    "target_hidden_size": None,
    "torch_dtype": "bfloat16",
    "transformer_layer_config": {
        key: SAFEAI[key] for key in SAFEAI if key not in ("architectures", "draft_vocab_size")
    },
}


def read(directory: Path, raw: Mapping[str, Any]) -> Eagle3Config:
    (directory / "config.json").write_text(json.dumps(raw))
    return Eagle3Config.from_directory(directory)


@pytest.mark.parametrize(
    ("raw", "num_layers", "expected"),
    [
        (SPECFORGE, 94, (2, 47, 91)),
        (SAFEAI, 32, (2, 16, 29)),
        (NVIDIA, 80, (2, 40, 77)),
        (SPECULATORS, 32, (2, 16, 29)),
        ({**SAFEAI, "eagle_aux_hidden_state_layer_ids": [1, 15, 28]}, 32, (2, 16, 29)),
        ({**SAFEAI, "eagle_aux_hidden_state_layer_ids": [2, 9, 20, 31]}, 32, (2, 9, 20, 31)),
    ],
)
def test_published_configurations_name_the_states_that_are_read(
    tmp_path: Path, raw: dict[str, Any], num_layers: int, expected: tuple[int, ...]
) -> None:
    layer = read(tmp_path, raw)
    model = dataclasses.replace(layer.layer, layers=layer.layer.layers * num_layers)
    assert layer.inner_layers(model) == expected
    assert layer.num_states == len(expected)
    assert layer.layer.vocab_size == 32000 < layer.vocab_size
    assert layer.norms_residual == ("transformer_layer_config" in raw)


@pytest.mark.parametrize("form", ["some tokens", "speculators that norm states", "EAGLE-3.1", "biases"])
def test_its_parameters_are_counted(model: Tiny, tmp_path: Path, form: str) -> None:
    layer = save_eagle3(tmp_path / "layer", model("llama3.1"), **FORMS[form])
    weights = load_file(layer / "model.safetensors")
    counted = sum(weight.numel() for weight in weights.values() if weight.is_floating_point())
    assert Eagle3Config.from_directory(layer).num_parameters == counted


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["Qwen3ForCausalLM"]}, "describes a Qwen3ForCausalLM, and no EAGLE-3 layer: expected"),
        ({"draft_vocab_size": None}, "describes a LlamaForCausalLM, and no EAGLE-3 layer"),
        ({"model_type": "qwen3"}, "of the model_type 'qwen3': only 'llama'"),
        ({"num_hidden_layers": 2}, "describes 2 layers: supported is one layer"),
        ({"tie_word_embeddings": True}, "describes the embedding table as output head"),
        ({"fc_bias": True}, "has fc_bias, which Raydix does not know in a EAGLE-3 layer"),
        (
            {"fc_norm": True, "norm_before_fc": True},
            "has norm_before_fc and fc_norm, of which a layer has only one",
        ),
        ({"eagle_config": {"use_mtp_layernorm": True}}, "has eagle_config.use_mtp_layernorm, which"),
        ({"eagle_config": {"parallel_draft_step": 2}}, "has eagle_config.parallel_draft_step, which"),
        (
            {"eagle_config": {"parallel_draft_step": 2, "parallel_draft_heads_num_layers": 1}},
            "parallel_draft_step, eagle_config.parallel_draft_heads_num_layers, which",
        ),
        ({"eagle_config": {"use_aux_hidden_state": False}}, "use_aux_hidden_state false"),
        ({"hidden_size": "wide"}, "has hidden_size = 'wide'; expected an integer"),
        ({"vocab_size": None}, "describes no EAGLE-3 layer"),
        (
            {
                "eagle_aux_hidden_state_layer_ids": [1, 2],
                "eagle_config": {"eagle_aux_hidden_state_layer_ids": [3]},
            },
            r"two lists of layers in eagle_aux_hidden_state_layer_ids: \[1, 2\] and \[3\]",
        ),
    ],
)
def test_other_configurations_are_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelLoadError, match=message):
        read(tmp_path, {**SAFEAI, **changes})


def test_keys_that_the_settings_ignore_are_allowed(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**SAFEAI, "fc_bias": True}))
    assert Eagle3Config.from_directory(tmp_path, ["fc_bias"]).layer.vocab_size == 32000


# --- what is refused at the start -----------------------------------------------------------------------------


def refused(config: EngineConfig, message: str) -> None:
    """A check of the files and a start both report the error."""
    for start in (check_model, Engine.from_config):
        with pytest.raises(ValueError, match=message):
            start(config)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"target_hidden_size": 64}, "for a model with a hidden_size of 64, but LlamaForCausalLM has 96"),
        ({"vocab_size": 102}, "for a model with a vocab_size of 102, but LlamaForCausalLM has 101"),
        (
            {"eagle_config": {IDS: [1, 15, 28]}},
            "reads states of the model after 2, 16, 29 layers: expected ascending numbers below 3",
        ),
        ({"eagle_config": None}, "after 2, 1, 0 layers: expected ascending"),
    ],
)
def test_a_layer_of_another_model_is_refused(
    model: Tiny, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    layer = save_eagle3(tmp_path / "layer", model("llama3.1"))
    raw = json.loads((layer / "config.json").read_text())
    (layer / "config.json").write_text(json.dumps({**raw, **changes}))
    refused(config_for(model("llama3.1"), layer), message)


Edit = Callable[[dict[str, torch.Tensor]], object]
NARROW = "midlayer.self_attn.q_proj.weight"


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda weights: weights.pop("fc.weight"), "the weights lack fc.weight, which EAGLE-3 layer needs"),
        (lambda weights: weights.pop("d2t"), "the weights lack d2t"),
        (lambda weights: weights.pop("lm_head.weight"), "the weights lack lm_head.weight"),
        (
            lambda weights: weights.update({"fc.bias": torch.zeros(96)}),
            "the weights hold fc.bias, which",
        ),
        (lambda weights: weights.update({NARROW: torch.zeros(128, 96)}), rf"{NARROW} has shape \(128, 96\)"),
        (lambda weights: weights.update({"d2t": torch.zeros(5, dtype=torch.int64)}), r"d2t has shape \(5,\)"),
    ],
)
def test_weights_that_do_not_belong_to_the_configuration_are_refused(
    model: Tiny, tmp_path: Path, edit: Edit, message: str
) -> None:
    layer = edited(save_eagle3(tmp_path / "layer", model("llama3.1")), edit)
    refused(config_for(model("llama3.1"), layer), f"speculation.model, an EAGLE-3 checkpoint: {message}")


def edited(layer: Path, edit: Edit) -> Path:
    weights = load_file(layer / "model.safetensors")
    edit(weights)
    save_file(weights, layer / "model.safetensors", {"format": "pt"})
    return layer


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda weights: weights["d2t"].add_(1000), "the id of another one of the model.s 101 tokens"),
        (lambda weights: weights["d2t"].sub_(torch.arange(len(weights["d2t"]))), "the id of another one"),
        (lambda weights: weights["t2d"].logical_not_(), "d2t and t2d name different tokens"),
    ],
)
def test_a_map_of_other_tokens_is_refused(model: Tiny, tmp_path: Path, edit: Edit, message: str) -> None:
    layer = edited(save_eagle3(tmp_path / "layer", model("llama3.1")), edit)
    with pytest.raises(ModelLoadError, match=message):
        Engine.from_config(config_for(model("llama3.1"), layer))


def test_weights_that_torch_saved_draft_as_well(model: Tiny, tmp_path: Path) -> None:
    """Many layers are published as pytorch_model.bin only."""
    layer = save_eagle3(tmp_path / "layer", model("llama3.1"))
    reference, config = Reference(layer, model("llama3.1")), config_for(model("llama3.1"), layer)
    torch.save(load_file(layer / "model.safetensors"), layer / "pytorch_model.bin")
    (layer / "model.safetensors").unlink()
    check_model(config)
    runner, drafter = load_with_layer(config)
    one = request(range(30, 57))
    one.tokens += runner.run(StepPlan((Chunk(one, 0, 27, one.tokens, [0, 1, 2], True),))).token_ids
    assert drafter.propose([one], [4]) == [reference.drafts(one.tokens, 4)]


def test_safetensors_are_preferred(model: Tiny, tmp_path: Path) -> None:
    layer = save_eagle3(tmp_path / "layer", model("llama3.1"))
    (layer / "pytorch_model.bin").write_text("not read")
    check_model(config_for(model("llama3.1"), layer))
    load_with_layer(config_for(model("llama3.1"), layer))


def test_only_a_layer_s_pickled_weights_are_taken_from_the_hub(
    model: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer, asked = save_eagle3(tmp_path / "layer", model("llama3.1")), list[Any]()
    weights, names = load_file(layer / "model.safetensors"), ["config.json", "pytorch_model.bin", "code.py"]
    (layer / "model.safetensors").unlink()
    cached = tmp_path / "models--owner--name" / "snapshots" / "c0ffee"
    cached.parent.mkdir(parents=True)
    layer.rename(cached)

    def download(repository: str, revision: str | None, allow_patterns: list[str], **_: Any) -> str:
        asked.append((repository, revision, allow_patterns))
        if "pytorch_model.bin" in allow_patterns:
            torch.save(weights, cached / "pytorch_model.bin")
        return str(cached)

    class Hub:
        def model_info(self, *_: Any, **__: Any) -> Any:
            return SimpleNamespace(sha="c0ffee", siblings=[SimpleNamespace(rfilename=name) for name in names])

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    monkeypatch.setattr("huggingface_hub.HfApi", Hub)
    config = config_for(model("llama3.1"), Path("owner/name"))
    check_model(config)
    assert not (cached / "pytorch_model.bin").exists()
    load_with_layer(config)
    assert asked[-1] == ("owner/name", "c0ffee", ["pytorch_model.bin", "pytorch_model-*.bin"])
    names.remove("pytorch_model.bin")
    with pytest.raises(ModelLoadError, match=r"no weights in .*: none are there"):
        check_model(config)


def test_damaged_pickles_and_missing_files_are_refused(model: Tiny, tmp_path: Path) -> None:
    layer = save_eagle3(tmp_path / "layer", model("llama3.1"))
    (layer / "model.safetensors").rename(layer / "pytorch_model.bin")
    refused(
        config_for(model("llama3.1"), layer), "bin is not a file in which torch.save .* convert it to safetensors"
    )
    weights = {"fc.weight": torch.zeros(96, 288)}
    torch.save(weights, layer / "pytorch_model.bin")
    refused(config_for(model("llama3.1"), layer), "an EAGLE-3 checkpoint: the weights lack norm.weight")
    (layer / "config.json").unlink()
    refused(config_for(model("llama3.1"), layer), "speculation.model: there is no config.json in")
    refused(config_for(model("llama3.1"), tmp_path / "nowhere"), "there is no directory")


@pytest.mark.parametrize("settings", [{"method": "eagle3"}, {"method": "mtp", "model": "x"}])
def test_only_methods_with_files_name_some(settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match='belongs to the methods "draft_model" and "eagle3"'):
        Speculation(**settings)
