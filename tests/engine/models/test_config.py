"""A config.json of any age is read as transformers reads it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from engine.base.errors import ModelLoadError
from engine.model_config.config import ModelConfig
from engine.model_files.model_directory import demo_model_path, fingerprint, resolve_model
from engine.model_parts.rope import RopeConfig
from tests.engine.support.oracle import FAMILIES, oracle_model, save_tiny

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "max_position_embeddings": 2048,
}


def read(tmp_path: Path, generation: dict[str, Any] | None = None, **changes: Any) -> ModelConfig:
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, **changes}))
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    return ModelConfig.from_directory(tmp_path)


@pytest.mark.parametrize("family", FAMILIES)
def test_parameters_are_counted(tmp_path: Path, family: str) -> None:
    config = ModelConfig.from_directory(save_tiny(family, tmp_path))
    assert config.num_parameters == sum(p.numel() for p in oracle_model(tmp_path).parameters())


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "qwen3_moe_mixed"])
def test_active_parameters_are_those_of_a_model_with_fewer_experts(tmp_path: Path, family: str) -> None:
    config = ModelConfig.from_directory(save_tiny(family, tmp_path))
    assert config.experts is not None
    few = replace(config, experts=replace(config.experts, num_experts=config.experts.per_token))
    unused = config.experts.num_experts - config.experts.per_token
    router = unused * config.hidden_size * len(config.experts.layers)
    assert config.active_parameters == few.num_parameters + router
    assert config.parameters_read(1) == pytest.approx(config.active_parameters)
    assert config.parameters_read(1000) == pytest.approx(config.num_parameters)
    assert config.active_parameters < config.parameters_read(2) < config.num_parameters


def test_without_experts_all_parameters_are_active(tmp_path: Path) -> None:
    config = read(tmp_path)
    assert config.active_parameters == config.parameters_read(1) == config.num_parameters


QWEN_MOE: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 5,
}


def test_sparse_layers(tmp_path: Path) -> None:
    def sparse(**changes: Any) -> set[int] | None:
        experts = read(tmp_path, **{**QWEN_MOE, **changes}).experts
        return None if experts is None else set(experts.layers)

    assert sparse() == {0, 1, 2, 3, 4}
    assert sparse(decoder_sparse_step=2) == {1, 3}
    assert sparse(mlp_only_layers=[0, 3]) == {1, 2, 4}
    assert sparse(decoder_sparse_step=2, mlp_only_layers=[1]) == {3}
    assert sparse(decoder_sparse_step=6) is None
    assert sparse(num_experts=0) is None


def test_the_renormalisation_of_experts_is_read_from_the_config(tmp_path: Path) -> None:
    mixtral = {**QWEN_MOE, "architectures": ["MixtralForCausalLM"], "num_local_experts": 4, "num_experts": None}
    for raw, expected in ((QWEN_MOE, False), ({**QWEN_MOE, "norm_topk_prob": True}, True), (mixtral, True)):
        experts = read(tmp_path, **raw).experts
        assert experts is not None and experts.renormalizes == expected
    assert experts is not None and experts.num_experts == 4, "the name that Mixtral has, and transformers 5 saves"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"num_experts_per_tok": 9}, "num_experts_per_tok is 9, expected 1 to 8"),
        ({"num_experts_per_tok": 0}, "num_experts_per_tok is 0, expected 1 to 8"),
        ({"decoder_sparse_step": 0}, "decoder_sparse_step is 0"),
        ({"num_experts": "many"}, "num_experts = 'many'; expected an integer"),
        ({"num_experts": None}, "wrong type"),
    ],
)
def test_experts_that_cannot_be(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ModelLoadError, match=said):
        read(tmp_path, **{**QWEN_MOE, **changes})


def test_the_number_of_experts_must_be_given(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="lacks the key 'num_experts_per_tok'"):
        read(tmp_path, architectures=["MixtralForCausalLM"], num_local_experts=8)


def test_kv_bytes(tmp_path: Path) -> None:
    assert read(tmp_path, num_key_value_heads=2).kv_bytes_per_token(2) == 2 * 2 * 2 * 8 * 2


def test_rope_scaling_is_read_in_the_old_and_the_new_way(tmp_path: Path) -> None:
    scaling = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaling["original_max_position_embeddings"] = 512
    old = read(tmp_path, rope_theta=5e5, rope_scaling={**scaling, "rope_type": "llama3"})
    older = read(tmp_path, rope_theta=5e5, rope_scaling={**scaling, "type": "llama3"})
    new = read(tmp_path, rope_parameters={**scaling, "rope_type": "llama3", "rope_theta": 5e5})
    assert old.ropes == older.ropes == new.ropes
    [rope] = new.ropes
    assert rope is not None and rope.rope_type == "llama3" and rope.theta == 5e5


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "linear", "factor": 4.0},
        {
            "rope_type": "llama3",
            "factor": 32.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
        {"rope_type": "yarn", "factor": 8.0, "beta_fast": 16, "mscale": 1.0, "mscale_all_dim": 0.5},
        {"rope_type": "yarn", "factor": 8.0, "attention_factor": 1.25, "truncate": False},
    ],
    ids=str,
)
def test_frequencies_are_those_of_transformers(rope: dict[str, Any]) -> None:
    raw = {"rope_parameters": {"rope_theta": 5e5, **rope}, "max_position_embeddings": 131072}
    ours = RopeConfig.from_config(raw, 128)
    config = transformers.LlamaConfig(head_dim=128, **raw)
    theirs, factor = ROPE_INIT_FUNCTIONS[rope["rope_type"]](config)
    torch.testing.assert_close(torch.tensor(ours.inverse_frequencies(128)), theirs, rtol=1e-6, atol=0.0)
    assert ours.attention_factor == pytest.approx(factor)


@pytest.mark.parametrize("context", [4096, 131072])
def test_longrope_is_that_of_transformers_for_the_longest_context_served(context: int) -> None:
    starts = {"short_factor": 1, "long_factor": 3}
    factors = {name: [start + pair / 8 for pair in range(48)] for name, start in starts.items()}
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 4096, **factors}
    raw = {"max_position_embeddings": 131072, "partial_rotary_factor": 0.75, "rope_parameters": rope}
    ours = RopeConfig.from_config(raw, 128, is_partial=True).for_context(context)
    config = transformers.Phi3Config(hidden_size=1024, num_attention_heads=8, **raw)
    theirs, factor = ROPE_INIT_FUNCTIONS["longrope"](config, seq_len=context)
    turned, kept = ours.pairs(128)[:48], ours.pairs(128)[48:]
    torch.testing.assert_close(torch.tensor([pair[0] for pair in turned]), theirs, rtol=1e-6, atol=0.0)
    assert [pair[1] for pair in turned] == pytest.approx([factor] * 48) and kept == [(0.0, 1.0)] * 16


def test_yarn_makes_the_longer_context_usable(tmp_path: Path) -> None:
    yarn = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048}
    assert read(tmp_path, rope_scaling=yarn).max_position_embeddings == 8192
    assert read(tmp_path).max_position_embeddings == 2048


@pytest.mark.parametrize(
    ("generation", "config", "expected"),
    [
        (None, 2, {2}),
        (None, [2, 3], {2, 3}),
        (None, None, set()),
        ({"eos_token_id": [5, 6]}, 2, {5, 6}),
        ({}, 2, {2}),
    ],
)
def test_eos_tokens(tmp_path: Path, generation: Any, config: Any, expected: set[int]) -> None:
    assert read(tmp_path, generation, eos_token_id=config).eos_token_ids == expected


def test_sliding_windows(tmp_path: Path) -> None:
    mistral, qwen = ["MistralForCausalLM"], ["Qwen2ForCausalLM"]
    on: dict[str, Any] = {"architectures": qwen, "use_sliding_window": True, "sliding_window": 99}

    def windows(**changes: Any) -> tuple[int | None, ...]:
        return tuple(layer.window for layer in read(tmp_path, **changes).layers)

    kinds = ["sliding_attention", "full_attention"]
    assert windows(sliding_window=99) == (None, None)
    assert windows(architectures=mistral, sliding_window=99) == (99, 99)
    assert windows(architectures=mistral, sliding_window=None) == (None, None)
    assert windows(architectures=mistral) == (4096, 4096)  # as transformers has it
    assert windows(architectures=qwen, sliding_window=99) == (None, None)
    assert windows(**on, max_window_layers=1) == (None, 99)
    assert windows(**on, layer_types=kinds) == (99, None)


# --- finding a model -----------------------------------------------------------------------------------------


def test_the_embedded_model_is_found() -> None:
    config = ModelConfig.from_directory(resolve_model("demo"))
    assert config.architecture == "Qwen3ForCausalLM"
    assert demo_model_path().name == "demo_model"


def test_a_directory_is_taken_as_it_is(tmp_path: Path) -> None:
    assert resolve_model(str(tmp_path)) == tmp_path


@pytest.mark.parametrize("name", ["/nowhere/at/all", "./missing", "~/missing-model", "a/b/c", "missing"])
def test_a_name_that_cannot_be_a_hub_id_is_not_asked_for(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *_, **__: pytest.fail("asked the hub"))
    with pytest.raises(ModelLoadError, match="no directory"):
        resolve_model(name)


def test_a_download_takes_no_code_and_no_pickle(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: dict[str, Any] = {}
    (tmp_path / "model.safetensors").touch()
    monkeypatch.setattr(
        "huggingface_hub.snapshot_download", lambda model, **options: asked.update(options) or str(tmp_path)
    )
    assert resolve_model("owner/name") == tmp_path
    assert not any(pattern.endswith((".py", ".bin", ".pt", "*")) for pattern in asked["allow_patterns"])


def test_the_pinned_revision_is_downloaded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[Any] = []
    (tmp_path / "model.safetensors").touch()
    monkeypatch.setattr(
        "huggingface_hub.snapshot_download",
        lambda model, revision=None, **_: asked.append(revision) or str(tmp_path),  # type: ignore[func-returns-value]
    )
    resolve_model("owner/name", "a1b2c3")
    resolve_model("owner/name")
    assert asked == ["a1b2c3", None]


def test_a_revision_that_the_hub_lacks_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub.errors import RevisionNotFoundError

    def lacking(model: str, **_: Any) -> str:
        raise RevisionNotFoundError("404", response=MagicMock())

    monkeypatch.setattr("huggingface_hub.snapshot_download", lacking)
    with pytest.raises(ModelLoadError, match="no revision 'v9' on the hub"):
        resolve_model("owner/name", "v9")


def test_a_revision_of_a_model_that_is_not_from_the_hub_is_refused(tmp_path: Path) -> None:
    for model in ("demo", str(tmp_path)):
        with pytest.raises(ModelLoadError, match="model_revision is 'v1'"):
            resolve_model(model, "v1")


def test_two_commits_whose_files_have_the_same_sizes_have_two_fingerprints(tmp_path: Path) -> None:
    """Weights are only sampled for a fingerprint. Copies elsewhere stay equal."""
    made = {}
    for place in (
        "models--o--n/snapshots/aaa",
        "cache/models--o--n/snapshots/aaa",
        "models--o--n/snapshots/bbb",
        "copy",
    ):
        directory = tmp_path / place
        directory.mkdir(parents=True)
        (directory / "config.json").write_text("{}")
        (directory / "model.safetensors").write_bytes(b"four")
        made[place] = fingerprint(directory)
    first, elsewhere, second, copy = made.values()
    assert first == elsewhere and len({first, second, copy}) == 3


@pytest.mark.parametrize(
    "name",
    ["config.json", "generation_config.json", "model.safetensors.index.json", "tokenizer.json",
     "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json", "added_tokens.json", "vocab.json",
     "vocab.txt", "merges.txt", "tekken.json", "chat_template.jinja", "chat_template.json",
     "additional_chat_templates/tool_use.jinja", "modules.json", "sentence_bert_config.json",
     "1_Pooling/config.json"],
)  # fmt: skip
def test_every_file_that_changes_answers_is_in_the_fingerprint(tmp_path: Path, name: str) -> None:
    """An ingress that renders other prompts than its engine's model has, must not take the engine for its own."""
    (tmp_path / "modules.json").write_text('[{"path": "1_Pooling"}]')
    (tmp_path / "README.md").write_text("one")
    before = fingerprint(tmp_path)
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text('[{"path": "1_Pooling"}, {"path": ""}]')
    made = fingerprint(tmp_path)
    (tmp_path / name).write_text('[{"path": "1_Pooling"}, {"path": "x"}]')
    assert len({before, made, fingerprint(tmp_path)}) == 3
    (tmp_path / "README.md").write_text("another")
    (tmp_path / name).write_text('[{"path": "1_Pooling"}, {"path": ""}]')
    assert fingerprint(tmp_path) == made, "what no answer depends on counts"


@pytest.mark.parametrize("num_bytes", [100, 3_000_000, 40_000_000])
def test_weights_of_the_same_size_have_other_fingerprints(tmp_path: Path, num_bytes: int) -> None:
    """A fine-tuned model that changed one layer of eighteen, wherever it lies."""
    path = tmp_path / "model.safetensors"
    seen = set()
    for layer in range(18):
        content = bytearray(num_bytes)
        start, stop = num_bytes * layer // 18, num_bytes * (layer + 1) // 18
        content[start:stop] = b"x" * (stop - start)
        path.write_bytes(content)
        seen.add(fingerprint(tmp_path))
    assert len(seen) == 18


def test_an_offline_hub_is_explained(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from huggingface_hub.errors import LocalEntryNotFoundError

    def offline(model: str, **_: Any) -> str:
        raise LocalEntryNotFoundError("cannot reach the hub")

    monkeypatch.setattr("huggingface_hub.snapshot_download", offline)
    with pytest.raises(ModelLoadError, match="give the directory of a copy"):
        resolve_model("owner/name")
