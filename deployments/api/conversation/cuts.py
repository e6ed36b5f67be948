r"""Finds where a text may be cut, so that the concatenated token ids of its pieces are those of the whole text.

A tokenizer finds its added tokens first. It normalizes, splits and encodes each stretch between them separately:

    text        <|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n
    tokens      [          ]        [        ]  [          ]
    stretches               user\nHi          \n            assistant\n
    pieces      [                  ][          ][                     ]

So a cut before an added token moves no border of a stretch, if the token is found in any surroundings. Only the
beginning of a text is special: some tokenizers put a space there. A cut moves no stretch there, because a piece
begins with its token.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from itertools import pairwise
from typing import Any

MIN_PIECE_CHARS = 64
"""Shorter pieces would cost more to look up, and to encode by themselves, than is saved where they come again."""
_STRETCH_BY_STRETCH = frozenset({
    "Sequence", "NFC", "Replace", "Prepend",  # normalizers
    "Split", "ByteLevel", "Metaspace", "Digits",  # splits
})  # fmt: skip
"""Steps before the model that are known, and tested, to treat each stretch on its own."""


def cut_pattern(backend: Any, template: str) -> re.Pattern[str] | None:
    """Return a pattern of the tokens before which texts may be cut, or None if there are no safe cuts.

    These are special tokens, and other added tokens that occur in the chat template. `backend` is a
    `tokenizers.Tokenizer`.
    """
    if backend.encode_special_tokens or not _encodes_stretch_by_stretch(backend):
        return None
    added = [token for token in backend.get_added_tokens_decoder().values() if not token.normalized]
    inner = {character for token in added for character in token.content[1:]}
    texts = sorted(token.content for token in added)
    begins_another = {text for text, following in pairwise(texts) if following.startswith(text)}
    cuts = [
        token.content
        for token in added
        if (token.special or token.content in template)
        and token.content not in begins_another
        and _is_found_anywhere(token, inner)
    ]
    return re.compile("|".join(map(re.escape, cuts))) if cuts else None


def cut(text: str, pattern: re.Pattern[str]) -> list[str]:
    """Return the pieces of a text, each of at least `MIN_PIECE_CHARS` but for the last.

    Texts with a common beginning have the same pieces within it.
    """
    pieces, begin = [], 0
    for token in pattern.finditer(text):
        end = token.start()
        if end - begin >= MIN_PIECE_CHARS:
            pieces.append(text[begin:end])
            begin = end
    return [*pieces, text[begin:]]


def _is_found_anywhere(token: Any, inner: Collection[str]) -> bool:
    """Return whether an added token is found wherever its text is, and changes nothing to its left.

    `inner` are the characters that added tokens have after their first: another token cannot reach into this one
    from the left if none of them is this one's first. A token to the left may swallow whitespace after it, or ask
    for the end of a word there, so this one must begin with neither whitespace nor a word's character.
    """
    first = token.content[0]
    asks_for_neighbors = token.lstrip or token.single_word
    return not asks_for_neighbors and first not in inner and re.match(r"[^\s\w]", first) is not None


def _encodes_stretch_by_stretch(backend: Any) -> bool:
    from tokenizers.models import BPE

    model = backend.model
    steps = [step for step in (backend.normalizer, backend.pre_tokenizer) if step is not None]
    return (
        isinstance(model, BPE)
        and not model.dropout  # The encoding of a text would vary between calls.
        and all(_kinds(step) <= _STRETCH_BY_STRETCH for step in steps)
    )


def _kinds(step: Any) -> set[str]:
    """Return the types of a normalizer or pre-tokenizer and of its parts; "custom" of one written in Python."""
    try:
        state = json.loads(step.__getstate__())
    except Exception:  # The library raises no narrower class.
        return {"custom"}
    found, parts = set(), [state]
    while parts:
        part = parts.pop()
        found.add(part["type"])
        parts += part.get("normalizers", []) + part.get("pretokenizers", [])
    return found
