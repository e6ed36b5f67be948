"""Reads the JSON files of a model: regular files of bounded size, whatever they hold.

A GGUF file is read as if it were a directory: what its metadata say is in the JSON files of their usual names.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from engine.base.errors import ModelLoadError
from engine.base.files import read_bytes
from engine.gguf.documents import containing_gguf, gguf_document

MAX_JSON_BYTES = 2**28
"""More than the largest tokenizer or index that any model has."""


def parse_json(path: Path) -> Any:
    """Return what a file holds, or what stands in its place in a GGUF file. Raises OSError, ValueError."""
    if (model := containing_gguf(path)) is not None:
        return gguf_document(model, path.relative_to(model).as_posix())
    content = read_bytes(path, MAX_JSON_BYTES)
    if not content.strip():
        raise ValueError("it is empty")
    try:
        return json.loads(content)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def read_json(path: Path) -> Any:
    """Return what a file holds; None if there is none. Raises ModelLoadError for one that cannot be read."""
    try:
        return parse_json(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except ModelLoadError:
        raise
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"{path} is not readable JSON: {error}; download the model again") from error


def read_object(path: Path) -> dict[str, Any]:
    """Return the JSON object that a file holds; an empty one if it holds none."""
    found = read_json(path)
    return found if isinstance(found, dict) else {}
