"""Blocks stay as they are in the native kernels' memory: the same results, from fewer bytes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.base.errors import ModelLoadError
from engine.gguf.files import read_model
from engine.gguf.types import TYPES
from engine.layers.grouped_linear import GroupedLinear, joined
from engine.loading.gguf_blocks import GROUPINGS, coded, widened
from engine.loading.load_model import load_model
from engine.loading.weights import load_decoder
from engine.model_config.config import ModelConfig
from engine.models.decoder import Decoder
from engine.models.native_decoder import NativeDecoder
from engine.runner.model_runner import ModelRunner
from engine.settings.config import EngineConfig
from engine.values.plan import StepPlan
from tests.engine.support.gguf_models import Kinds, random_blocks, write_gguf
from tests.engine.support.oracle import random_ids, save_tiny
from tests.engine.support.steps_by_hand import RequestByHand

QUANTIZED = {kind.name: number for number, kind in TYPES.items() if not kind.is_plain}
PROMPT = random_ids(7, 60)


@given(
    names=st.lists(st.sampled_from(sorted(QUANTIZED)), min_size=1, max_size=3),
    outputs=st.integers(1, 9),
    blocks=st.integers(1, 3),
    seed=st.integers(0, 2**16),
)
@settings(max_examples=60, deadline=None)
def test_any_types_together_are_kept_as_they_are(names: list[str], outputs: int, blocks: int, seed: int) -> None:
    """Projections of any types are rows of one layer, whose numbers are theirs, bit for bit."""
    inputs = 256 * blocks
    layer = GroupedLinear(
        torch.nn.Linear(inputs, len(names) * outputs, bias=False, device="meta"),
        joined(GROUPINGS[name] for name in names),
    )
    layer.allocate(torch.device("cpu"))
    expected = []
    for place, name in enumerate(names):
        kind = TYPES[QUANTIZED[name]]
        raw = torch.from_numpy(
            random_blocks(gguf.GGMLQuantizationType(QUANTIZED[name]), outputs, inputs, seed=seed)
        )
        layer.put(slice(place * outputs, (place + 1) * outputs), coded(raw, kind))
        expected.append(widened(raw, kind, torch.float32))
    assert torch.equal(layer.dequantized(), torch.cat(expected))
    if len(set(names)) == 1 and GROUPINGS[names[0]].bits == 4:
        least, most = (0, 15) if GROUPINGS[names[0]].has_leasts else (-8, 7)
        assert least <= layer.codes.min() and layer.codes.max() <= most


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama whose rows have whole blocks of 256 numbers, and whose queries' numbers are in another order."""
    return save_tiny(
        "llama2",
        tmp_path_factory.mktemp("wide"),
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=4,
        initializer_range=0.05,
        tie_word_embeddings=True,
    )


def loaded(path: Path, keeps: bool, **settings: Any) -> ModelRunner:
    """The model as an engine loads it, or with blocks that are widened as for other kernels."""

    def load(*arguments: Any, keeps_blocks: bool, **options: Any) -> Decoder:
        return load_decoder(*arguments, **options, keeps_blocks=keeps_blocks and keeps)

    config = EngineConfig(model=str(path), kv_pages=64, threads=1, max_model_len=128, **settings)
    return load_model(config, load_weights=load)


def logits(runner: ModelRunner) -> torch.Tensor:
    """The logits after a prompt, and those of three decodes beside another prompt."""
    first, second = RequestByHand(PROMPT, range(20)), RequestByHand(PROMPT[::-1], range(20, 40))
    found = [runner.logits(StepPlan((first.chunk(),))).clone()]
    for number in (20, 1, 1):
        first.request.tokens.append(int(found[-1][0].argmax()))
        found.append(runner.logits(StepPlan((first.chunk(), second.chunk(number)))).clone()[:1])
    return torch.cat(found)


def memory(path: Path, dtype: torch.dtype, keeps: bool) -> int:
    """Bytes of a native decoder's weights."""
    config = ModelConfig.from_directory(path)
    decoder = load_decoder(path, config, dtype, torch.device("cpu"), keeps_blocks=keeps)
    return NativeDecoder(decoder, dtype).weight_bytes


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "kinds",
    [
        {"blk": Kind.Q4_1, "token_embd": Kind.Q8_0},
        {"attn_v": Kind.Q6_K, "ffn_down": Kind.Q6_K, "blk": Kind.Q4_K, "token_embd": Kind.Q6_K},
        {"attn_k": Kind.BF16, "ffn_up": Kind.Q4_0, "blk": Kind.Q5_1, "token_embd": Kind.Q4_0},
    ],
    ids=["Q4_1", "Q4_K_M", "mixed"],
)
def test_results_are_those_of_widened_weights(wide: Path, tmp_path: Path, kinds: Kinds, dtype: str) -> None:
    """Bit for bit, also where projections of one layer have different types, or one of them is plain."""
    path = write_gguf(wide, tmp_path / "model.gguf", kinds)
    ours, expected = (logits(loaded(path, keeps, dtype=dtype)) for keeps in (True, False))
    assert torch.equal(ours, expected)
    assert expected.std() > 0.01


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_scaled_embeddings_and_norms_of_another_type_are_those_of_widened_weights(
    tmp_path: Path, dtype: str
) -> None:
    """Gemma's norms are float32 beside matrices of bfloat16."""
    options = {"query_pre_attn_scalar": 32, "tie_word_embeddings": True}
    directory = save_tiny("gemma2", tmp_path / "model", **options)
    path = write_gguf(directory, tmp_path / "model.gguf", {"token_embd": Kind.Q8_0, "blk": Kind.Q4_0})
    ours, expected = (logits(loaded(path, keeps, dtype=dtype)) for keeps in (True, False))
    assert torch.equal(ours, expected)
    by_torch = logits(loaded(path, False, dtype=dtype, attention="reference"))
    assert (expected - by_torch).abs().max() < (1e-3 if dtype == "float32" else 0.1) * by_torch.abs().max()


def test_memory_is_smaller(wide: Path, tmp_path: Path) -> None:
    """Of 16 bits, five are left in layers; of the table's 2 x 16, for it and the head, eight and a half."""
    path = write_gguf(wide, tmp_path / "model.gguf", {"blk": Kind.Q4_1, "token_embd": Kind.Q8_0})
    for dtype, factor in ((torch.float32, 6.2), (torch.bfloat16, 3.1)):
        assert memory(path, dtype, keeps=True) * factor < memory(path, dtype, keeps=False)


def test_rounding_again_is_only_done_where_it_is_asked_for(wide: Path, tmp_path: Path) -> None:
    path = write_gguf(wide, tmp_path / "model.gguf", {"blk": Kind.Q4_1})
    rounded = logits(loaded(path, True, dtype="float32", quantization="int8"))
    kept = logits(loaded(path, True, dtype="float32"))
    assert 0 < (rounded - kept).abs().max() < 0.1 * kept.abs().max()


def test_scales_that_are_no_numbers_are_refused(wide: Path, tmp_path: Path) -> None:
    path = write_gguf(wide, tmp_path / "model.gguf", {"blk.1.ffn_down": Kind.Q4_0})
    [at] = (
        tensor.offset for tensor in read_model(path).tensors.values() if tensor.name == "blk.1.ffn_down.weight"
    )
    content = bytearray(path.read_bytes())
    content[at : at + 2] = b"\x00\x7c"
    path.write_bytes(content)
    with pytest.raises(ModelLoadError, match=r"layers.1.mlp.down_proj.weight has scales that are infinite"):
        loaded(path, True)
