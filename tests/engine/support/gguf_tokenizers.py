"""Small tokenizers of each kind as they were before a conversion to GGUF, their metadata, and texts to try."""

# ruff: noqa: RUF001 - texts of many scripts

from __future__ import annotations

import functools
import json
import random
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers.tokenization_utils_base import generate_merges

from engine.model_files.model_directory import demo_model_path
from tests.engine.support import gguf_files

DOCS = Path(__file__).resolve().parents[3] / "docs"
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
STRING, INTEGER, NUMBER, FLAG, SIGNED = 8, 4, 6, 7, 5
SPACE = "▁"
CONTROLS = ["<s>", "</s>"]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
_WORDS = """
    the quick Brown fox JUMPS camelCase don't I'll WE'RE it's we've I'm he'd they'll I'VE 'S ſ x'ſ
    ǅenan ǈǋ 1 12 123 1234567 3.14 ٣٤ ² Ⅷ ½ é ß ﬁ Å
    日本語 テスト 한국어 русский עברית عربي हिन्दी ไทย 🎉 👩‍👩‍👧 🇩🇪 <| |> << >> ... !!! ?! $x += => {} [] () _a_ #!
    // /path/to https://a.b/c?d=e C++ \\n ▁ ▁▁ Ġ <0x41> <|im_start|> <|im_end|> <|endoftext|> <s> </s> <unk> [INST]
    [/INST] <think> </think>"""
WORDS = [*_WORDS.split(), "e\u0301", "o\u0308\u0301", "\u1112\u1161\u11ab"]
SPACES = [" ", "  ", "    ", "\n", "\n\n", "\r\n", "\t", " \n", "\u00a0", "\u3000", "\u200b", "\n \n", ""]


@functools.cache
def texts(count: int, seed: int = 1) -> Sequence[str]:
    """Return texts: words and signs of many scripts, spaces of all kinds, and any characters."""
    return tuple(_texts(count, seed))


def _texts(count: int, seed: int) -> Iterator[str]:
    draw = random.Random(seed)
    for _ in range(count):
        kind = draw.random()
        if kind < 0.15:
            points = (draw.randrange(0x110000) for _ in range(draw.randrange(1, 20)))
            yield "".join(chr(point) for point in points if not 0xD800 <= point < 0xE000)
        elif kind < 0.3:
            yield "".join(chr(draw.randrange(1, 0x600)) for _ in range(draw.randrange(1, 40)))
        else:
            yield "".join(draw.choice(WORDS) + draw.choice(SPACES) for _ in range(draw.randrange(12)))


@functools.cache
def byte_level() -> Mapping[str, Any]:
    """Return `vocab` and `merges` of a byte-level tokenizer."""
    found: Mapping[str, Any] = json.loads((demo_model_path() / "tokenizer.json").read_text())["model"]
    return found


@functools.cache
def pieces() -> tuple[str, ...]:
    """Return the tokens of a tokenizer of SentencePiece's kind: special ones, bytes, and others, best first."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), normalizers.Replace(" ", SPACE)])
    tokenizer.pre_tokenizer = pre_tokenizers.Split(SPACE, "merged_with_next")
    special = ["<unk>", *CONTROLS, *BYTES]
    trainer = trainers.BpeTrainer(
        vocab_size=1800, special_tokens=special, show_progress=False, max_token_length=16
    )
    tokenizer.train_from_iterator(lines(), trainer)
    ids = tokenizer.get_vocab()
    return tuple(sorted(ids, key=ids.__getitem__))


def lines() -> Iterator[str]:
    """Yield what small tokenizers are trained on."""
    for page in sorted(DOCS.glob("*.md"))[:3]:
        yield from page.read_text(encoding="utf-8").splitlines(keepends=True)


def types_of(tokens: Sequence[str], **others: Sequence[str]) -> list[int]:
    """Return the types of tokens of SentencePiece's kind; `others` are more of "control" and "user" tokens."""
    kinds = {"<unk>": UNKNOWN, **dict.fromkeys(CONTROLS, CONTROL), **dict.fromkeys(BYTES, BYTE)}
    kinds |= dict.fromkeys(others.get("control", ()), CONTROL)
    kinds |= dict.fromkeys(others.get("user", ()), USER_DEFINED)
    return [kinds.get(token, NORMAL) for token in tokens]


def gpt2_metadata(pre: str | None, special: Sequence[str] = (), user: Sequence[str] = ()) -> dict[str, Any]:
    """Return the metadata of the byte-level tokenizer with these further tokens."""
    vocab, merges = byte_level()["vocab"], byte_level()["merges"]
    tokens = [*sorted(vocab, key=vocab.__getitem__), *special, *user]
    kinds = [NORMAL] * len(vocab) + [CONTROL] * len(special) + [USER_DEFINED] * len(user)
    for token in ("<|endoftext|>", "<|im_start|>", "<|im_end|>"):
        kinds[vocab[token]] = CONTROL
    metadata = {
        "general.architecture": "llama",
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.merges": [" ".join(merge) for merge in merges],
        "tokenizer.ggml.eos_token_id": vocab["<|im_end|>"],
        "tokenizer.ggml.padding_token_id": vocab["<|endoftext|>"],
        "tokenizer.ggml.add_bos_token": False,
    }
    return {key: value for key, value in metadata.items() if value is not None}


def llama_metadata(architecture: str, tokens: Sequence[str], types: Sequence[int]) -> dict[str, Any]:
    """Return the metadata of a tokenizer of SentencePiece's kind, whose scores fall from token to token."""
    return {
        "general.architecture": architecture,
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": list(tokens),
        "tokenizer.ggml.token_type": list(types),
        "tokenizer.ggml.scores": [-float(at) if kind == NORMAL else 0.0 for at, kind in enumerate(types)],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }


def original_pieces(tokens: Sequence[str], types: Sequence[int], *, by_score: bool, strips: bool) -> Tokenizer:
    """Return what transformers' converters of SentencePiece models make of these tokens, from the merges on.

    `by_score`: the merges are in the order of the scores, not of the tokens.
    """
    vocab = {token: at for at, token in enumerate(tokens)}
    scores = {token: -float(at) if types[at] == NORMAL else 0.0 for token, at in vocab.items()}
    others = [token for token, kind in zip(tokens, types, strict=True) if kind in (UNKNOWN, CONTROL, BYTE)]
    merges = generate_merges(vocab, scores if by_score else None, skip_tokens=others)
    tokenizer = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.decoder = _spaces_decoder(strips)
    tokenizer.add_tokens(
        [
            AddedToken(token, special=kind != USER_DEFINED, normalized=False)
            for token, kind in zip(tokens, types, strict=True)
            if kind in (UNKNOWN, CONTROL, USER_DEFINED)
        ]
    )
    return tokenizer


def _spaces_decoder(strips: bool) -> Any:
    steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    return decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if strips else steps)


def write(metadata: Mapping[str, Any], path: Path) -> Path:
    """Write a GGUF file with these metadata and return its path."""
    keys = [_key(key, value) for key, value in metadata.items()]
    return gguf_files.FileOfBytes(keys=keys).write(path)


def _key(key: str, value: Any) -> bytes:
    if isinstance(value, list):
        kind = STRING if isinstance(value[0], str) else NUMBER if isinstance(value[0], float) else SIGNED
        return gguf_files.array(key, kind, value)
    kinds = {str: STRING, bool: FLAG, int: INTEGER, float: NUMBER}
    return gguf_files.key(key, kinds[type(value)], value)
