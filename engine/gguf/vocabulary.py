"""A tokenizer's data in the metadata of a GGUF file, all checked because files come from anywhere.

tokens        "Ġthe"  "<|im_end|>"  "[PAD7]"      merges   "Ġ t", "h e", ...    of BPE
token_type    normal   control       unused       scores   -3.5, -7.1, ...      of SentencePiece
"""

# ruff: noqa: RUF001 - the letters of real special tokens

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from engine.base.errors import ModelLoadError

MODELS = ("gpt2", "llama", "t5", "gemma4")
"""The kinds of tokenizers that are known, by their names in tokenizer.ggml.model."""
MAX_TOKENS, MAX_MERGES = 2**20, 2**22
"""Four times the largest vocabulary of any model, and its possible merges."""
MAX_TOKEN_CHARS, MAX_VOCABULARY_CHARS = 1024, 2**24
"""Most characters of one token and of all, because a token may be split at each of its characters."""
MAX_TEMPLATES = 64
_GGML = "tokenizer.ggml."
_TEMPLATE = "tokenizer.chat_template"
_IDS = {
    "bos": "bos_token_id",
    "eos": "eos_token_id",
    "eot": "eot_token_id",
    "eom": "eom_token_id",
    "unk": "unknown_token_id",
    "pad": "padding_token_id",
    "sep": "seperator_token_id",
    "mask": "mask_token_id",
}
"""Keys of special tokens. One of them is misspelled in the format."""
_LLAMA_IDS = {"bos": 1, "eos": 2, "unk": 0}
"""Defaults of files of SentencePiece models."""
_T5_IDS = {"eos": 1, "unk": 2, "pad": 0}
_ENDS = frozenset(
    [
        *("<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<|im_end|>", "<|endoftext|>", "<|end|>"),
        *("<|return|>", "<|call|>", "<end_of_turn>", "<eos>", "<turn|>", "<|tool_response>", "</s>"),
        *("<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<end_of_utterance>", "<｜end▁of▁sentence｜>"),
    ]
)
"""Control tokens that always end a text. Files name one end token, but models have several."""
_CHANNELS, _TOOL_ANSWER = {"<|return|>", "<|call|>"}, "<|tool_response>"


class TokenType(IntEnum):
    """The purpose of a token."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    """Found in texts first, and part of the decoded text."""
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True, slots=True)
class GGUFVocabulary:
    """A tokenizer's tokens, and the rules by which texts become tokens."""

    model: str
    """One of `MODELS`."""
    pre: str | None
    """The name of the rule that first splits texts; None if the file names none."""
    architecture: str
    tokens: Sequence[str]
    types: Sequence[TokenType]
    scores: Sequence[float] | None
    merges: Sequence[tuple[str, str]] | None
    ids: Mapping[str, int]
    """Ids of special tokens by their roles: "bos", "eos", "eot", "eom", "unk", "pad", "sep", "mask"."""
    flags: Mapping[str, bool]
    """The file's values of "add_bos_token", "add_eos_token", "add_space_prefix", "remove_extra_whitespaces"."""
    charsmap: bytes
    """SentencePiece's compiled normalization of characters; empty for none."""
    templates: Mapping[str, str]
    """Chat templates by name; that without a name is the "default"."""

    @classmethod
    def of(cls, metadata: Mapping[str, Any]) -> GGUFVocabulary:
        """Read a file's metadata. Raises ModelLoadError."""
        read = _Reader(metadata)
        model = read.value(f"{_GGML}model", str)
        if model not in MODELS:
            stated = "no tokenizer" if model is None else f"the tokenizer {_short(model)} (tokenizer.ggml.model)"
            raise ModelLoadError(f"the file has {stated}; supported are {', '.join(MODELS)}")
        architecture = read.value("general.architecture", str) or ""
        tokens = _tokens(read, spells_spaces=architecture.startswith("gemma") and model != "gpt2")
        types = _types(read, tokens)
        ids = _ids(read, model, tokens, types)
        return cls(
            model=model,
            pre=read.value(f"{_GGML}pre", str),
            architecture=architecture,
            tokens=tokens,
            types=types,
            scores=_scores(read, model, tokens),
            merges=_merges(read, model, tokens),
            ids=ids,
            flags=_flags(read, ids),
            charsmap=_charsmap(read),
            templates=_templates(read, metadata),
        )

    def end_ids(self) -> frozenset[int]:
        """Return all tokens that end a text: those that the file names, and control tokens known to do so."""
        ends = {
            token: number
            for number, (token, kind) in enumerate(zip(self.tokens, self.types, strict=True))
            if token in _ENDS and kind in (TokenType.CONTROL, TokenType.USER_DEFINED)
        }
        if ends.keys() >= _CHANNELS:  # Each ends a message; after <|end|> another follows.
            ends.pop("<|end|>", None)
        if _TOOL_ANSWER in ends:  # its vocabulary has </s> for HTML
            ends.pop("</s>", None)
        named = (self.ids[role] for role in ("eos", "eot", "eom") if role in self.ids)
        return frozenset(ends.values()).union(named)

    def num_added(self) -> int:
        """Return how many tokens are found in texts first."""
        return len(self.special_ids()) + sum(kind is TokenType.USER_DEFINED for kind in self.types)

    def special_ids(self) -> frozenset[int]:
        """Return the tokens that are not part of a decoded text."""
        kinds = (TokenType.CONTROL, TokenType.UNKNOWN)
        return frozenset(number for number, kind in enumerate(self.types) if kind in kinds).union(
            self.ids.values()
        )


class _Reader:
    """Reads values and checks their types."""

    def __init__(self, metadata: Mapping[str, Any]) -> None:
        self._metadata = metadata

    def value(self, key: str, kind: type) -> Any:
        """Return a value; None if the file has none."""
        found = self._metadata.get(key)
        if found is not None and type(found) is not kind:
            raise ModelLoadError(f"{key} is {_short(found)}, and {_NAMES[kind]} was expected")
        return found

    def array(self, key: str, kinds: tuple[type, ...], most: int) -> list[Any] | None:
        """Return an array of at most so many values of these types; None if the file has none."""
        found = self._metadata.get(key)
        if found is None:
            return None
        expected = f"a list of at most {most} values was expected, each {_NAMES[kinds[0]]}"
        if not isinstance(found, list):
            raise ModelLoadError(f"{key} is {_short(found)}, and {expected}")
        if len(found) > most:
            raise ModelLoadError(f"{key} has {len(found)} values, and {expected}")
        for number, each in enumerate(found):
            if type(each) not in kinds:
                raise ModelLoadError(f"{key} has {_short(each)} as number {number}, and {expected}")
        return found

    def for_tokens(
        self, key: str, kinds: tuple[type, ...], num_tokens: int, is_right: Callable[[Any], bool], expected: str
    ) -> list[Any] | None:
        """Return an array with one value for each token; None if the file has none."""
        found = self.array(key, kinds, MAX_TOKENS)
        if found is None:
            return None
        if len(found) != num_tokens:
            raise ModelLoadError(
                f"{key} has {len(found)} values and tokenizer.ggml.tokens {num_tokens}: expected one for each "
                "token"
            )
        for number, each in enumerate(found):
            if not is_right(each):
                raise ModelLoadError(f"{key} has {_short(each)} for token {number}, and {expected} was expected")
        return found


_NAMES = {str: "a string", int: "an integer", float: "a number", bool: "true or false"}


def _short(value: Any) -> str:
    """Describe a value in a few words."""
    if isinstance(value, list):
        return f"a list of {len(value)}"
    return repr(value[:60] if isinstance(value, str) else value)[:80]


def _tokens(read: _Reader, *, spells_spaces: bool) -> list[str]:
    """Return the tokens. With `spells_spaces`, tokens of spaces are spelled as in the other tokens."""
    key = f"{_GGML}tokens"
    tokens = read.array(key, (str,), MAX_TOKENS)
    if not tokens:
        raise ModelLoadError(f"{key} has no tokens, and a vocabulary was expected")
    if spells_spaces:  # Converters have replaced these tokens by their meaning.
        tokens = ["▁" * len(token) if token.isspace() and token.strip(" ") == "" else token for token in tokens]
    first: dict[str, int] = {}
    total = 0
    for number, token in enumerate(tokens):
        if len(token) > MAX_TOKEN_CHARS:
            raise ModelLoadError(
                f"{key} has a token of {len(token)} characters as number {number}, and at most {MAX_TOKEN_CHARS} "
                "are supported"
            )
        total += len(token)
        if token and first.setdefault(token, number) != number:
            raise ModelLoadError(
                f"{key} has {_short(token)} twice, as numbers {first[token]} and {number}, and each token was "
                "expected once"
            )
    if total > MAX_VOCABULARY_CHARS:
        raise ModelLoadError(
            f"{key} has {total} characters, and at most {MAX_VOCABULARY_CHARS} of all tokens are supported"
        )
    return tokens


def _types(read: _Reader, tokens: Sequence[str]) -> list[TokenType]:
    known = {int(kind): kind for kind in TokenType}
    expected = f"one of {min(known)} to {max(known)}"
    types = read.for_tokens(f"{_GGML}token_type", (int,), len(tokens), known.__contains__, expected)
    kinds = [TokenType.NORMAL] * len(tokens) if types is None else [known[each] for each in types]
    # A token without text is unused, even if the file states another type.
    return [kind if token else TokenType.UNUSED for token, kind in zip(tokens, kinds, strict=True)]


def _scores(read: _Reader, model: str, tokens: Sequence[str]) -> list[float] | None:
    key = f"{_GGML}scores"
    scores = read.for_tokens(key, (float, int), len(tokens), math.isfinite, "a finite number")
    if scores is None and model == "t5":
        raise ModelLoadError(f"the file lacks {key}, which a tokenizer of the kind t5 needs")
    return scores


def _merges(read: _Reader, model: str, tokens: Sequence[str]) -> list[tuple[str, str]] | None:
    key = f"{_GGML}merges"
    written = read.array(key, (str,), MAX_MERGES)
    if written is None:
        if model in ("gpt2", "gemma4"):
            raise ModelLoadError(f"the file lacks {key}, which a tokenizer of the kind {model} needs")
        return None
    known = set(tokens)
    merges = []
    for number, merge in enumerate(written):
        at = merge.find(" ", 1)
        left, right = (merge[:at], merge[at + 1 :]) if at > 0 else (merge, "")
        if not right:
            raise ModelLoadError(
                f"{key} has {_short(merge)} as number {number}, and two tokens with a space between them were "
                "expected"
            )
        if unknown := next((piece for piece in (left, right, left + right) if piece not in known), None):
            raise ModelLoadError(
                f"{key} has {_short(merge)} as number {number}, and {_short(unknown)} is none of the file's tokens"
            )
        merges.append((left, right))
    return merges


def _ids(read: _Reader, model: str, tokens: Sequence[str], types: Sequence[TokenType]) -> dict[str, int]:
    ids = {}
    for role, name in _IDS.items():
        key = f"{_GGML}{name}"
        number = read.value(key, int)
        if number is not None:
            if not 0 <= number < len(types):
                raise ModelLoadError(
                    f"{key} is {number}, and one of the file's tokens was expected, 0 to {len(types) - 1}"
                )
            if not tokens[number]:
                raise ModelLoadError(f"{key} is {number}, and that token has no text; expected another one")
            ids[role] = number
    usual = {"llama": _LLAMA_IDS, "t5": _T5_IDS}.get(model, {})
    for role, number in usual.items():
        kind = TokenType.UNKNOWN if role == "unk" else TokenType.CONTROL
        if number < len(types) and types[number] is kind:
            ids.setdefault(role, number)
    if TokenType.UNKNOWN in types:
        ids.setdefault("unk", types.index(TokenType.UNKNOWN))
    return ids


def _flags(read: _Reader, ids: Mapping[str, int]) -> dict[str, bool]:
    names = ("add_bos_token", "add_eos_token", "add_space_prefix", "remove_extra_whitespaces")
    stated = {name: read.value(f"{_GGML}{name}", bool) for name in names}
    flags = {name: value for name, value in stated.items() if value is not None}
    for role in ("bos", "eos"):
        if flags.get(f"add_{role}_token") and role not in ids:
            raise ModelLoadError(
                f"{_GGML}add_{role}_token is true, and the file lacks {_GGML}{_IDS[role]}: expected the token "
                "that should be added"
            )
    return flags


def _charsmap(read: _Reader) -> bytes:
    key = f"{_GGML}precompiled_charsmap"
    numbers = read.array(key, (int,), MAX_VOCABULARY_CHARS) or []
    try:
        return bytes(number + 256 if -128 <= number < 0 else number for number in numbers)
    except ValueError:
        raise ModelLoadError(f"{key} has numbers that are no bytes, and bytes were expected") from None


def _templates(read: _Reader, metadata: Mapping[str, Any]) -> dict[str, str]:
    keys = {f"{_TEMPLATE}.{name}": name for name in read.array(f"{_TEMPLATE}s", (str,), MAX_TEMPLATES) or ()}
    for key in keys:
        if key not in metadata:
            raise ModelLoadError(f"{_TEMPLATE}s names {_short(keys[key])}, and the file lacks {key[:120]}")
    keys |= {key: key.removeprefix(f"{_TEMPLATE}.") for key in metadata if key.startswith(f"{_TEMPLATE}.")}
    if len(keys) > MAX_TEMPLATES:
        raise ModelLoadError(f"the file has {len(keys)} chat templates, and at most {MAX_TEMPLATES} are supported")
    keys[_TEMPLATE] = "default"
    found = {name: read.value(key, str) for key, name in keys.items()}
    return {name: template for name, template in found.items() if template}
