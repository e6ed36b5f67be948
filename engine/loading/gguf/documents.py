"""What a GGUF file says, as the JSON files that the directory of the same model would have.

    model.gguf ─▶ model.gguf/config.json               what the model computes
                  model.gguf/generation_config.json    which tokens end a text, and what its makers recommend
                  model.gguf/modules.json, ...          that it was made for embeddings, if it was

`parse_json` looks here for a path within a GGUF file, so whoever reads a model's JSON files need not know in which
form the model came.
"""

from __future__ import annotations

import errno
import functools
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from engine.loading.gguf.config import config_of
from engine.loading.gguf.files import SUFFIX, read_model
from engine.loading.gguf.vocabulary import GGUFVocabulary
from engine.models.errors import ModelLoadError

_SAMPLING = "general.sampling."
_RECOMMENDED = {"temp": "temperature", "penalty_repeat": "repetition_penalty"}
"""What generation_config.json calls some of the recommendations."""
_POOLING = (None, "mean", "cls", "lasttoken", "rank")
"""What the values of the key pooling_type mean."""


def is_gguf(path: Path) -> bool:
    """Whether a path is that of a GGUF file, and not of a directory."""
    return path.suffix == SUFFIX and path.is_file()


def containing_gguf(path: Path) -> Path | None:
    """Return the GGUF file that a path such as model.gguf/config.json lies in; None if it lies in none."""
    return next((parent for parent in path.parents if is_gguf(parent)), None)


def gguf_document(model: Path, name: str) -> Any:
    """Return the JSON file of this name that follows from a GGUF file.

    Raises FileNotFoundError if none of that name does, OSError, ModelLoadError.
    """
    state = model.stat()
    found = _documents(model, state.st_mtime_ns, state.st_size).get(name)
    if found is None:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(model / name))
    return found


@functools.lru_cache(maxsize=8)
def _documents(model: Path, _mtime_ns: int, _size: int) -> dict[str, Any]:
    """Return all documents by their names. They are small, unlike the vocabulary that was read for them."""
    read = read_model(model)
    made = {name: make(read.metadata) for name, make in _MAKERS.items()}
    made["config.json"] = config_of(read)
    return {name: document for name, document in made.items() if document}


def _generation_config(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return which tokens end a text, and how the model's makers recommend to sample."""
    document: dict[str, Any] = {}
    for key, value in metadata.items():
        if key.startswith(_SAMPLING):
            name = key.removeprefix(_SAMPLING)
            # Stored in 32 bits, of which the decimals that were meant are the first.
            document[_RECOMMENDED.get(name, name)] = float(f"{value:.6g}") if isinstance(value, float) else value
    document["eos_token_id"] = sorted(GGUFVocabulary.of(metadata).end_ids())
    return document


def _modules(metadata: Mapping[str, Any]) -> list[dict[str, str]]:
    """Return what sentence-transformers would write of a model made for embeddings; nothing for others."""
    if _pooling(metadata) is None:
        return []
    return [{"type": "Transformer", "path": ""}, {"type": "Pooling", "path": "1_Pooling"}]


def _pooling_config(metadata: Mapping[str, Any]) -> dict[str, str]:
    mode = _pooling(metadata)
    return {} if mode is None else {"pooling_mode": mode}


def _pooling(metadata: Mapping[str, Any]) -> str | None:
    key = f"{metadata.get('general.architecture')}.pooling_type"
    value = metadata.get(key, 0)
    if type(value) is not int or value not in range(len(_POOLING)):
        raise ModelLoadError(f"{key} is {str(value)[:40]}, and 0 to {len(_POOLING) - 1} was expected")
    return _POOLING[value]


_MAKERS: Mapping[str, Callable[[Mapping[str, Any]], Any]] = {
    "generation_config.json": _generation_config,
    "modules.json": _modules,
    "1_Pooling/config.json": _pooling_config,
}
