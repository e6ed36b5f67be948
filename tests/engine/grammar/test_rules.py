"""Rules of grammars that cannot end are found when a grammar is compiled; no other grammar is refused for it."""

from __future__ import annotations

import json

import pytest

from engine.base.errors import InvalidGrammar
from engine.grammar.rules import check_rules_end, with_schemas
from engine.grammar.spec import Grammar
from tests.engine.support.grammar_walks import accepts, walk

VOID = r"VOID: /[^\s\S]/"


@pytest.mark.parametrize(
    ("source", "culprit"),
    [
        ('start: "yes" bad\nbad: /[^\\s\\S]/', '"bad"'),
        ('start: "a" start', '"start"'),
        ('start: "a" start | "b" start "c"', '"start"'),
        ('start: a\na: "x" b\nb: "y" a', '"a"'),
        ('start: "a" (b | "c")\nb: "d" b', '"b"'),
        ('start: "a" ("b" [b] b+)\nb: "d" (b | b){2,3}', '"b"'),
        (f'start: "a" VOID\n{VOID}', "VOID"),
        (f'start: "a" | "b" VOID "c"\n{VOID}', "VOID"),
        ('start: "a" NONE\nNONE: /a/ & /b/', "NONE"),
        ('start: "a" NONE\nNONE: OTHER "b" | /[^\\s\\S]/\nOTHER: /a/ & /b/', "NONE"),
        ('start: "a" /[a-b&&c]/', "/[a-b&&c]/"),
        ('start: "é\\n" x // a comment: start: "b"\nx: "b"* x # another', '"x"'),
        ('?start: _x\n!_x: "a" _x', '"_x"'),
        ('start: x-y\nx-y: "a" x-y', '"x-y"'),
        ("start: WORD /[^\\s\\S]/\n%import common.WORD", "/[^"),
        ('start: "a"\n     | "b" b\n     | "c"\nb: "b" b', '"b"'),
        ('start: %json {"type": "null"} b\nb: "b" b', '"b"'),
        ('start[capture="b: c"]: "a" b\nb: "b" b', '"b"'),
    ],
)
def test_a_rule_that_can_begin_but_never_end_is_refused_by_name(source: str, culprit: str) -> None:
    with pytest.raises(InvalidGrammar) as caught:
        accepts(Grammar("lark", source), "")
    said = str(caught.value)
    assert culprit in said and ("never end" in said or "matches no text" in said) and len(said) < 300


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ('start: "a" start | "b"', "aab"),
        ('start: "a" start?', "aa"),
        ('start: ("a" start)*', "a"),
        ('start: "a" [start] "b"', "aabb"),
        ('start: "a" start{0,2} "b"', "aabb"),
        ('start: "a" b\nb: "" | b "c"', "ac"),
        ('start: "a" | b\nb: b', "a"),
        ('start: "a" | b "c"\nb: b "d"', "a"),
        (f'start: "a" VOID? "b"\n{VOID}', "ab"),
        (f'start: "a" | VOID "b"\n{VOID}', "a"),
        (f'start: "a"\nunused: "b" unused\nother: "c" VOID\n{VOID}', "a"),
        ('start: "a" /b/ "\\"" "//" /\\/x/ "#"', 'ab"///x#'),
        ('start: "a".."c" "x"', "bx"),
        ("start: /a/ ~ 2..3", "aa"),
        ('start: "a" -> one\n | "b" -> two', "b"),
        ('start: "A"i <[300]>?', "a"),
        ("start: INT\n%import common.INT", "12"),
        ("start: NAME\nNAME: /[a-z]+/ & ~/if/", "iff"),
        ('start: "a" b\nb[max_tokens=2]: /[a-z]*/', "ab"),
        ('%llguidance {"no_forcing": true}\nstart: "a"', "a"),
    ],
)
def test_a_grammar_that_can_end_is_accepted(source: str, text: str) -> None:
    assert accepts(Grammar("lark", source), text)


def test_unknown_syntax_is_not_judged() -> None:
    for source in (
        "start: 'a' start",
        'start: x::1\nx::_: "a" start',
        "start: (",
        ")",
        "",
        "start: %json {",
        'a: "',
    ):
        check_rules_end(source)
        assert with_schemas(source, lambda schema: {}) == source
    check_rules_end("start: " + "(" * 5000 + '"a"' + ")" * 5000)


def test_long_grammars_take_time_in_proportion_to_their_length() -> None:
    """Each rule of a chain is told from the next, in whichever order they are given."""
    chain = [f'r{number}: "a" r{number + 1}' for number in range(4000)]
    for lines in (chain, chain[::-1]):
        check_rules_end("\n".join(["start: r0", *lines, 'r4000: "z"']))
        with pytest.raises(InvalidGrammar, match="never end"):
            check_rules_end("\n".join(["start: r0", *lines, "r4000: r0"]))


def test_schemas_within_a_grammar_are_rewritten_and_nothing_else() -> None:
    schema = {"type": "object", "patternProperties": {"^b$": {"type": "null"}}, "additionalProperties": False}
    grammar = Grammar(
        "lark", f'start: "%json {{" %json {json.dumps(schema, indent=1)} | /x{{2}}/ // %json {{"a":1}}'
    )
    assert accepts(grammar, '%json {{"b":null}') and accepts(grammar, "xx")
    assert not accepts(grammar, '%json {{"b":null,"b":null}')
    with pytest.raises(InvalidGrammar, match="without end"):
        accepts(Grammar("lark", 'start: "x" %json {"$ref": "#"}'), "")
    with pytest.raises(InvalidGrammar, match="minProperties is not supported"):
        accepts(Grammar("lark", 'start: %json {"minProperties": 3}'), "")


def test_a_walk_through_a_refused_grammar_would_have_met_the_dead_end() -> None:
    """What is refused is refused rightly: without the check, nothing may follow."""
    hidden = 'start: "yes" bad\nbad[max_tokens=9]: /[^\\s\\S]/'  # the attribute keeps it from being looked at
    end, text = walk(Grammar("lark", hidden), (), 20)
    assert end.startswith("dead end: NoExtension") and text == "yes"
