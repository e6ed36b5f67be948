"""Models in GGUF against the same ones as transformers computes them: every family, every type of numbers."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from gguf import GGMLQuantizationType as Kind
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from engine.base.errors import ModelLoadError
from engine.gguf.config import config_of
from engine.gguf.files import read_model
from engine.gguf.names import our_names
from engine.gguf.types import TYPES
from engine.loading import weights
from engine.loading.gguf_tensors import stored_gguf
from engine.loading.weight_streaming import stream_groups
from engine.loading.weights import load_decoder
from engine.model_config.config import ModelConfig
from engine.values.plan import StepPlan
from tests.engine.support.gguf_files import FileOfBytes, entry, key
from tests.engine.support.gguf_models import write_gguf
from tests.engine.support.oracle import MORE_FAMILIES, VOCAB, oracle_logits, random_ids, save_tiny
from tests.engine.support.steps_by_hand import RequestByHand, load_runner
from tests.support.examples import examples

PROMPT = random_ids(6, 90)
GEMMA: Mapping[str, Any] = {"query_pre_attn_scalar": 32, "tie_word_embeddings": True}
"""GGUF does not say it: it is the size of a head in all published models but the largest."""
ORIGINAL = {"original_max_position_embeddings": 64}
LONG: Mapping[str, Any] = {
    **ORIGINAL,
    "max_position_embeddings": 256,
    "rope_parameters": {**MORE_FAMILIES["phi3_long"][1]["rope_parameters"], **ORIGINAL},
}
"""A context that is four times as long as the original one, and a prompt that is longer than that."""
MODELS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "llama2": ("llama2", {}),
    "llama3.1": ("llama3.1", {}),
    "llama_linear": ("llama_linear", {}),
    "llama_biased": ("llama_biased", {}),
    "llama_tied": ("llama_tied", {}),
    "mistral": ("mistral_full", {}),
    "qwen2": ("qwen2", {}),
    "qwen2_yarn": ("qwen2_yarn", {}),
    "qwen3": ("qwen3", {}),
    "qwen3_tied": ("qwen3_tied", {}),
    "gemma2": ("gemma2", GEMMA),
    "gemma3": ("gemma3", {**GEMMA, "num_hidden_layers": 7, "sliding_window_pattern": 6}),
    "phi3": ("phi3", {}),
    "phi3_short": ("phi3_long", {"max_position_embeddings": 2048, "original_max_position_embeddings": 512}),
    "phi3_long": ("phi3_long", LONG),
    "granite": ("granite", {}),
}
"""Models by the oracle's family and what differs from it."""


@pytest.fixture(scope="module", params=MODELS)
def both(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A model as safetensors and in GGUF."""
    family, differences = MODELS[request.param]
    directory = save_tiny(family, tmp_path_factory.mktemp("model"), **differences)
    return directory, write_gguf(directory, tmp_path_factory.mktemp("gguf") / "model.gguf")


def logits(path: Path, prompt: list[int], **options: Any) -> torch.Tensor:
    """The logits after a prompt."""
    runner = load_runner(path, max_model_len=256, **options)
    return runner.logits(StepPlan((RequestByHand(prompt, range(20)).chunk(),)))[0]


def test_logits_are_those_of_the_model_that_was_converted(both: tuple[Path, Path]) -> None:
    directory, path = both
    expected = oracle_logits(directory, PROMPT, torch.float64)[-1]
    assert (logits(path, PROMPT) - expected).abs().max() < 1e-4


def test_the_configuration_is_that_of_the_model_that_was_converted(both: tuple[Path, Path]) -> None:
    """But for the rotation's form, the order of numbers, and the ends of text, which stand elsewhere in GGUF."""
    directory, path = both
    ours, theirs = ModelConfig.from_directory(path), ModelConfig.from_directory(directory)
    same = ("vocab_size", "hidden_size", "max_position_embeddings", "attention", "mlp", "tied_embeddings", "names",
            "windows", "num_parameters")  # fmt: skip
    assert {name: getattr(ours, name) for name in same} == {name: getattr(theirs, name) for name in same}
    assert ours.eos_token_ids == {VOCAB - 1}
    assert not ours.unused_keys.uncertain
    ours.unused_keys.check(ours.architecture, ())


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama whose rows have whole blocks of 256 numbers."""
    shape: dict[str, Any] = {
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
    }
    differences = {**shape, "num_key_value_heads": 4, "initializer_range": 0.05}
    return save_tiny("llama2", tmp_path_factory.mktemp("wide"), **differences)


@pytest.mark.parametrize("kind", [kind.name for kind in TYPES.values()])
def test_every_type_of_numbers(wide: Path, tmp_path: Path, kind: str) -> None:
    """The layers' matrices have one type, the embeddings and the head are Q8_0. The oracle is transformers, with
    what it reads of the same file.
    """
    kinds = {"blk": Kind[kind], "token_embd": Kind.Q8_0, "output.weight": Kind.Q8_0}
    path = write_gguf(wide, tmp_path / "model.gguf", kinds)
    expected = _as_transformers_reads(path, PROMPT)
    assert (logits(path, PROMPT) - expected).abs().max() < 1e-4
    assert expected.std() > 0.1


def test_types_may_differ_between_tensors(wide: Path, tmp_path: Path) -> None:
    kinds = {"attn_v": Kind.Q6_K, "ffn_down": Kind.Q5_1, "attn_k": Kind.BF16, "blk": Kind.Q4_0}
    path = write_gguf(wide, tmp_path / "model.gguf", kinds)
    assert (logits(path, PROMPT) - _as_transformers_reads(path, PROMPT)).abs().max() < 1e-4


def test_streamed_weights_are_those_that_are_mapped(
    wide: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU, where blocks are widened in its memory."""
    path = write_gguf(wide, tmp_path / "model.gguf", {"attn": Kind.Q4_K, "ffn": Kind.Q4_0})
    config, cpu = ModelConfig.from_directory(path), torch.device("cpu")
    mapped = load_decoder(path, config, torch.bfloat16, cpu)
    monkeypatch.setattr(
        weights, "copy_groups", lambda _, groups: stream_groups(stored_gguf(path), groups, cpu, chunk_bytes=1000)
    )
    streamed = load_decoder(path, config, torch.bfloat16, cpu)
    pairs = zip(mapped.parameters(), streamed.parameters(), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)


def test_weights_can_be_rounded_again(wide: Path, tmp_path: Path) -> None:
    """`quantization: fp8` takes the widened matrices: the same as of a model that has them as plain numbers."""
    config, cpu = ModelConfig.from_directory(wide), torch.device("cpu")
    path = write_gguf(wide, tmp_path / "model.gguf", {"blk": Kind.F32})
    plain = load_decoder(wide, config, torch.float32, cpu, fp8=True)
    ours = load_decoder(path, ModelConfig.from_directory(path), torch.float32, cpu, fp8=True)
    name = "layers.1.mlp.down_proj.weight"
    assert torch.equal(ours.state_dict()[name].float(), plain.state_dict()[name].float())
    quantized = write_gguf(wide, tmp_path / "q.gguf", {"blk": Kind.Q8_0})
    rounded = load_decoder(quantized, ModelConfig.from_directory(quantized), torch.float32, cpu, fp8=True)
    assert rounded.state_dict()[name].dtype == torch.float8_e4m3fn


def _as_transformers_reads(path: Path, prompt: list[int]) -> torch.Tensor:
    """The logits after a prompt as transformers computes them with the file."""
    config = transformers.AutoConfig.from_pretrained(path.parent, gguf_file=path.name)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
    read = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=model)["tensors"]
    model.load_state_dict(read)
    with torch.inference_mode():
        found: torch.Tensor = model.eval()(torch.tensor([prompt])).logits[0, -1]
    return found


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        (
            "llama2",
            {"attention.clamp_kqv": 8.0},
            "the file has llama.attention.clamp_kqv, which Raydix does not know",
        ),
        ("llama2", {"logit_scale": 2.0}, "llama.logit_scale"),
        ("llama2", {"expert_count": 8}, "is a mixture of experts"),
        ("llama2", {"block_count": 0}, "num_hidden_layers = 0"),
        ("llama2", {"block_count": 2**31}, "num_hidden_layers"),
        ("llama2", {"block_count": 4}, "the weights lack model.layers.3"),
        ("llama2", {"block_count": "3"}, "llama.block_count = 3; expected a count"),
        ("llama2", {"block_count": True}, "llama.block_count = True; expected a count"),
        ("llama2", {"embedding_length": 95}, r"has shape|is not"),
        ("llama2", {"attention.head_count": 0}, "num_attention_heads = 0"),
        ("llama2", {"attention.head_count": [6, 6, 3]}, "attention.head_count that differs between layers"),
        ("llama2", {"attention.value_length": 16}, "keys of 32 numbers and values of 16"),
        ("llama2", {"attention.layer_norm_rms_epsilon": float("nan")}, "rms_norm_eps = nan"),
        ("llama2", {"rope.dimension_count": 16}, "rope.dimension_count = 16, which is not supported"),
        ("llama2", {"rope.scaling.type": "su"}, "rope.scaling.type 'su'; supported are none, linear, yarn"),
        ("llama2", {"rope.scaling.attn_factor": 2.0}, "attn_factor of 2.0 without factors"),
        ("llama3.1", {"rope.scaling.type": "linear", "rope.scaling.factor": 2.0}, "expected one of both"),
        ("llama3.1", {"rope.dimension_count": 30}, r"rope_freqs.weight \[16\] as F32; expected \[15\]"),
        ("qwen3", {"rope.scaling.yarn_ext_factor": 0.5}, "qwen3.rope.scaling.yarn_ext_factor"),
        ("gemma2", {"attention.sliding_window": 0}, "sliding_window = 0"),
        ("gemma3", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
        ("gemma3", {"attention.sliding_window_pattern": [True]}, "layer_types lists 1 layers"),
    ],
)
def test_invalid_or_unknown_metadata_is_refused(
    tmp_path: Path, family: str, changes: dict[str, Any], message: str
) -> None:
    options = GEMMA if family.startswith("gemma") else {}
    path = write_gguf(save_tiny(family, tmp_path / "model", **options), tmp_path / "model.gguf", keys=changes)
    with pytest.raises(ModelLoadError, match=message):
        load_runner(path)


def test_keys_without_effect_are_ignored(tmp_path: Path) -> None:
    path = write_gguf(
        save_tiny("llama2", tmp_path / "model"), tmp_path / "model.gguf",
        keys={"expert_count": 0, "attention.causal": True, "rope.scaling.finetuned": False, "new_flag": False},
    )  # fmt: skip
    config = ModelConfig.from_directory(path)
    assert (config.unused_keys.uncertain, config.unused_keys.without_effect) == ((), ("llama.new_flag",))


def test_an_unknown_key_may_be_left_out_by_name(tmp_path: Path) -> None:
    directory = save_tiny("llama2", tmp_path / "model")
    path = write_gguf(directory, tmp_path / "model.gguf", keys={"attention.clamp_kqv": 8.0})
    found = logits(path, PROMPT, ignored_config_keys=["llama.attention.clamp_kqv"])
    assert (found - oracle_logits(directory, PROMPT)[-1]).abs().max() < 1e-4


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("block_count", "lacks the key llama.block_count"),
        ("attention.layer_norm_rms_epsilon", "lacks the key llama.attention.layer_norm_rms_epsilon"),
    ],
)
def test_a_missing_key_is_named(tmp_path: Path, key: str, message: str) -> None:
    path = write_gguf(save_tiny("llama2", tmp_path / "model"), tmp_path / "model.gguf", drop=(key,))
    with pytest.raises(ModelLoadError, match=rf"model\.gguf {message}"):
        ModelConfig.from_directory(path)


def test_other_architectures_and_tensors_are_refused(tmp_path: Path) -> None:
    def made(**changes: Any) -> Path:
        keys = [key("general.architecture", 8, changes.pop("architecture", "llama"))]
        return FileOfBytes(keys=[*keys, *changes.pop("keys", [])], **changes).write(tmp_path / "m.gguf")

    with pytest.raises(ModelLoadError, match=r"general.architecture 'mamba', which is not supported in GGUF"):
        config_of(read_model(made(architecture="mamba")))
    with pytest.raises(ModelLoadError, match=r"general.type 'adapter'"):
        config_of(read_model(made(keys=[key("general.type", 8, "adapter")])))
    with pytest.raises(ModelLoadError, match=r"lacks the key llama.embedding_length"):
        config_of(read_model(made()))
    for name in ("blk.00.attn_q.weight", "blk.0.attn_q", "model.norm.weight", "blk.0.ssm_in.weight"):
        with pytest.raises(
            ModelLoadError, match=f"holds {name}, which a model of architecture llama does not have"
        ):
            our_names(read_model(made(entries=[entry(name, [4, 2])])))


@settings(max_examples=examples(150), deadline=None)
@given(st.data())
def test_any_mutation_of_a_model_loads_or_is_refused(mutable: bytes, data: st.DataObject) -> None:
    """Whatever some bytes of the header become, there is a model or our error, and no other exception."""
    content = bytearray(mutable)
    for _ in range(data.draw(st.integers(1, 3))):
        at, width = data.draw(st.integers(0, HEADER_BYTES)), data.draw(st.sampled_from([1, 4, 8]))
        content[at : at + width] = data.draw(st.binary(min_size=width, max_size=width))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.gguf"
        path.write_bytes(content)
        try:
            config = ModelConfig.from_directory(path)
            load_decoder(path, config, torch.float32, torch.device("cpu"))
        except ModelLoadError:
            pass


HEADER_BYTES = 3000
"""Those with the keys and the first tensors of the model below."""


@pytest.fixture(scope="module")
def mutable(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A small model's file."""
    shape = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
             "num_key_value_heads": 1, "head_dim": 16}  # fmt: skip
    directory = save_tiny("llama2", tmp_path_factory.mktemp("mutable"), vocab_size=40, **shape)
    return write_gguf(directory, directory / "model.gguf", {"blk": Kind.Q4_0}).read_bytes()
