"""A config.json with any keys is read as transformers reads it, or refused by the name of what is not understood.

Searched with 20,000 examples: `RAYDIX_TEST_EXAMPLES=400 pytest --hypothesis-profile=search --hypothesis-seed=36`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from functools import cache
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.base.errors import ModelLoadError
from engine.values.plan import StepPlan
from tests.engine.support.oracle import COMMON, FAMILIES, MORE_FAMILIES, random_ids, save_tiny
from tests.engine.support.steps_by_hand import RequestByHand, load_runner
from tests.support.examples import examples

PROMPT = random_ids(6, 40)
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
ROPES: list[Any] = [
    None,
    {"rope_type": "default", "rope_theta": 700.0},
    {"rope_type": "default", "rope_theta": 700.0, "partial_rotary_factor": 0.5},
    {"type": "linear", "rope_type": "linear", "factor": 3.0},
    {"type": "linear", "factor": 3.0, "rope_theta": 700.0},
    _YARN,
    {**_YARN, "type": "linear", "rope_theta": 700.0},
    {**_YARN, "rope_theta": 700.0, "mscale": 0.5, "mscale_all_dim": 0.9},
    {"full_attention": {**_YARN, "rope_theta": 700.0}, "sliding_attention": {"rope_type": "default"}},
]
KEYS: Mapping[str, list[Any]] = {
    "rope_parameters": ROPES,
    "rope_scaling": ROPES,
    "rope_theta": [333.0],
    "rope_local_base_freq": [77.0],
    "partial_rotary_factor": [0.5, 1.0],
    "rotary_dim": [8],
    "original_max_position_embeddings": [8],
    "max_position_embeddings": [64],
    "hidden_act": ["silu", "gelu_pytorch_tanh"],
    "hidden_activation": ["silu", "gelu_pytorch_tanh"],
    "num_experts": [2, 4],
    "num_local_experts": [2, 4],
    "n_routed_experts": [2],
    "num_experts_per_tok": [1, 2],
    "experts_per_token": [2],
    "top_k_experts": [2],
    "norm_topk_prob": [True, False],
    "decoder_sparse_step": [1, 2],
    "mlp_only_layers": [[], [1]],
    "moe_layers": [[0], None],
    "first_k_dense_replace": [0, 2],
    "n_group": [1, 2],
    "topk_group": [1],
    "routed_scaling_factor": [3.0],
    "scoring_func": ["softmax", "sigmoid"],
    "moe_intermediate_size": [32],
    "sliding_window": [5, None],
    "use_sliding_window": [True, False],
    "max_window_layers": [0, 1],
    "sliding_window_pattern": [2],
    "layer_types": [["full_attention", "sliding_attention", "full_attention"], None],
    "attention_chunk_size": [16],
    "no_rope_layers": [[1, 1, 0]],
    "no_rope_layer_interval": [2],
    "full_attention_interval": [2],
    "attention_bias": [True, False],
    "mlp_bias": [True, False],
    "head_dim": [None, 16],
    "num_key_value_heads": [None, 2],
    "use_qk_norm": [True, False],
    "rms_norm_eps": [0.1],
    "tie_word_embeddings": [True, False],
    "attn_logit_softcapping": [3.0, None],
    "final_logit_softcapping": [3.0, None],
    "query_pre_attn_scalar": [64],
    "embedding_multiplier": [3.0],
    "residual_multiplier": [2.0],
    "attention_multiplier": [2.0],
    "logits_scaling": [3.0],
    "swiglu_limit": [0.5],
    "swiglu_alpha": [0.5],
    "rope_interleave": [True, False],
    "attn_output_gate": [True, False],
    "attention_k_eq_v": [True, False],
    "use_double_wide_mlp": [True, False],
    "global_head_dim": [32],
    "num_global_key_value_heads": [1, 2],
    "attn_temperature_tuning": [True, False],
    "floor_scale": [4],
    "is_causal": [True, False],
    "made_up": [3.0, None],
}
"""Keys that config.json may have in some family, in pairs that mean the same in some, with values to try."""
MISSING = object()
_BY_CLASS = {prefix: family for family, (prefix, _) in (FAMILIES | MORE_FAMILIES).items()}
PLAIN = sorted(_BY_CLASS.values())
"""One tiny model for each of transformers' classes."""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Return the directory of a family's tiny model."""
    yield cache(lambda family: save_tiny(family, tmp_path_factory.mktemp(family.replace(".", "_"))))


def logits_of_transformers(directory: Path) -> torch.Tensor | None:
    """Return the logits after the prompt; None where transformers fails, as it does for much that it reads."""
    try:
        model = transformers.AutoModelForCausalLM.from_pretrained(
            directory, attn_implementation="eager", experts_implementation="eager", local_files_only=True
        )
        with torch.inference_mode():
            logits: torch.Tensor = model.eval()(torch.tensor([PROMPT])).logits[0, -1].float()
    except Exception:
        return None
    return logits


def check(model: Path, changes: Mapping[str, Any], directory: Path) -> bool:
    """Compare a model whose config.json is changed. Return whether it was loaded, not refused."""
    raw = json.loads((model / "config.json").read_text())
    others = {key: value for key, value in raw.items() if key not in changes}
    changed = {key: value for key, value in changes.items() if value is not MISSING}
    (directory / "config.json").write_text(json.dumps({**changed, **others}))  # their order must not matter
    (directory / "model.safetensors").unlink(missing_ok=True)
    (directory / "model.safetensors").symlink_to(model / "model.safetensors")
    try:
        runner = load_runner(directory)
    except ValueError:  # ModelLoadError is one
        return False
    ours = runner.logits(StepPlan((RequestByHand(PROMPT, range(5)).chunk(),)))[0]
    theirs = logits_of_transformers(directory)
    assert theirs is None or torch.allclose(ours, theirs, rtol=1e-3, atol=2e-3), (model.name, changes)
    return True


@settings(max_examples=examples(50))
@given(data=st.data())
def test_any_keys_are_read_as_transformers_reads_them(
    data: st.DataObject, made: Any, tmp_path_factory: Any
) -> None:
    family = data.draw(st.sampled_from(PLAIN))
    keys = data.draw(st.lists(st.sampled_from(sorted(KEYS)), min_size=1, max_size=4, unique=True))
    changes = {key: data.draw(st.sampled_from([*KEYS[key], MISSING])) for key in keys}
    check(made(family), changes, tmp_path_factory.mktemp("changed"))


SAME_MEANING: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "the rotation": ("llama2", {"rope_scaling": _YARN, "rope_parameters": ROPES[1], "rope_theta": 333.0}),
    "the rotation, with its theta": ("qwen2", {"rope_scaling": ROPES[7], "rope_parameters": ROPES[1]}),
    "the rotation of layers without a window": ("gemma3", {"rope_scaling": _YARN, "rope_theta": 333.0}),
    "the rotation's type": ("mistral", {"rope_parameters": ROPES[6], "rope_theta": 333.0}),
    "theta": ("qwen3", {"rope_parameters": {**_YARN, "rope_theta": 700.0}, "rope_theta": 333.0}),
    "the part that is turned": ("minimax_m2", {"rotary_dim": 8, "partial_rotary_factor": 0.25}),
    "the number of experts": ("qwen3_moe", {"num_experts": 6, "num_local_experts": 6}),
    "the activation": ("gemma2", {"hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh"}),
    "windows": ("qwen2_sliding", {"layer_types": KEYS["layer_types"][0], "max_window_layers": 0}),
}


@pytest.mark.parametrize("name", SAME_MEANING)
def test_two_keys_with_the_same_meaning_have_the_precedence_of_transformers(
    name: str, made: Any, tmp_path: Path
) -> None:
    """In whatever order they come. Each of these models is loaded, and none refused."""
    family, changes = SAME_MEANING[name]
    for order in permutations(changes):
        assert check(made(family), {key: changes[key] for key in order}, tmp_path), order


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("inside", [True, False])
def test_the_head_of_a_multimodal_model_is_tied_as_the_whole_model_says(
    whole: bool, inside: bool, tmp_path: Path
) -> None:
    text = {**COMMON, "model_type": "gemma3_text", "tie_word_embeddings": inside}
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2, "image_size": 28}
    vision = {"model_type": "siglip_vision_model", "num_hidden_layers": 1, **sizes}
    config = transformers.Gemma3Config(text_config=text, vision_config=vision, tie_word_embeddings=whole)
    model = transformers.Gemma3ForConditionalGeneration(config).eval()
    model.save_pretrained(tmp_path)
    with torch.inference_mode():
        expected = model(torch.tensor([PROMPT])).logits[0, -1].float()
    found = load_runner(tmp_path).logits(StepPlan((RequestByHand(PROMPT, range(5)).chunk(),)))[0]
    assert torch.allclose(found, expected, atol=1e-4)


@pytest.mark.parametrize(
    ("family", "changes", "said"),
    [
        ("qwen3_moe", {"num_experts": 6, "num_local_experts": 4}, "num_experts is 6 and num_local_experts 4"),
        (
            "gpt_oss",
            {"num_experts_per_tok": 2, "experts_per_token": 3},
            "num_experts_per_tok is 2 and experts_per",
        ),
        ("llama2", {"hidden_act": "silu", "hidden_activation": "gelu_tanh"}, "are different activations"),
        ("llama2", {"rope_scaling": _YARN, "rope_parameters": ROPES[1]}, "lacks their rope_theta 700.0"),
        ("llama2", {"partial_rotary_factor": 0.5}, "has partial_rotary_factor, which"),
        ("llama2", {"rope_parameters": ROPES[2]}, "rotates whole heads"),
        (
            "mixtral",
            {"norm_topk_prob": False},
            "norm_topk_prob is False, which is not supported: expected True",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_keys_that_contradict_each_other_or_the_family_are_refused(
    family: str, changes: dict[str, Any], said: str, made: Any, tmp_path: Path
) -> None:
    raw = json.loads((made(family) / "config.json").read_text())
    raw.pop("rope_theta", None)
    (tmp_path / "config.json").write_text(json.dumps({**raw, **changes}))
    (tmp_path / "model.safetensors").symlink_to(made(family) / "model.safetensors")
    with pytest.raises(ModelLoadError, match=said):
        load_runner(tmp_path)
