"""Which files of a directory are a model's weights."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from engine.base.errors import ModelLoadError
from engine.model_files.weight_files import PICKLED_INDEX, lacks_safetensors, weight_files

SHARDS = [f"model-{number:05}-of-00003.safetensors" for number in (1, 2, 3)]


def create(directory: Path, *names: str) -> None:
    for name in names:
        (directory / name).touch()


def index(directory: Path, *names: str, name: str = "model.safetensors.index.json") -> None:
    content = {"weight_map": {f"tensor.{number}": each for number, each in enumerate(names)}}
    (directory / name).write_text(json.dumps(content))


def names(directory: Path) -> list[str]:
    return [path.name for path in weight_files(directory)]


@pytest.mark.parametrize("are_there", [True, False])
def test_one_file_counts_before_an_index_of_older_shards(are_there: bool, tmp_path: Path) -> None:
    """transformers reads the file: it leaves an index of an earlier save in place."""
    index(tmp_path, *SHARDS)
    create(tmp_path, "model.safetensors", *(SHARDS if are_there else ()))
    assert names(tmp_path) == ["model.safetensors"]


def test_an_index_names_its_shards(tmp_path: Path) -> None:
    index(tmp_path, *SHARDS)
    create(tmp_path, *SHARDS, "other.safetensors")
    assert names(tmp_path) == SHARDS


@pytest.mark.parametrize(
    "found", [["qwen-tuned.safetensors"], SHARDS, ["model-00001-of-00001.safetensors"]], ids=len
)
def test_without_an_index_the_only_file_or_all_shards_are_used(found: list[str], tmp_path: Path) -> None:
    create(tmp_path, *found, "adapter_model.safetensors", "consolidated.safetensors", "optimizer.safetensors")
    assert names(tmp_path) == found


@pytest.mark.parametrize(
    "found",
    [SHARDS[:2], SHARDS[1:], ["a.safetensors", "b.safetensors"], [*SHARDS, "a.safetensors"]],
    ids=["the last is missing", "the first is missing", "two files", "one too many"],
)
def test_files_that_are_no_whole_are_named(found: list[str], tmp_path: Path) -> None:
    create(tmp_path, *found)
    with pytest.raises(ModelLoadError, match=f"{found[0]}, {found[1]}.* neither one file nor all shards of one"):
        names(tmp_path)


PARTS = [f"pytorch_model-{number:05}-of-00002.bin" for number in (1, 2)]


def test_files_of_torch_save_are_used_without_safetensors_only(tmp_path: Path) -> None:
    create(tmp_path, "pytorch_model.bin", "training_args.bin", "adapter_model.safetensors", "optimizer.pt")
    assert names(tmp_path) == ["pytorch_model.bin"] and lacks_safetensors(tmp_path)
    create(tmp_path, "qwen-tuned.safetensors")
    assert names(tmp_path) == ["qwen-tuned.safetensors"] and not lacks_safetensors(tmp_path)


def test_a_set_of_safetensors_that_is_not_whole_is_no_reason_to_read_others(tmp_path: Path) -> None:
    create(tmp_path, "pytorch_model.bin", *SHARDS[:2])
    with pytest.raises(ModelLoadError, match="neither one file nor all shards of one"):
        names(tmp_path)
    index(tmp_path, *SHARDS)
    with pytest.raises(ModelLoadError, match=f"1 of 3 weight files are missing in .*{SHARDS[2]}"):
        names(tmp_path)
    assert not lacks_safetensors(tmp_path)


def test_an_index_names_its_parts_of_torch_save(tmp_path: Path) -> None:
    index(tmp_path, *PARTS, name=PICKLED_INDEX)
    create(tmp_path, PARTS[0], "pytorch_model-00001-of-00001.bin")
    with pytest.raises(ModelLoadError, match=f"1 of 2 weight files are missing in .*{PARTS[1]}"):
        names(tmp_path)
    create(tmp_path, PARTS[1])
    assert names(tmp_path) == PARTS
    create(tmp_path, "pytorch_model.bin")
    assert names(tmp_path) == ["pytorch_model.bin"], "transformers takes it first"


@pytest.mark.parametrize("part", ["../pytorch_model-1.bin", "training_args.bin", "model.safetensors", "/x/y.bin"])
def test_an_index_of_torch_save_names_only_parts(tmp_path: Path, part: str) -> None:
    index(tmp_path, part, name=PICKLED_INDEX)
    with pytest.raises(ModelLoadError, match=r"a shard is a file in the same|only pytorch_model-\*\.bin is read"):
        names(tmp_path)


def test_files_in_folders_of_a_repository_are_not_a_model_s(tmp_path: Path) -> None:
    there = ["onnx/model.safetensors", "old/pytorch_model.bin", "pytorch_model.bin"]
    assert weight_files(tmp_path, there) == [tmp_path / "pytorch_model.bin"]
