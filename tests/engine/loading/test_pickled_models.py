"""Models whose weights torch has saved: the same answers as with safetensors, from directories and the hub."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import pytest
import torch
import transformers
from huggingface_hub import save_torch_state_dict
from safetensors.torch import load_file

from engine.base.errors import ModelLoadError
from engine.loading.check_model import check_model
from engine.loading.load_encoder import load_encoder_weights
from engine.loading.unused import Unused
from engine.loading.unused_tensors import unused_encoder_tensors
from engine.loading.weights import load_decoder
from engine.model_config.config import ModelConfig
from engine.model_config.encoder import EncoderConfig
from engine.model_files.model_directory import demo_model_path, fingerprint, resolve_model
from engine.program.llm import LLM
from engine.settings.config import EngineConfig
from engine.values.sampling_params import SamplingParams
from tests.engine.support.encoders import save_encoder
from tests.engine.support.model_hub import model_hub
from tests.engine.support.oracle import save_tiny

WHOLE, INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"


def one_file(model: Path) -> None:
    torch.save(load_file(model / "model.safetensors"), model / WHOLE)


def parts(model: Path) -> None:
    """As the hub's library writes them, with an index."""
    weights = load_file(model / "model.safetensors")
    save_torch_state_dict(weights, model, safe_serialization=False, max_shard_size="40KB")
    assert (model / INDEX).exists() and len(list(model.glob("pytorch_model-*.bin"))) > 2


def of_transformers(model: Path) -> None:
    """The whole state of its model: tied tensors share their memory, and the dictionary has an attribute."""
    kind = json.loads((model / "config.json").read_text())["architectures"][0]
    weights = getattr(transformers, kind).from_pretrained(model).state_dict()
    if kind == "XLMRobertaModel":  # as older versions saved it
        weights["embeddings.position_ids"] = torch.arange(130).expand((1, -1))
    torch.save(weights, model / WHOLE)


WRITERS = {"one file": one_file, "parts": parts, "transformers": of_transformers}
Writer = Callable[[Path], None]


def pickled(model: Path, write: Writer) -> Path:
    """Return a copy of a model with its weights in files from torch.save."""
    copy = Path(shutil.copytree(model, model.with_name(f"{model.name}-pickled")))
    write(copy)
    (copy / "model.safetensors").unlink()
    return copy


def assert_same(one: torch.nn.Module, other: torch.nn.Module) -> None:
    ours, theirs = one.state_dict(), other.state_dict()
    assert ours.keys() == theirs.keys() and ours
    for name, weight in ours.items():
        assert torch.equal(weight, theirs[name]), name


@pytest.mark.parametrize("write", WRITERS.values(), ids=WRITERS)
@pytest.mark.parametrize(("family", "is_tied"), [("llama3.1", False), ("qwen3", True), ("gemma3", True)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_decoder_has_the_same_weights(
    tmp_path: Path, family: str, is_tied: bool, write: Writer, dtype: Literal["float32", "bfloat16"]
) -> None:
    model = save_tiny(family, tmp_path / "model", tie_word_embeddings=is_tied)
    config = ModelConfig.from_directory(model)
    one, other = (
        load_decoder(directory, config, getattr(torch, dtype), torch.device("cpu"))
        for directory in (model, pickled(model, write))
    )
    assert_same(one, other)


@pytest.mark.parametrize("write", WRITERS.values(), ids=WRITERS)
@pytest.mark.parametrize("has_head", [False, True])
@pytest.mark.parametrize("family", ["xlm_roberta", "modernbert"])
def test_an_encoder_has_the_same_weights(tmp_path: Path, family: str, has_head: bool, write: Writer) -> None:
    model = save_encoder(family, tmp_path / "model", head=has_head)
    copy = pickled(model, write)
    config, cpu = EncoderConfig.from_directory(model), torch.device("cpu")
    one, other = (load_encoder_weights(each, config, torch.float32, cpu) for each in (model, copy))
    assert_same(one, other)
    check_model(EngineConfig(model=str(copy)))


@pytest.mark.parametrize("write", WRITERS.values(), ids=WRITERS)
def test_the_same_tokens_are_generated(tmp_path: Path, write: Writer) -> None:
    model = Path(shutil.copytree(demo_model_path(), tmp_path / "model"))
    copy = pickled(model, write)
    check_model(EngineConfig(model=str(copy)))
    params = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
    one, other = (
        LLM(str(each)).generate(["itertools.chain is"], params, progress=False)[0] for each in (model, copy)
    )
    assert one.token_ids == other.token_ids and len(one.token_ids) == 24


def test_everything_that_is_read_counts_and_nothing_else(tmp_path: Path) -> None:
    """Files with BGE-M3's other heads are listed, as they are not read."""
    model = save_encoder("xlm_roberta", tmp_path / "model")
    copy = pickled(model, of_transformers)
    (copy / "colbert_linear.pt").touch()
    config = EncoderConfig.from_directory(copy)
    tensors = unused_encoder_tensors(copy, config)
    assert sorted(tensors) == ["embeddings.position_ids", "pooler.dense.bias", "pooler.dense.weight"]
    unused = Unused.of(copy, config.unused_keys, tensors)
    assert unused.files == ("colbert_linear.pt",)
    before = fingerprint(copy)
    with (copy / WHOLE).open("r+b") as file:
        file.seek(5000)
        file.write(b"other")
    assert fingerprint(copy) != before
    (copy / "colbert_linear.pt").write_text("other")
    (model / WHOLE).touch()
    assert fingerprint(copy) != before != fingerprint(model)
    without = fingerprint(model)
    (model / WHOLE).write_text("not read")
    assert fingerprint(model) == without
    assert Unused.of(model, config.unused_keys, ()).files == (WHOLE,)


@pytest.mark.parametrize("write", WRITERS.values(), ids=WRITERS)
def test_a_repository_without_safetensors_is_downloaded_with_these_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write: Writer
) -> None:
    both = Path(shutil.copytree(demo_model_path(), tmp_path / "model"))
    only = pickled(both, write)
    write(both)
    for name in ("training_args.bin", "optimizer.pt", "code.py"):
        (both / name).touch()
        (only / name).touch()
    with model_hub(monkeypatch, tmp_path / "cache") as hub:
        hub.models.update({"someone/both": both, "someone/only": only})
        check_model(EngineConfig(model="someone/only"))
        assert not [path for path in hub.asked if path.endswith((".bin", ".safetensors"))]
        found = resolve_model("someone/only")
        wanted = {path.name for path in only.glob("pytorch_model*")}
        assert {path.name for path in found.glob("*.*") if path.suffix not in (".json", ".jinja")} >= {
            name for name in wanted if name.endswith(".bin")
        }
        assert not {"training_args.bin", "optimizer.pt", "code.py"} & {path.name for path in found.iterdir()}
        hub.asked.clear()
        there = resolve_model("someone/both")
        assert (there / "model.safetensors").exists()
        assert not [path for path in hub.asked if path.endswith(".bin")]
        hub.close()
        assert resolve_model("someone/only") == found and resolve_model("someone/both") == there
        check_model(EngineConfig(model="someone/only"))


def test_a_device_in_place_of_weights_is_refused(tmp_path: Path) -> None:
    model = pickled(save_encoder("xlm_roberta", tmp_path / "model"), one_file)
    (model / WHOLE).unlink()
    os.mkfifo(model / WHOLE)
    with pytest.raises(ModelLoadError, match=f"{WHOLE} cannot be read: it is a FIFO"):
        resolve_model(str(model))
