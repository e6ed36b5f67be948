"""Texts without quotes match formats and patterns of JSON schemas as texts in JSON do, which llguidance reads."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from engine.base.errors import InvalidGrammar
from engine.grammar.compiler import compile_grammar
from engine.grammar.spec import Grammar
from engine.grammar.texts import FORMATS, text_terminal
from engine.grammar.vocabulary import LoadedVocabulary, Vocabulary
from tests.engine.support.grammar_models import EOS, NUM_TOKENS, tokenizer

PATTERNS = [
    "^a|b$", "a|^b", "^.$", "a.b", "^$", "", "^(a|b)$", r"\p{Lu}", "[[:digit:]]", r"^\S+$", "x*?$", "^[|$^]$",
    r"a\$", r"a\\$", r"a\|b", r"^[^|]|\d$", "^/[/]$", "[]|a]", r"\w", r"[\d-]x", "(?i)ab",
    "^(?:GET|PUT) /[a-z]{1,8}$",
]  # fmt: skip

TEXTS = [
    "", "a", "b", "ax", "xa", "xb", "bx", "a\nb", "axb", "\n", "|", "^", "$", "a$", "a$b", "a\\", "a\\$", "a|b",
    "5", "x5", "-x", "5x", "AB", "Ab", "GET /abc", "GET /", "GET abc", "/", "//", "]", "]|a", "\u00c9",
    "\u0663", "a b", "\u00e9", "_", "2024-02-29", "2024-02-30", "2024-02-29T10:00:60Z",
    "2024-02-29t23:59:59.5+01:30", "2024-02-29 10:00", "10:00:00Z", "24:00:00Z", "P1DT2H", "P2W", "PT", "P1Y2D",
    "a.b+c@example.org", "a@[10.0.0.1]", "a@b..c", "@b", "a.example.org", "-a", "a-", "x" * 64, "10.0.0.255",
    "10.0.0.256", "01.0.0.1", "::", "2001:db8::1", "1:2:3:4:5:6:7:8", "1:2", "1:2:3:4:5:6:7::8:9",
    "https://u:p@example.org:80/a/b?c=d#e", "mailto:a@b", "http://[::1]/", "a:/b", "http://a b",
    "123e4567-e89b-12d3-a456-426614174000", "123e4567e89b12d3a456426614174000",
]  # fmt: skip


@pytest.fixture(scope="module")
def vocabulary() -> LoadedVocabulary:
    return Vocabulary.of(tokenizer(), NUM_TOKENS, [EOS]).load()


def matcher_of(source: str, vocabulary: LoadedVocabulary) -> Any:
    return compile_grammar(Grammar("lark", source, matcher="llguidance"), vocabulary)


def drawn(whole: Any, seed: int) -> str | None:
    """Draw a text, token by token; None if it does not end soon."""
    matcher, chosen, ids = whole.deep_copy(), random.Random(seed), list[int]()
    while len(ids) < 40:
        bits = int.from_bytes(matcher.compute_bitmask(), "little")
        allowed = [token for token in range(NUM_TOKENS) if bits >> token & 1]
        if EOS in allowed and (allowed == [EOS] or chosen.random() < 0.3):
            return tokenizer().decode(ids)
        ids.append(chosen.choice([token for token in allowed if token != EOS]))
        assert matcher.try_consume_tokens([ids[-1]]) == 1
    return None


def takes(whole: Any, text: str) -> bool:
    matcher, ids = whole.deep_copy(), tokenizer().encode(text, add_special_tokens=False)
    return bool(matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting())


@pytest.mark.parametrize(
    "schema",
    [*({"format": name} for name in sorted(FORMATS)), *({"pattern": one} for one in PATTERNS)],
    ids=lambda schema: " ".join(*schema.items()),
)
def test_a_text_that_matches_without_quotes_matches_in_them(
    schema: dict[str, Any], vocabulary: LoadedVocabulary
) -> None:
    bare = matcher_of(f"start: TEXT\nTEXT: {text_terminal(schema)}", vocabulary)
    quoted = matcher_of(f"start: %json {json.dumps({'type': 'string', **schema})}", vocabulary)
    found = [takes(bare, text) for text in TEXTS]
    assert any(found)
    assert found == [takes(quoted, json.dumps(text, ensure_ascii=False)) for text in TEXTS]
    for seed in range(8):
        if (text := drawn(bare, seed)) is not None and text.isprintable():
            assert takes(quoted, json.dumps(text, ensure_ascii=False)), text
        if (text := drawn(quoted, seed)) is not None and "\ufffd" not in text:
            assert takes(bare, json.loads(text)), text


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        ({"pattern": "(^a|^b)c$"}, r"pattern '\(\^a"), ({"pattern": "a$b"}, "pattern"),
        ({"pattern": 1}, "pattern"),
        ({"format": ["date"]}, "format"), ({"minLength": "1"}, "minLength"), ({"maxLength": -1}, "maxLength"),
        ({"maxLength": True}, "maxLength"), ({"minLength": 1.5}, "minLength"),
    ],
)  # fmt: skip
def test_a_schema_that_cannot_be_followed_is_refused_by_name(schema: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidGrammar, match=said):
        text_terminal(schema)


def test_a_format_that_is_not_known_constrains_nothing(vocabulary: LoadedVocabulary) -> None:
    assert text_terminal({"format": "phone"}) == text_terminal({})
    assert takes(matcher_of(f"start: TEXT\nTEXT: {text_terminal({'minLength': 2.0})}", vocabulary), "ab\n")
