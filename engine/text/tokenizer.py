"""Loads a model's tokenizer, without remote code and only from the given directory or GGUF file."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol, cast

from engine.gguf.documents import is_gguf
from engine.gguf.files import read_model
from engine.gguf.tokenizer import made_of
from engine.gguf.vocabulary import GGUFVocabulary
from engine.model_files.json_files import read_object
from engine.model_files.model_directory import check_files

MAX_ADDED_TOKENS = 100_000
"""Most tokens added to the vocabulary. The library takes seconds for so many, and minutes for many more."""
MAX_TEMPLATE_CHARS = 2**20
"""Most characters of all chat templates together; the longest templates of models have a tenth of it."""
_TRIAL = "The year 2024 isn't \u00fcber: 1,000 caf\u00e9s\n\n" + "a" * 64 + " " * 64 + "1" * 64 + "!" * 64
"""A text that is encoded once after loading, because a regular expression may fail only then."""


class TokenizerPanic(ValueError):
    """The tokenizers library panicked, for example on a pattern in its own file that never ends."""


class Tokenizer(Protocol):
    """The part of a `transformers` tokenizer that Raydix uses."""

    chat_template: str | dict[str, str] | None
    """The template of conversations, or several by name."""
    eos_token_id: int | None

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of `text`."""

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Return the text of `token_ids`."""

    def convert_ids_to_tokens(self, ids: Sequence[int]) -> list[str]:
        """Return the vocabulary's own spelling of each id."""

    def apply_chat_template(self, conversation: Sequence[dict[str, str]], **options: Any) -> Any:
        """Render a conversation in the format that the model was trained on."""

    def __len__(self) -> int: ...


def load_tokenizer(directory: Path) -> Tokenizer:
    """Load the tokenizer in a model's directory or GGUF file. Raises ValueError if there is none or it cannot be
    read.
    """
    expected = "tokenizer.json and tokenizer_config.json"
    try:
        if from_gguf := is_gguf(directory):
            expected = "a GGUF file with a tokenizer"
        else:
            check_files(directory)
            _check_added(directory)
        with panics_as_errors():
            tokenizer = _of_gguf(directory) if from_gguf else _load(directory)
            if not tokenizer.encode(_TRIAL, add_special_tokens=False):  # Some classes need no file.
                raise ValueError("its vocabulary is empty")
        if not tokenizer.chat_template and not from_gguf:
            tokenizer.chat_template = _processors_template(directory)
        _check_templates(tokenizer.chat_template)
        return tokenizer
    except Exception as error:
        raise ValueError(
            f"no usable tokenizer in {directory}: expected {expected} ({error}); download the model again"
        ) from error


@contextlib.contextmanager
def panics_as_errors() -> Iterator[None]:
    """Turn a panic of the tokenizers library, which no `except Exception` catches, into a `TokenizerPanic`."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise TokenizerPanic(f"the tokenizers library gave up: {' '.join(str(error).split())[:300]}") from None


def _check_added(directory: Path) -> None:
    """Raise ValueError for more added tokens than the library can add in a reasonable time."""
    added = read_object(directory / "tokenizer.json").get("added_tokens")
    declared = read_object(directory / "tokenizer_config.json").get("added_tokens_decoder")
    _check_num_added(max(len(each) if isinstance(each, list | dict) else 0 for each in (added, declared)))


def _check_num_added(count: int) -> None:
    if count > MAX_ADDED_TOKENS:
        raise ValueError(f"it adds {count} tokens to its vocabulary, and at most {MAX_ADDED_TOKENS} are supported")


def _check_templates(templates: str | dict[str, str] | None) -> None:
    """Raise ValueError for chat templates that take too long to compile."""
    texts = templates.values() if isinstance(templates, dict) else [templates or ""]
    if (length := sum(map(len, texts))) > MAX_TEMPLATE_CHARS:
        raise ValueError(
            f"its chat templates have {length} characters, and at most {MAX_TEMPLATE_CHARS} are supported"
        )


def _of_gguf(model: Path) -> Tokenizer:
    vocabulary = GGUFVocabulary.of(read_model(model).metadata)
    _check_num_added(vocabulary.num_added())
    return cast(Tokenizer, made_of(vocabulary))


def _load(directory: Path) -> Tokenizer:
    options: Any = {"trust_remote_code": False, "local_files_only": True}
    if _is_self_contained(directory):
        from transformers.tokenization_utils_tokenizers import TokenizersBackend  # half a second to import

        return cast(Tokenizer, TokenizersBackend.from_pretrained(str(directory), **options))
    from transformers import AutoTokenizer  # This takes another second, because it imports torch.

    return cast(Tokenizer, AutoTokenizer.from_pretrained(str(directory), **options))


def _processors_template(directory: Path) -> str | None:
    """Return the template in chat_template.json, which vision models use; None if there is no such file.

    Raises ValueError for a file without a template.
    """
    path = directory / "chat_template.json"
    if not path.exists():
        return None
    template = read_object(path).get("chat_template")
    if not isinstance(template, str):
        raise ValueError(f"{path.name} holds no template: expected an object with the key chat_template")
    return template


def encoding_backend(tokenizer: Tokenizer) -> Any | None:
    """Return the `tokenizers.Tokenizer` whose ids are those of `tokenizer.encode`, or None if there is none.

    Like `encode`, it neither truncates nor pads.
    """
    if not _leaves_to_backend(tokenizer, {"encode", "_encode_plus"}):
        return None
    known = cast(Any, tokenizer)
    backend = known.backend_tokenizer
    backend.no_truncation()
    backend.no_padding()
    backend.encode_special_tokens = known.split_special_tokens
    return backend


def decoding_backend(tokenizer: Tokenizer) -> Any | None:
    """Return the `tokenizers.Tokenizer` whose texts are those of `tokenizer.decode`, or None if there is none."""
    if not _leaves_to_backend(tokenizer, {"decode", "_decode"}):
        return None
    known = cast(Any, tokenizer)
    return None if known.clean_up_tokenization_spaces else known.backend_tokenizer


def _leaves_to_backend(tokenizer: Tokenizer, methods: set[str]) -> bool:
    """Whether the tokenizer is one of `tokenizers`, and its class does not override these methods."""
    if getattr(tokenizer, "backend_tokenizer", None) is None:
        return False
    from transformers.tokenization_utils_tokenizers import TokenizersBackend  # half a second to import

    kinds = type(tokenizer).__mro__
    if TokenizersBackend not in kinds:
        return False
    subclasses = kinds[: kinds.index(TokenizersBackend)]
    return not any(vars(kind).keys() & methods for kind in subclasses)


def _is_self_contained(directory: Path) -> bool:
    """Whether tokenizer.json is the whole tokenizer, so that no class of the model's family is needed.

    True only for model types for which `AutoTokenizer` is known to use exactly these classes.
    """
    tokenizer = read_object(directory / "tokenizer_config.json")
    return (
        (directory / "tokenizer.json").exists()
        and tokenizer.get("tokenizer_class") in ("TokenizersBackend", "PreTrainedTokenizerFast")
        and "auto_map" not in tokenizer
        and read_object(directory / "config.json").get("model_type") in ("llama", "qwen3")
    )
