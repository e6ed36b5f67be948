"""Checks that two models have the same vocabulary."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from engine.base.errors import ModelLoadError
from engine.gguf.documents import is_gguf
from engine.model_config.config import ModelConfig
from engine.text.tokenizer import load_tokenizer

logger = logging.getLogger(__name__)


def check_same_vocabulary(model: str, directory: Path, draft: str, draft_directory: Path) -> None:
    """Raise ModelLoadError if the draft model's token ids differ from the model's.

    Compares the sizes of the vocabularies and the token-to-id maps of tokenizer.json or of GGUF files, with added
    tokens. The models' names are for the message.
    """
    size = ModelConfig.from_directory(directory).vocab_size
    draft_size = ModelConfig.from_directory(draft_directory).vocab_size
    if size != draft_size:
        raise _another_vocabulary(model, draft, f"it has {draft_size} tokens, not {size}")
    ids, draft_ids = _token_ids(directory), _token_ids(draft_directory)
    if ids is None or draft_ids is None:
        logger.warning("%s and %s have no tokenizer.json to compare: assuming one vocabulary", model, draft)
        return
    differing = sorted(token for token in ids.keys() | draft_ids.keys() if ids.get(token) != draft_ids.get(token))
    if differing:
        first = differing[0]
        raise _another_vocabulary(
            model,
            draft,
            f"{len(differing)} tokens have other ids, among them {first!r}: {_said(draft_ids, first)} instead of "
            f"{_said(ids, first)}",
        )


def _another_vocabulary(model: str, draft: str, difference: str) -> ModelLoadError:
    return ModelLoadError(
        f"the draft model {draft} has another vocabulary than {model}: {difference}; name a smaller model of the "
        'same family in speculation.model, or set speculation.method to "ngram", which needs none'
    )


def _said(ids: dict[str, int], token: str) -> str:
    return str(ids.get(token, "none"))


def _token_ids(directory: Path) -> dict[str, int] | None:
    if is_gguf(directory):
        backend: Any = load_tokenizer(directory)
        return dict(backend.get_vocab())
    path = directory / "tokenizer.json"
    if not path.exists():
        return None
    from tokenizers import Tokenizer  # Import it only where there is something to compare.

    try:
        ids: dict[str, int] = Tokenizer.from_file(str(path)).get_vocab(with_added_tokens=True)
    except Exception as error:
        raise ModelLoadError(f"{path} cannot be read as a tokenizer: {' '.join(str(error).split())}") from None
    return ids
