"""Loading a model's tokenizer: never remote code, never from anywhere but the given directory."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol, cast


class Tokenizer(Protocol):
    """The part of a `transformers` tokenizer that Raydix uses."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`."""
        ...

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Text of `token_ids`."""
        ...

    def convert_ids_to_tokens(self, ids: Sequence[int]) -> list[str]:
        """The vocabulary's own spelling of each id."""
        ...

    def apply_chat_template(self, conversation: Sequence[dict[str, str]], **options: Any) -> Any:
        """The conversation as the model was trained to see it."""
        ...

    def __len__(self) -> int: ...


def load_tokenizer(directory: Path) -> Tokenizer:
    """The tokenizer in a model's directory. Raises ValueError when there is none or it cannot be read."""
    try:
        options: Any = {"trust_remote_code": False, "local_files_only": True}
        if _says_it_all(directory):
            from transformers.tokenization_utils_tokenizers import TokenizersBackend  # half a second to import

            return cast(Tokenizer, TokenizersBackend.from_pretrained(str(directory), **options))
        from transformers import AutoTokenizer  # another second: it imports torch

        return cast(Tokenizer, AutoTokenizer.from_pretrained(str(directory), **options))
    except Exception as error:
        raise ValueError(
            f"no usable tokenizer in {directory}: expected tokenizer.json and tokenizer_config.json ({error})"
        ) from error


def _says_it_all(directory: Path) -> bool:
    """Whether tokenizer.json is all of the tokenizer: then no class of the model's family is to be looked for.

    Only for model types of which it is known that `AutoTokenizer` takes these classes at their word.
    """
    tokenizer = _read(directory / "tokenizer_config.json")
    return (
        (directory / "tokenizer.json").exists()
        and tokenizer.get("tokenizer_class") in ("TokenizersBackend", "PreTrainedTokenizerFast")
        and "auto_map" not in tokenizer
        and _read(directory / "config.json").get("model_type") in ("llama", "qwen3")
    )


def _read(path: Path) -> dict[str, Any]:
    """A JSON object; empty when there is none."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}
