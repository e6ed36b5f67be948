"""Loading a model's tokenizer: never remote code, never from anywhere but the given directory."""

from __future__ import annotations

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
    from transformers import AutoTokenizer  # seconds to import: only where a tokenizer is wanted

    try:
        loaded = AutoTokenizer.from_pretrained(str(directory), trust_remote_code=False, local_files_only=True)
    except Exception as error:
        raise ValueError(
            f"no usable tokenizer in {directory}: expected tokenizer.json and tokenizer_config.json ({error})"
        ) from error
    return cast(Tokenizer, loaded)
