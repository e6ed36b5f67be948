"""Finds the files of a model in GGUF: one, or all parts of one that was split (NAME-00001-of-00003.gguf).

The first part has the metadata; the others have tensors, and keys that begin with "split.".
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.base.errors import ModelLoadError
from engine.gguf.reader import GGUFHeader, GGUFTensor, read_header

SUFFIX = ".gguf"
_PART = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf", re.DOTALL)
_NOT_TEXT = "mmproj"
"""Prefix of files with the vision part of a model."""


@dataclass(frozen=True, slots=True)
class GGUFModel:
    """The content of the headers of a model's files."""

    paths: tuple[Path, ...]
    metadata: Mapping[str, Any]
    """Keys of the first file; values are int, float, bool, str, or lists of one of these."""
    tensors: Mapping[str, GGUFTensor]


def read_model(path: Path) -> GGUFModel:
    """Read the headers of the model whose only or first file is `path`. Raises ModelLoadError."""
    paths = _parts(path)
    headers = [read_header(each) for each in paths]
    tensors: dict[str, GGUFTensor] = {}
    for number, (each, header) in enumerate(zip(paths, headers, strict=True)):
        _check_part(each, header, number, len(paths))
        for name, tensor in header.tensors.items():
            if name in tensors:
                raise ModelLoadError(f"{tensors[name].path} and {each} both have {name}; download the model again")
            tensors[name] = tensor
    stated = headers[0].metadata.get("split.tensors.count", len(tensors))
    if stated != len(tensors):
        raise ModelLoadError(
            f"{path} says that all parts have {str(stated)[:20]} tensors together (split.tensors.count), and they "
            f"have {len(tensors)}; download the model again"
        )
    return GGUFModel(tuple(paths), headers[0].metadata, tensors)


def first_files(directory: Path) -> list[Path]:
    """Return the only or first file of each model in GGUF in a directory."""
    found = []
    for path in sorted(directory.glob(f"*{SUFFIX}")):
        part = _PART.fullmatch(path.name)
        if not path.name.startswith((".", _NOT_TEXT)) and (part is None or int(part[2]) == 1):
            found.append(path)
    return found


def part_names(name: str) -> list[str]:
    """Return the names of all parts of a model one of whose files has this name."""
    part = _PART.fullmatch(name)
    if part is None:
        return [name]
    return [f"{part[1]}-{each:05d}-of-{part[3]}{SUFFIX}" for each in range(1, int(part[3]) + 1)] or [name]


def _parts(path: Path) -> list[Path]:
    part = _PART.fullmatch(path.name)
    if part is None:
        return [path]
    name, number, count = part[1], int(part[2]), int(part[3])
    first = path.with_name(f"{name}-00001-of-{part[3]}{SUFFIX}")
    if number != 1:
        raise ModelLoadError(f"{path} is part {number} of a model; name the first one instead: {first}")
    paths = [path.with_name(each) for each in part_names(path.name)]
    if missing := [each.name for each in paths if not each.exists()]:
        raise ModelLoadError(
            f"{len(missing)} of the {count} parts of {path} are missing next to it ({', '.join(missing[:3])}); "
            "download them"
        )
    return paths or [path]


def _check_part(path: Path, header: GGUFHeader, number: int, count: int) -> None:
    """Raise ModelLoadError unless the header says part `number` (from 0) of `count`, like the file's name."""
    part, of = header.metadata.get("split.no", 0), header.metadata.get("split.count", 0) or 1
    if (part, of) != (number, count):
        raise ModelLoadError(
            f"{path} says that it is part {str(part)[:20]} of {str(of)[:20]} (split.no, split.count), and by "
            f"its name it is part {number} of {count}, counted from 0; give the files their original names"
        )
