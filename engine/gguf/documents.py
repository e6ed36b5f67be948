"""The content of a GGUF file, as the JSON files that the directory of the same model would have.

    model.gguf ─▶ model.gguf/config.json               what the model computes
                  model.gguf/generation_config.json    which tokens end a text, and what its makers recommend
                  model.gguf/modules.json, ...          that it was made for embeddings, if it was

`parse_json` looks here for a path within a GGUF file, so readers of a model's JSON files need not know its form.
"""

from __future__ import annotations

import copy
import errno
import functools
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from engine.base.errors import ModelLoadError
from engine.gguf.config import config_of
from engine.gguf.files import SUFFIX, GGUFModel, read_model
from engine.gguf.vocabulary import GGUFVocabulary

_SAMPLING = "general.sampling."
_RECOMMENDED = {"temp": "temperature", "penalty_repeat": "repetition_penalty"}
"""Names of some recommendations in generation_config.json."""
_POOLING = (None, "mean", "cls", "lasttoken", "rank")
"""Meanings of the values of the key pooling_type."""


def is_gguf(path: Path) -> bool:
    """Whether a path is that of a GGUF file, and not of a directory."""
    return path.suffix == SUFFIX and path.is_file()


def containing_gguf(path: Path) -> Path | None:
    """Return the GGUF file that contains a path such as model.gguf/config.json; None if none does."""
    return next((parent for parent in path.parents if is_gguf(parent)), None)


def gguf_document(model: Path, name: str) -> Any:
    """Return the content of the JSON file of this name that follows from a GGUF file.

    Raises FileNotFoundError if there is no such file, OSError, ModelLoadError.
    """
    state = model.stat()
    found = _document(model, name, state.st_mtime_ns, state.st_size) if name in _MAKERS else None
    if not found:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(model / name))
    return copy.deepcopy(found)


@functools.lru_cache(maxsize=32)
def _document(model: Path, name: str, _mtime_ns: int, _size: int) -> Any:
    """Return a document. It is small; the vocabulary that was read to make it is not."""
    return _MAKERS[name](read_model(model))


def _generation_config(model: GGUFModel) -> dict[str, Any]:
    """Return the tokens that end a text, and the sampling that the model's makers recommend."""
    document: dict[str, Any] = {}
    for key, value in model.metadata.items():
        if key.startswith(_SAMPLING):
            name = key.removeprefix(_SAMPLING)
            # Stored in 32 bits; the leading decimals are the original ones.
            document[_RECOMMENDED.get(name, name)] = float(f"{value:.6g}") if isinstance(value, float) else value
    document["eos_token_id"] = sorted(GGUFVocabulary.of(model.metadata).end_ids())
    return document


def _modules(model: GGUFModel) -> list[dict[str, str]]:
    """Return sentence-transformers' modules of a model made for embeddings; none for other models."""
    if _pooling(model) is None:
        return []
    return [{"type": "Transformer", "path": ""}, {"type": "Pooling", "path": "1_Pooling"}]


def _pooling_config(model: GGUFModel) -> dict[str, str]:
    mode = _pooling(model)
    return {} if mode is None else {"pooling_mode": mode}


def _pooling(model: GGUFModel) -> str | None:
    key = f"{model.metadata.get('general.architecture')}.pooling_type"
    value = model.metadata.get(key, 0)
    if type(value) is not int or value not in range(len(_POOLING)):
        raise ModelLoadError(f"{key} is {str(value)[:40]}; expected 0 to {len(_POOLING) - 1}")
    return _POOLING[value]


_MAKERS: Mapping[str, Callable[[GGUFModel], Any]] = {
    "config.json": config_of,
    "generation_config.json": _generation_config,
    "modules.json": _modules,
    "1_Pooling/config.json": _pooling_config,
}
