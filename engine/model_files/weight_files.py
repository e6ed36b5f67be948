"""Finds the files with the weights of a model's directory. Only safetensors files are read.

Pickled ones (pytorch_model.bin, *.pt) can run code when loaded and are rejected, except for those of layers that
draft, of which only tensors are read (`engine/loading/pickled_tensors.py`).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from pathlib import Path

from engine.base.errors import ModelLoadError
from engine.model_files.json_files import parse_json

_WHOLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_SHARD = re.compile(r"(.*)-(\d+)-of-(\d+)\.safetensors")
PICKLED = "pytorch_model.bin"
_NOT_WEIGHTS = ("adapter_", "consolidated", "optimizer", "training_")
"""Prefixes of safetensors files with other content, or with the same weights in another layout."""


def weight_files(directory: Path, names: Collection[str] | None = None) -> list[Path]:
    """Return the safetensors files of a model. Raises ModelLoadError.

    `names` are the files of the model, even if the directory lacks the weights; None: those of the directory.
    `model.safetensors` takes precedence over an index, as in transformers, which removes neither when it saves the
    other. Without both, the files there are used if they are one, or all shards of one.
    """
    there = sorted(path.name for path in directory.iterdir()) if names is None else sorted(names)
    if _WHOLE in there:
        return [directory / _WHOLE]
    if _INDEX in there:
        return _shards(directory, there)
    found = [name for name in there if name.endswith(".safetensors") and not name.startswith(_NOT_WEIGHTS)]
    if len(found) == 1 or _are_one_model(found):
        return [directory / name for name in found]
    pickled = [name for name in there if name.endswith((".bin", ".pt", ".pth"))]
    what = "none is there"
    if found:
        what = f"{', '.join(found[:3])} are neither one file nor all shards of one"
    elif pickled:
        what = f"it has only pickled weights ({', '.join(pickled[:3])}), which can run code"
    raise ModelLoadError(
        f"no safetensors weights in {directory}: {what}; expected {_WHOLE} or {_INDEX}. "
        "Use a version of the model with safetensors, or convert it with save_pretrained"
    )


def pickled_layer(directory: Path, names: Collection[str] | None = None) -> Path | None:
    """Return the pickled weights of a layer that drafts; None if there are others, or none. `names` are those of
    `weight_files`.
    """
    there = [path.name for path in directory.iterdir()] if names is None else names
    has_others = PICKLED not in there or any(name.endswith(".safetensors") for name in there)
    return None if has_others else directory / PICKLED


def _are_one_model(names: Sequence[str]) -> bool:
    """Whether these names are all shards of one model: NAME-00001-of-00003.safetensors and so on."""
    shards = [_SHARD.fullmatch(name) for name in names]
    named = [(shard[1], int(shard[2]), int(shard[3])) for shard in shards if shard is not None]
    if not named or len(named) != len(names):
        return False
    name, _, count = named[0]
    return named == [(name, number, count) for number in range(1, count + 1)]


def _shards(directory: Path, there: Collection[str]) -> list[Path]:
    path = directory / _INDEX
    try:
        names = sorted(set(parse_json(path)["weight_map"].values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelLoadError(f"{path} is not a weight index ({error!r}); download it again") from error
    for name in names:
        # A name must be a file in the index's directory, because an index must not make us read other files.
        if not isinstance(name, str) or name in ("", ".", "..") or "/" in name or "\\" in name:
            raise ModelLoadError(f"{path} names the shard {name!r}; a shard is a file in the same directory")
        if not name.endswith(".safetensors"):
            raise ModelLoadError(f"{path} names the shard {name!r}; only safetensors files are read")
    missing = [name for name in names if name not in there]
    if missing:
        raise ModelLoadError(
            f"{len(missing)} of {len(names)} weight files are missing in {directory} "
            f"({', '.join(missing[:3])}); download the model again"
        )
    return [directory / name for name in names]
