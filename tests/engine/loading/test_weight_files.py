"""Which files of a directory are a model's weights."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from engine.base.errors import ModelLoadError
from engine.model_files.weight_files import weight_files

SHARDS = [f"model-{number:05}-of-00003.safetensors" for number in (1, 2, 3)]


def create(directory: Path, *names: str) -> None:
    for name in names:
        (directory / name).touch()


def index(directory: Path, *names: str) -> None:
    content = {"weight_map": {f"tensor.{number}": name for number, name in enumerate(names)}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(content))


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
