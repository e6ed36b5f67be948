"""Reads the JSON files of a model, which must be regular files of bounded size.

A GGUF file is read as if it were a directory: its metadata are in JSON files with the usual names.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from engine.base.errors import ModelLoadError
from engine.base.files import read_bytes
from engine.gguf.documents import containing_gguf, gguf_document

MAX_JSON_BYTES = 2**28
"""More than the largest tokenizer or index of any model."""


def parse_json(path: Path) -> Any:
    """Return the content of a file, or of its equivalent in a GGUF file. Raises OSError, ValueError."""
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
    """Return the content of a file; None if there is none. Raises ModelLoadError if it cannot be read."""
    try:
        return parse_json(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except ModelLoadError:
        raise
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"{path} is not readable JSON: {error}; download the model again") from error


def read_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file; an empty one if there is none."""
    found = read_json(path)
    return found if isinstance(found, dict) else {}
