"""Finds the files with the weights of a model's directory: safetensors, or else those of torch.save.

The latter (pytorch_model.bin) can run code when they are unpickled, so only their tensors are read
(`engine/loading/pickled_tensors.py`), and only if there are no safetensors.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from fnmatch import fnmatchcase
from pathlib import Path

from engine.base.errors import ModelLoadError
from engine.model_files.json_files import parse_json

_WHOLE, INDEX = "model.safetensors", "model.safetensors.index.json"
_PICKLED, PICKLED_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"
_PICKLED_PARTS = "pytorch_model-*.bin"
PICKLED = (_PICKLED, _PICKLED_PARTS)
"""Patterns of the names of weights from torch.save."""
_SHARD = re.compile(r"(.*)-(\d+)-of-(\d+)\.safetensors")
_NOT_WEIGHTS = ("adapter_", "consolidated", "optimizer", "training_")
"""Prefixes of safetensors files with other content, or with the same weights in another layout."""


def weight_files(directory: Path, names: Collection[str] | None = None) -> list[Path]:
    """Return the files with a model's weights: all safetensors, or all from torch.save. Raises ModelLoadError.

    `names` are the files of the model, even if the directory lacks the weights; None: those of the directory.
    One file takes precedence over an index, as in transformers, which removes neither when it saves the other.
    Safetensors with other names are used if they are one file, or all shards of one.
    """
    there = sorted(_names_in(directory) if names is None else (name for name in names if "/" not in name))
    if _WHOLE in there:
        return [directory / _WHOLE]
    if INDEX in there:
        return _shards(directory / INDEX, "*.safetensors", there)
    found = _safetensors(there)
    if len(found) == 1 or _are_one_model(found):
        return [directory / name for name in found]
    if not found and _PICKLED in there:
        return [directory / _PICKLED]
    if not found and PICKLED_INDEX in there:
        return _shards(directory / PICKLED_INDEX, _PICKLED_PARTS, there)
    others = [name for name in there if name.endswith((".bin", ".pt", ".pth"))]
    what = "none are there"
    if found:
        what = f"{', '.join(found[:3])} are neither one file nor all shards of one"
    elif others:
        what = f"files of such names are not read ({', '.join(others[:3])})"
    raise ModelLoadError(
        f"no weights in {directory}: {what}; expected {_WHOLE}, {_PICKLED}, or the shards of {INDEX} or "
        f"{PICKLED_INDEX}. Use a version of the model with such files, or convert it with save_pretrained"
    )


def lacks_safetensors(directory: Path) -> bool:
    """Whether a model has no safetensors, so that files from torch.save are its weights."""
    there = _names_in(directory)
    return INDEX not in there and not _safetensors(there)


def _names_in(directory: Path) -> list[str]:
    return [path.name for path in directory.iterdir()]


def _safetensors(names: Sequence[str]) -> list[str]:
    return [name for name in names if name.endswith(".safetensors") and not name.startswith(_NOT_WEIGHTS)]


def _are_one_model(names: Sequence[str]) -> bool:
    """Whether these names are all shards of one model: NAME-00001-of-00003.safetensors and so on."""
    shards = [_SHARD.fullmatch(name) for name in names]
    named = [(shard[1], int(shard[2]), int(shard[3])) for shard in shards if shard is not None]
    if not named or len(named) != len(names):
        return False
    name, _, count = named[0]
    return named == [(name, number, count) for number in range(1, count + 1)]


def _shards(index: Path, pattern: str, there: Collection[str]) -> list[Path]:
    """Return the files that an index names; their names must match `pattern`."""
    directory = index.parent
    try:
        if not (names := sorted(set(parse_json(index)["weight_map"].values()))):
            raise ValueError("it names no files")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelLoadError(f"{index} is not a weight index ({error!r}); download it again") from error
    for name in names:
        # A name must be a file in the index's directory, because an index must not make us read other files.
        if not isinstance(name, str) or name in ("", ".", "..") or "/" in name or "\\" in name:
            raise ModelLoadError(f"{index} names the shard {name!r}; a shard is a file in the same directory")
        if not fnmatchcase(name, pattern):
            raise ModelLoadError(f"{index} names the shard {name!r}; only {pattern} is read")
    missing = [name for name in names if name not in there]
    if missing:
        raise ModelLoadError(
            f"{len(missing)} of {len(names)} weight files are missing in {directory} "
            f"({', '.join(missing[:3])}); download the model again"
        )
    return [directory / name for name in names]
