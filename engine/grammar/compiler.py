"""Compiles a request's grammar into a matcher that knows which tokens are allowed next.

    Grammar ──▶ llguidance's syntax ──┬─▶ CompiledGrammar, kept ──▶ a copy per request (`Constraint`)
           └──▶ xgrammar's, if it can ┘

llguidance works with derivatives of regular expressions and an Earley parser, both of which spend a bounded amount
of fuel per token: a mask that would take too long is an error. With recursive rules, its time for a token grows
with the answer. So if xgrammar can follow a grammar too, random answers decide which is used
(`engine.grammar.random_walks`). Compiling has no bound (`multipleOf` with a large number), so clients' grammars
are first tried in a separate process: `engine.grammar.trial`.
"""

from __future__ import annotations

import json
import re
import threading
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

from engine.base.bounded_cache import BoundedCache
from engine.base.errors import InvalidGrammar
from engine.grammar.compiled import CompiledGrammar, weight
from engine.grammar.ebnf import ROOT, as_ebnf
from engine.grammar.flat_rules import with_flat_rules
from engine.grammar.languages import LIMITS
from engine.grammar.matcher import GrammarMatcher
from engine.grammar.random_walks import walked
from engine.grammar.rules import check_rules_end, with_schemas
from engine.grammar.schema import OPTIONS, rewritten
from engine.grammar.schema_keywords import num_properties
from engine.grammar.spec import Grammar, MatcherName
from engine.grammar.vocabulary import LoadedVocabulary, Vocabulary
from engine.grammar.xgrammar_matcher import XGrammarMatcher

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

_MAX_MESSAGE_CHARS = 300
_MOST_ITEMS = 2000
"""Items of a row of llguidance's parser: the number of ways that it follows at the same time."""
_ITEMS_PER_PROPERTY = 5
"""More items for each property of a schema, because any optional one may be next."""


class Compiler:
    """Compiles grammars for one model and keeps the most recently used ones. May be called from any thread."""

    def __init__(self, vocabulary: Callable[[], Vocabulary], cache_bytes: int = 2**29) -> None:
        """`vocabulary` is called for the first grammar. `cache_bytes` bounds the bytes of kept grammars; a larger
        one is not kept, but requests that use it at the same time share it.
        """
        self._vocabulary = vocabulary
        self._loaded: LoadedVocabulary | None = None
        self._loading = threading.Lock()
        self._kept: BoundedCache[Grammar, CompiledGrammar] = BoundedCache(cache_bytes)
        self._used: weakref.WeakValueDictionary[Grammar, CompiledGrammar] = weakref.WeakValueDictionary()
        self._lock = threading.Lock()
        self.num_hits = 0
        """Requested grammars that were kept."""
        self.num_misses = 0
        """Requested grammars that were compiled, or could not be."""

    @property
    def num_bytes(self) -> int:
        """Bytes that the kept grammars count."""
        return self._kept.num_bytes

    def compile(self, grammar: Grammar) -> CompiledGrammar:
        """Return a compiled grammar. Raises InvalidGrammar."""
        with self._lock:
            known = self._kept.get(grammar) or self._used.get(grammar)
            if known is not None and not known.is_worn:
                self.num_hits += 1
                return known
            self.num_misses += 1
        with self._loading:
            if self._loaded is None:
                self._loaded = self._vocabulary().load()
        matcher = compile_grammar(grammar, self._loaded)
        wears = matcher_name(matcher) == "llguidance"
        compiled = CompiledGrammar(matcher, self._loaded.tokenizer, wears=wears)
        with self._lock:
            self._kept.put(grammar, compiled, weight(grammar))
            self._used[grammar] = compiled
        return compiled


def compile_grammar(
    grammar: Grammar,
    vocabulary: LoadedVocabulary,
    unmeasured: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> GrammarMatcher:
    """Return a matcher in its initial state, of the library that is exact and follows random answers faster.

    xgrammar is loaded in the context `unmeasured`. Raises InvalidGrammar, with a message for the grammar's author.
    """
    source, num_properties = _as_llguidance(grammar)
    if grammar.matcher == "xgrammar":
        return vocabulary.xgrammar.compile(_ebnf(grammar) or "", ROOT)
    guided = _guided(source, vocabulary.tokenizer, num_properties)
    if grammar.matcher == "llguidance":
        return guided
    ends = vocabulary.tokenizer.eos_tokens
    walk, ebnf = walked(guided, ends), _ebnf(grammar)
    if ebnf is not None:
        with unmeasured():
            xgrammar = vocabulary.xgrammar
        other = xgrammar.compile(ebnf, ROOT)
        other_walk = walked(other, ends)
        is_exact = grammar.kind != "gbnf" or _ebnf(grammar, has_terminals=True) is not None
        is_better = not is_exact or other_walk.mean_seconds < walk.mean_seconds or walk.failed_at is not None
        if other_walk.failed_at is None and is_better:
            return other
    if walk.failed_at is not None:
        raise InvalidGrammar(
            f"it is too complex to follow: a random answer takes too much after {walk.failed_at} tokens; "
            "simplify it"
        )
    return guided


def matcher_name(matcher: GrammarMatcher) -> MatcherName:
    """Return the name of a matcher's library."""
    return "xgrammar" if isinstance(matcher, XGrammarMatcher) else "llguidance"


def _guided(source: str, tokenizer: LLTokenizer, num_properties: int) -> LLMatcher:
    """Return llguidance's matcher. Its first mask is computed once, as some errors show only then."""
    from llguidance import LLMatcher, LLParserLimits  # Imported here: without grammars it need not be installed.

    most_items = _MOST_ITEMS + _ITEMS_PER_PROPERTY * num_properties
    limits = LLParserLimits(**LIMITS, max_items_in_row=most_items)
    matcher = LLMatcher(tokenizer, source, log_level=0, limits=limits)
    if not matcher.is_error():
        probe = matcher.deep_copy()
        probe.compute_bitmask()
        if not probe.is_error():
            return matcher
        matcher = probe
    raise InvalidGrammar(explained(matcher.get_error()))


def schema_in_lark(schema: dict[str, Any]) -> str:
    """Embed a JSON schema in a grammar in Lark's syntax."""
    return "%json " + json.dumps(schema)


def explained(error: str) -> str:
    """Return llguidance's message on one line, without the parts meant for its own users."""
    if unsupported := re.search(r"Unimplemented keys: (\[.*?\])", error):
        keys = json.loads(unsupported[1])
        return f"{' and '.join(keys)} {'is' if len(keys) == 1 else 'are'} not supported"
    if "oneOf constraints are not supported" in error:
        return "oneOf is only supported if its schemas differ in their types or in a const; use anyOf"
    if error.startswith("NoExtension"):
        return "it allows no output at all"
    if "Regex is empty" in error:  # the rest shows llguidance's form of the regular expression
        return "no text matches its patterns and its bounds on lengths"
    # The text before "(in regex): " repeats the expression, and lines with a bar show the grammar around it.
    error = re.sub(r"\A.*?\(in regex\): ", "", error, count=1, flags=re.DOTALL)
    error = error.partition("<backtrace>")[0].replace("panic:", "llguidance cannot follow it:")
    lines = [
        line.strip() for line in error.splitlines() if not re.match(r"\s*(\d+ \||\^+\s*$|<non-verbose/>)", line)
    ]
    text = " ".join(lines)
    return text if len(text) <= _MAX_MESSAGE_CHARS else text[:_MAX_MESSAGE_CHARS] + "…"


def _as_llguidance(grammar: Grammar) -> tuple[str, int]:
    """Return a grammar in llguidance's own syntax, and the number of properties that its schemas name."""
    from llguidance import LLMatcher

    match grammar.kind:
        case "json_object":
            return _json_schema('{"type":"object"}')
        case "json_schema":
            return _json_schema(grammar.source)
        case "regex":
            return LLMatcher.grammar_from_regex(grammar.source), 0
        case "choice":
            return LLMatcher.grammar_from_regex(_one_of(grammar.source)), 0
        case "lark" | "gbnf":
            schemas = list[dict[str, Any]]()
            source = with_schemas(_lark(grammar), partial(_collected, schemas))
            check_rules_end(source)
            return LLMatcher.grammar_from_lark(with_flat_rules(source)), sum(map(num_properties, schemas))


def _collected(schemas: list[dict[str, Any]], schema: dict[str, Any]) -> dict[str, Any]:
    schemas.append(rewritten(schema))
    return {"x-guidance": OPTIONS, **schemas[-1]}


def _lark(grammar: Grammar) -> str:
    """Return a grammar in Lark's syntax, translated if it is written in GBNF. Raises InvalidGrammar."""
    if grammar.kind == "lark":
        return grammar.source
    from llguidance.gbnf_to_lark import gbnf_to_lark

    try:
        return gbnf_to_lark(grammar.source)
    except Exception as error:  # A missing rule raises an error without a type.
        raise InvalidGrammar(f"it is no grammar in GBNF: {' '.join(str(error).split())[:200]}") from None


def _ebnf(grammar: Grammar, *, has_terminals: bool | None = None) -> str | None:
    """Return a grammar in xgrammar's syntax; None if it has no translation that is exact."""
    if grammar.kind not in ("lark", "gbnf"):
        return None
    return as_ebnf(
        _lark(grammar), has_terminals=grammar.kind == "lark" if has_terminals is None else has_terminals
    )


def _json_schema(source: str) -> tuple[str, int]:
    from llguidance import LLMatcher

    try:
        schema = json.loads(source)
    except (ValueError, RecursionError):
        schema = None
    if schema is True:
        schema = {}  # Only objects can have options.
    elif not isinstance(schema, dict):
        raise InvalidGrammar("a schema must be a JSON object, or true")
    found = rewritten(schema)
    try:
        return LLMatcher.grammar_from_json_schema(json.dumps(found), overrides=OPTIONS), num_properties(found)  # type: ignore[arg-type]
    except ValueError as error:
        raise InvalidGrammar(explained(str(error))) from None


def _one_of(source: str) -> str:
    """Return a regular expression: one lexeme for any number of choices, where rules would be one item each."""
    try:
        choices = json.loads(source)
    except ValueError as error:
        raise InvalidGrammar(f"choices must be a JSON array of strings: {error}") from None
    if not isinstance(choices, list) or not choices or not all(isinstance(choice, str) for choice in choices):
        raise InvalidGrammar("choices must be a JSON array of at least one string")
    return "|".join("".join(map(_literal, choice)) for choice in choices)


def _literal(char: str) -> str:
    return char if char.isascii() and char.isalnum() else f"\\x{{{ord(char):x}}}"
