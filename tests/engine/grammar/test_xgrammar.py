"""Both libraries allow the same tokens wherever a grammar may be followed by either."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache

import numpy as np
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from llguidance import LLTokenizer
from llguidance._tokenizer import TokenizerWrapper

from engine.base.errors import InvalidGrammar
from engine.grammar.compiler import compile_grammar, matcher_name
from engine.grammar.matcher import GrammarMatcher
from engine.grammar.spec import Grammar, GrammarKind
from engine.grammar.vocabulary import LoadedVocabulary
from tests.engine.support.grammar_walks import accepts
from tests.support.examples import examples

END = b"<end>"
TOKENS = (
    *(bytes([byte]) for byte in range(256)), b"ab", b"ba", b"aa", b"abc", b"a+", b"+a", b"\n\n", b"<pad>",
    "é".encode(), "éa".encode(), "€".encode()[:2], "€".encode()[1:], b"a\xf0\x9f", b"\xed\xa0", b"\xc0\x80", b"",
    END,
)  # fmt: skip
"""All bytes; texts that span two terminals; parts of characters, and what can be none; two special tokens."""


class _Tokens:
    """A tokenizer in the form that llguidance asks for."""

    eos_token_id = TOKENS.index(END)
    bos_token_id = None
    tokens = TOKENS
    special_token_ids = (TOKENS.index(b"<pad>"), TOKENS.index(END))

    def __call__(self, text: bytes) -> list[int]:
        return list(text)


@cache
def vocabulary() -> LoadedVocabulary:
    return LoadedVocabulary(LLTokenizer(TokenizerWrapper(_Tokens()), slices=[]))


def both(source: str, kind: GrammarKind = "lark") -> tuple[GrammarMatcher, GrammarMatcher]:
    """Return the matchers of both libraries. Raises InvalidGrammar where one cannot follow the grammar."""
    return (
        compile_grammar(Grammar(kind, source, matcher="llguidance"), vocabulary()),
        compile_grammar(Grammar(kind, source, matcher="xgrammar"), vocabulary()),
    )


def allowed(matcher: GrammarMatcher) -> set[int]:
    bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
    return {int(token) for token in bits.nonzero()[0]}


def may_follow(matcher: GrammarMatcher, token: int) -> bool:
    return matcher.deep_copy().try_consume_tokens([token]) == 1


ATOMS = st.sampled_from(
    ['"a"', '"b"', '"ab"', '"é"', '"\\n"', '""', "/[ab]/", "/[a-c]/", "/[^a]/", "/./", r"/[\x61+]/", r"/[\^a-]/",
     "/[é-ë]/", '"+"', "start", "one", "two"]
)  # fmt: skip
TIMES = st.sampled_from(["", "", "", "?", "*", "+", "{2}", "{0,2}", "{1,}"])
PARTS = st.recursive(
    st.tuples(ATOMS, TIMES).map("".join),
    lambda inner: st.tuples(st.lists(inner, min_size=1, max_size=2).map(" | ".join).map("({})".format), TIMES).map(
        "".join
    ),
    max_leaves=4,
)
BODIES = st.lists(st.lists(PARTS, max_size=3).map(" ".join), min_size=1, max_size=3).map(" | ".join)
CHOICES = st.lists(st.integers(0, 4095), max_size=20)


@settings(max_examples=examples(100))
@given(st.tuples(BODIES, BODIES, BODIES), CHOICES)
@example(("/[a-c]/ start | /[a-c]/", '""', '""'), [1] * 20)
@example(('start start | "a" | "b" | start "+" start', '""', '""'), [0, 5, 0, 3] * 5)
@example(('start /[^a]/ | "a"', '""', '""'), [1000] * 9)
def test_both_allow_the_same_tokens_after_any_answer(bodies: tuple[str, ...], choices: Sequence[int]) -> None:
    source = "\n".join(f"{name}: {body}" for name, body in zip(("start", "one", "two"), bodies, strict=True))
    try:
        guided, other = both(source)
    except InvalidGrammar:
        assume(False)
    for choice in choices:
        by_guided, by_other = allowed(guided), allowed(other)
        if guided.is_error():
            return
        assert by_guided <= by_other
        # Where only one text may follow, llguidance allows the first token of one way to write it.
        assert all(may_follow(guided, token) for token in by_other - by_guided)
        assert other.is_accepting() is guided.is_accepting() is (_Tokens.eos_token_id in by_other)
        tokens = sorted(by_guided - {_Tokens.eos_token_id})
        if not tokens:
            return
        token = tokens[choice % len(tokens)]
        assert guided.try_consume_tokens([token]) == other.try_consume_tokens([token]) == 1


def test_an_answer_can_be_taken_back_and_ended() -> None:
    _, matcher = both('start: "a" start "b" | "é"')
    tokens = [*b"aa", TOKENS.index("é".encode()), *b"bb", _Tokens.eos_token_id]
    masks = []
    for token in tokens:
        masks.append(allowed(matcher))
        assert matcher.try_consume_tokens([token]) == 1
    assert matcher.try_consume_tokens([97]) == 0
    assert allowed(matcher) == {_Tokens.eos_token_id}
    copied = matcher.deep_copy()
    for mask in reversed(masks):
        assert matcher.rollback(1) and allowed(matcher) == mask
    assert copied.is_accepting() and not matcher.is_accepting()
    assert matcher.try_consume_tokens([*b"aXb"]) == 1


def test_no_answer_holds_a_special_token_or_part_of_a_surrogate() -> None:
    _, matcher = both("start: /[^x]/ start | /[^x]/")
    assert not allowed(matcher) & {*_Tokens.special_token_ids, TOKENS.index(b""), TOKENS.index(b"\xed\xa0")}
    assert matcher.try_consume_tokens([0xED]) == 1 and not allowed(matcher) & {0xA0, 0xBF}


# --- which library -------------------------------------------------------------------------------------------


def chosen(grammar: Grammar) -> str:
    return matcher_name(compile_grammar(grammar, vocabulary()))


@pytest.mark.parametrize(
    "rules",
    [
        ["root ::= [a-z ] root | [a-z ]"],
        ["root ::= [a-z ] root | [a-z ] f | [a-z ]", "f ::= [a-z ] f | [a-z ] root | [a-z ]"],
    ],
)
def test_rules_that_grow_slow_with_the_answer_are_followed_by_xgrammar(rules: list[str]) -> None:
    gbnf = "\n".join(rules)
    lark = gbnf.replace("root", "start").replace(" ::=", ":").replace("[a-z ]", "/[a-z ]/")
    assert [chosen(Grammar("gbnf", gbnf)), chosen(Grammar("lark", lark))] == ["xgrammar"] * 2


@pytest.mark.parametrize(
    "grammar",
    [
        Grammar("json_object"),
        Grammar("json_schema", json.dumps({"properties": {f"p{at}": {"type": "string"} for at in range(40)}})),
        Grammar("regex", "[a-z ]+"),
        Grammar("choice", '["yes", "no"]'),
        Grammar("lark", 'start: "a" WORD\nWORD: /[a-z]+/'),
    ],
)
def test_grammars_that_are_not_rules_over_characters_are_followed_by_llguidance(grammar: Grammar) -> None:
    assert chosen(grammar) == "llguidance"


@pytest.mark.parametrize(
    "source",
    [
        'start: "a" WORD\nWORD: /[a-z]+/',  # a terminal takes as much as it can
        'start: /[a-z]/ start | "end"',
        'start: "a" "bc" | "ab" "d"',
        'start: "a"i start | "b"',
        "start: /a|b/ start | /[a-z]/",
        'start: "a" %json {"type": "null"}',
        'start: "a" <[97]>',
        'start: "a" start | "b"\n%ignore " "',
        'start: start | "a"',
        'start: (start?)* "a"',
        'start: one | "a"\none: start ""',
    ],
)
def test_a_grammar_that_xgrammar_would_misread_is_not_given_to_it(source: str) -> None:
    with pytest.raises(InvalidGrammar):
        both(source)


@pytest.mark.parametrize("text", ["abc", "abd", "né]-", "n\nnX", "\x01\t", "n€x"])
def test_gbnf_is_read_by_characters(text: str) -> None:
    """By llguidance's terminals, "abc" would begin with "ab"."""
    source = 'root ::= "a" "bc" | "ab" "d" | item+ [\\]x-]{0,2}\nitem ::= "n" [^a-z] | [\\x01-\\x02] "\\t"'
    assert accepts(Grammar("gbnf", source), text)
    for other in (text + "q", text[:-1] + "q", text[:1]):
        assert not accepts(Grammar("gbnf", source), other)


def test_invalid_gbnf_is_refused() -> None:
    for source in ("root ::= (", "root ::= missing", "::="):
        with pytest.raises(InvalidGrammar):
            chosen(Grammar("gbnf", source))


# --- rules that join their own texts -------------------------------------------------------------------------


JOINS = st.lists(
    st.sampled_from(
        [
            "start start",
            'start "+" start',
            "start one start",
            '"a"',
            '"b" start',
            "one",
            'start "x"',
            '("(" start ")")',
        ]
    ),
    min_size=1,
    max_size=4,
).map(" | ".join)
TEXTS = st.lists(st.sampled_from(["a", "b", "+", "x", "(", ")", "c", "ab", "a+a", "(a)"]), max_size=6).map("".join)


@settings(max_examples=examples(150))
@given(JOINS, TEXTS)
@example('start "+" start | "a" | "b" start', "ba+bba+a")
@example("start start | one", "ccc")
def test_such_rules_match_the_same_however_they_are_written(rules: str, text: str) -> None:
    """In parentheses, a rule is not seen to be one of them."""
    hidden = rules.replace("start", "(start)")
    found = []
    for written in (rules, hidden):
        source = f'start: {written}\none: "c" | "c" one'
        try:
            matcher = compile_grammar(Grammar("lark", source, matcher="llguidance"), vocabulary())
        except InvalidGrammar:
            found.append("refused")
            continue
        found.append(str(matcher.try_consume_tokens([*text.encode()]) == len(text) and matcher.is_accepting()))
    assert found[0] == found[1]
