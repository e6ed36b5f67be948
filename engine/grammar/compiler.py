"""Compiles a request's grammar into a matcher that knows which tokens are allowed next.

    Grammar ──▶ llguidance's own syntax ──▶ CompiledGrammar, kept ──▶ a copy per request (`Constraint`)

llguidance works with derivatives of regular expressions and an Earley parser, both of which spend a bounded amount
of fuel per token: a mask that would take too long is an error. Compiling has no such bound (`multipleOf` with a
large number), so clients' grammars are first tried in a process of their own: `engine.grammar.trial`.
"""

from __future__ import annotations

import json
import re
import threading
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from engine.bounded_cache import BoundedCache
from engine.errors import InvalidGrammar
from engine.grammar.compiled import CompiledGrammar, weight
from engine.grammar.languages import LIMITS
from engine.grammar.rules import check_rules_end, with_schemas
from engine.grammar.schema import OPTIONS, rewritten
from engine.grammar.spec import Grammar
from engine.grammar.vocabulary import Vocabulary

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

_MAX_MESSAGE_CHARS = 300


class Compiler:
    """Compiles grammars for one model and keeps those that were used last. May be called from any thread."""

    def __init__(self, vocabulary: Callable[[], Vocabulary], cache_bytes: int = 2**29) -> None:
        """`vocabulary` is called for the first grammar. `cache_bytes` bounds what kept grammars weigh; one that is
        heavier is not kept, but shared by the requests that have it at a time.
        """
        self._vocabulary = vocabulary
        self._tokenizer: LLTokenizer | None = None
        self._loading = threading.Lock()
        self._kept: BoundedCache[Grammar, CompiledGrammar] = BoundedCache(cache_bytes)
        self._used: weakref.WeakValueDictionary[Grammar, CompiledGrammar] = weakref.WeakValueDictionary()
        self._lock = threading.Lock()
        self.num_hits = 0
        """Grammars asked for that were there."""
        self.num_misses = 0
        """Grammars asked for that were compiled, or could not be."""

    @property
    def num_bytes(self) -> int:
        """What the kept grammars weigh."""
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
            if self._tokenizer is None:
                self._tokenizer = self._vocabulary().load()
        compiled = CompiledGrammar(compile_grammar(grammar, self._tokenizer), self._tokenizer)
        with self._lock:
            self._kept.put(grammar, compiled, weight(grammar))
            self._used[grammar] = compiled
        return compiled


def compile_grammar(grammar: Grammar, tokenizer: LLTokenizer) -> LLMatcher:
    """Return a matcher in its initial state. Its first mask is computed once, as some errors show only then.

    Raises InvalidGrammar, with a message for the grammar's author.
    """
    from llguidance import LLMatcher, LLParserLimits  # Imported here: without grammars it need not be installed.

    limits = LLParserLimits(**LIMITS)
    matcher = LLMatcher(tokenizer, _as_llguidance(grammar), log_level=0, limits=limits)
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
        return (
            "oneOf is only supported where its schemas exclude each other, by their types or by a const; use anyOf"
        )
    if error.startswith("NoExtension"):
        return "it allows no output at all"
    if "Regex is empty" in error:  # what follows shows the regular expression as llguidance has it
        return "no text matches its patterns with the lengths that it asks for"
    # The text before "(in regex): " repeats the expression, and lines with a bar show the grammar around it.
    error = re.sub(r"\A.*?\(in regex\): ", "", error, count=1, flags=re.DOTALL)
    error = error.partition("<backtrace>")[0].replace("panic:", "llguidance cannot follow it:")
    lines = [
        line.strip() for line in error.splitlines() if not re.match(r"\s*(\d+ \||\^+\s*$|<non-verbose/>)", line)
    ]
    text = " ".join(lines)
    return text if len(text) <= _MAX_MESSAGE_CHARS else text[:_MAX_MESSAGE_CHARS] + "…"


def _as_llguidance(grammar: Grammar) -> str:
    from llguidance import LLMatcher

    match grammar.kind:
        case "json_object":
            return _json_schema('{"type":"object"}')
        case "json_schema":
            return _json_schema(grammar.source)
        case "regex":
            return LLMatcher.grammar_from_regex(grammar.source)
        case "choice":
            return LLMatcher.grammar_from_regex(_one_of(grammar.source))
        case "lark":
            source = with_schemas(grammar.source, lambda schema: {"x-guidance": OPTIONS, **rewritten(schema)})
            check_rules_end(source)
            return LLMatcher.grammar_from_lark(source)


def _json_schema(source: str) -> str:
    from llguidance import LLMatcher

    try:
        schema = json.loads(source)
    except (ValueError, RecursionError):
        schema = None
    if schema is True:
        schema = {}  # Options can only be added to an object.
    elif not isinstance(schema, dict):
        raise InvalidGrammar("a schema must be a JSON object, or true")
    try:
        return LLMatcher.grammar_from_json_schema(json.dumps(rewritten(schema)), overrides=OPTIONS)  # type: ignore[arg-type]
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
