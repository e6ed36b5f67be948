"""A config.json with values that no model has is refused, with the key and what was expected."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.base.errors import ModelLoadError
from engine.model_config.config import ModelConfig
from engine.model_config.encoder import EncoderConfig

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "vocab_size": 100, "hidden_size": 64, "intermediate_size": 128,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": False,
}  # fmt: skip
QWEN: dict[str, Any] = {**LLAMA, "architectures": ["Qwen3ForCausalLM"], "head_dim": 16}
MISTRAL: dict[str, Any] = {**LLAMA, "architectures": ["MistralForCausalLM"], "sliding_window": 32}
XLM_R: dict[str, Any] = {
    "architectures": ["XLMRobertaModel"], "vocab_size": 100, "hidden_size": 64, "intermediate_size": 128,
    "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 512, "layer_norm_eps": 1e-5,
    "hidden_act": "gelu", "type_vocab_size": 1, "pad_token_id": 1,
}  # fmt: skip
NAN, INFINITE = float("nan"), float("inf")
LINEAR = {"rope_type": "linear", "factor": 2.0}
COUNTS = ("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "vocab_size", "hidden_size",
          "intermediate_size", "max_position_embeddings", "head_dim")  # fmt: skip
NO_COUNT: tuple[Any, ...] = (
    0,
    -1,
    10**9 * 10,
    2**40,
    10**400,
    1.5,
    NAN,
    INFINITE,
    -INFINITE,
    "2",
    "many",
    True,
    [[]],
    [-1],
)
NO_EPSILON = (0, 0.0, -1e-5, 2, NAN, INFINITE, "1e-5", True)
NO_BASE = (0, -1, -10000.0, NAN, INFINITE, "1e4", 1e300)
NO_FLAG = ("false", "true", "", 2, -1, 0.0, NAN, "no")


@pytest.mark.parametrize(
    ("model", "key", "value"),
    [
        *((QWEN, key, value) for key in COUNTS for value in NO_COUNT),
        *((MISTRAL, "sliding_window", value) for value in NO_COUNT),
        *((LLAMA, "rms_norm_eps", value) for value in NO_EPSILON),
        *((LLAMA, "rope_theta", value) for value in NO_BASE),
        *((LLAMA, "tie_word_embeddings", value) for value in NO_FLAG),
        *((LLAMA, "attention_bias", value) for value in NO_FLAG),
    ],
)
def test_a_value_that_no_model_has_is_refused(model: dict[str, Any], key: str, value: Any) -> None:
    with pytest.raises(ModelLoadError, match=f"{key} = .*; expected (an integer|a number|true or false)"):
        ModelConfig.from_json({**model, key: value}, {}, "config.json")


@pytest.mark.parametrize("value", [0, -1, NAN, INFINITE, "2", True, 1e300])
@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
def test_a_rotation_that_no_model_has_is_refused(key: str, value: Any) -> None:
    with pytest.raises(ModelLoadError, match=f"{key}.factor = .*; expected a number"):
        ModelConfig.from_json({**LLAMA, key: {**LINEAR, "rope_theta": 1e4, "factor": value}}, {}, "config.json")


@pytest.mark.parametrize("key", [*COUNTS[:-1], "type_vocab_size"])
@pytest.mark.parametrize("value", [-1, 2**40, INFINITE, "2"])
def test_an_encoders_values_are_bounded_too(key: str, value: Any, tmp_path: Path) -> None:
    if key == "num_key_value_heads":
        return
    (tmp_path / "config.json").write_text(json.dumps({**XLM_R, key: value}))
    with pytest.raises(ModelLoadError, match=f"{key} = .*; expected an integer"):
        EncoderConfig.from_directory(tmp_path)


def test_null_counts_as_a_missing_key() -> None:
    model = ModelConfig.from_json({**LLAMA, "head_dim": None, "num_key_value_heads": None}, {}, "config.json")
    assert (model.head_dim, model.num_kv_heads) == (16, 4)
    assert ModelConfig.from_json({**LLAMA, "tie_word_embeddings": 0}, {}, "config.json").tied_embeddings is False


scalars = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=4))
values = st.recursive(
    scalars, lambda v: st.lists(v, max_size=3) | st.dictionaries(st.text(max_size=4), v, max_size=3), max_leaves=4
)


@given(st.sampled_from([LLAMA, QWEN, MISTRAL]), st.dictionaries(st.sampled_from(sorted(
    {*QWEN, "rope_scaling", "rope_parameters", "sliding_window", "eos_token_id", "layer_types", "hidden_act",
     "quantization_config", "torch_dtype", "text_config", "attention_bias"} - {"architectures"}
)), values | st.just(LINEAR), max_size=3))  # fmt: skip
def test_any_config_gives_a_model_or_an_error_with_a_reason(
    model: dict[str, Any], changes: dict[str, Any]
) -> None:
    try:
        read = ModelConfig.from_json({**model, **changes}, {}, "config.json")
    except ModelLoadError:
        return
    assert 1 <= read.num_layers <= 4096 and read.num_parameters > 0
