"""Splits texts into words for byte-level tokenizers, by the names in GGUF files (tokenizer.ggml.pre).

Merges stay within a word. The patterns are those of the models' own tokenizers; llama.cpp has others for some of
them, because its expressions are less powerful.
"""

# ruff: noqa: RUF001 - the letters of real patterns

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from engine.base.errors import ModelLoadError

logger = logging.getLogger(__name__)

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_NEWLINES_AND_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_SIGNS_AND_SPACES = rf" ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_NEWLINES_AND_SPACES}"
_LETTERS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_LLAMA3 = rf"{_CONTRACTIONS}|{_LETTERS}|\p{{N}}{{1,3}}|{_SIGNS_AND_SPACES}"
_QWEN2 = rf"{_CONTRACTIONS}|{_LETTERS}|\p{{N}}|{_SIGNS_AND_SPACES}"
_QWEN35 = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
    rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_NEWLINES_AND_SPACES}"
)
_SEED = rf"{_CONTRACTIONS}|{_LETTERS}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_NEWLINES_AND_SPACES}"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+", rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
_SIGNS_AND_SLASHES = rf" ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_NEWLINES_AND_SPACES}"
_TEKKEN = rf"{_CASED[0]}|{_CASED[1]}|\p{{N}}|{_SIGNS_AND_SLASHES}"
_O200K = rf"{_CASED[0]}{_CONTRACTIONS}?|{_CASED[1]}{_CONTRACTIONS}?|\p{{N}}{{1,3}}|{_SIGNS_AND_SLASHES}"
_DEEPSEEK3 = (
    r"\p{N}{1,3}",
    r"[一-龥぀-ゟ゠-ヿ]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_NEWLINES_AND_SPACES}",
)
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_DEFAULT = (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """One way to split texts, with other properties of its name."""

    patterns: tuple[str, ...] = ()
    """Each cuts its matches out of the parts that the earlier ones left. Without any, words are those of GPT-2."""
    single_digits: bool = False
    """Whether digits are first cut out one by one."""
    normalizes: bool = False
    """Whether texts are normalized (NFC)."""
    ignores_merges: bool = False
    """Whether a word that is a token becomes that token, without regard to merges."""
    adds_bos: bool = False
    """Whether texts begin with a BOS token if the file does not say so."""


_LLAMA = PreTokenizer((_LLAMA3,), ignores_merges=True, adds_bos=True)
_PLAIN_LLAMA = PreTokenizer((_LLAMA3,))
_QWEN = PreTokenizer((_QWEN2,), normalizes=True)
_O200K_WORDS = PreTokenizer((_O200K,), ignores_merges=True)
_WORDS, _WORDS_AND_DIGITS = PreTokenizer(), PreTokenizer(single_digits=True)
PRE_TOKENIZERS: Mapping[str, PreTokenizer] = {
    "chatglm-bpe": _PLAIN_LLAMA,
    "codeshell": _WORDS_AND_DIGITS,
    "command-r": PreTokenizer(single_digits=True, normalizes=True),
    "dbrx": _PLAIN_LLAMA,
    "deepseek-r1-qwen": _QWEN,
    "deepseek-v3": PreTokenizer(_DEEPSEEK3),
    "default": PreTokenizer(_DEFAULT),
    "exaone4": _WORDS,
    "falcon3": _LLAMA,
    "glm4": _PLAIN_LLAMA,
    "gpt-2": _WORDS,
    "gpt-4o": _O200K_WORDS,
    "granite-docling": _WORDS,
    "llama-bpe": _LLAMA,
    "llama-v3": _LLAMA,
    "llama3": _LLAMA,
    "llama4": _O200K_WORDS,
    "minimax-m2": PreTokenizer((_O200K,)),
    "mpt": PreTokenizer(normalizes=True),
    "olmo": PreTokenizer(normalizes=True),
    "phi-2": _WORDS,
    "pixtral": _LLAMA,
    "qwen2": _QWEN,
    "qwen35": PreTokenizer((_QWEN35,), normalizes=True),
    "refact": _WORDS_AND_DIGITS,
    "seed-coder": PreTokenizer((_SEED,)),
    "smaug-bpe": _PLAIN_LLAMA,
    "smollm": _WORDS_AND_DIGITS,
    "starcoder": _WORDS_AND_DIGITS,
    "tekken": PreTokenizer((_TEKKEN,), ignores_merges=True, adds_bos=True),
}
"""By the names in files."""


def pre_tokenizer(name: str | None) -> PreTokenizer:
    """Return the way to split texts that a file names. Raises ModelLoadError for a name that is not known."""
    if name is None or name == "default":
        logger.warning(
            "the GGUF file does not say how its tokenizer splits texts into words (tokenizer.ggml.pre is %s): "
            "llama.cpp's rule for such files is used, and answers may be worse; use a file that says it",
            name,
        )
    found = PRE_TOKENIZERS.get(name or "default")
    if found is None:
        raise ModelLoadError(
            f"tokenizer.ggml.pre is {str(name)[:60]!r}, which is no known way to split texts; known are "
            f"{', '.join(PRE_TOKENIZERS)}"
        )
    return found


def splitter(words: PreTokenizer, *, adds_space: bool) -> Any:
    """Return the splitter of texts into words, and words into bytes, for the tokenizers library.

    With `adds_space`, a text begins with a space.
    """
    from tokenizers import Regex, pre_tokenizers

    steps: list[Any] = [pre_tokenizers.Digits(individual_digits=True)] if words.single_digits else []
    steps += [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in words.patterns]
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=adds_space, use_regex=not words.patterns))
    return pre_tokenizers.Sequence(steps) if len(steps) > 1 else steps[0]
