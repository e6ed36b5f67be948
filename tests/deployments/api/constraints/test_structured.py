"""Structured output: from the request's fields to the grammar that engines get, and every bad input."""

from __future__ import annotations

import asyncio
import gc
import json
import tracemalloc
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from typing import Any

import psutil
import pytest

from deployments.admission.fair_threads import FairThreads
from deployments.api import ApiService, Limits
from deployments.api.base.off_loop import take_share
from deployments.client.protocol import Overloaded
from deployments.ingress.grammar_check import GrammarCheck
from engine.base.errors import InvalidGrammar
from engine.grammar.spec import Grammar
from engine.grammar.trial import TooComplex
from engine.grammar.vocabulary import Vocabulary
from monitoring.metrics import Metrics
from tests.deployments.support.scripted_api import MODEL, Client, ScriptedEngine
from tests.engine.support.grammar_models import EOS, NUM_TOKENS, tokenizer
from tests.support.metric_values import snapshot_of

SCHEMA = {"type": "object", "properties": {"b": {"type": "integer"}, "a": {"type": "string"}}, "required": ["b"]}
ONLY_A = {"type": "object", "patternProperties": {"^a$": {"type": "integer"}}, "additionalProperties": False}
ENDLESS = {"type": "integer", "multipleOf": 99999999}
STRICT = Limits(grammar_compile_s=0.3, grammar_processes=1, max_waiting_grammars=3)


def check_with(limits: Limits, metrics: Metrics | None = None) -> GrammarCheck:
    return GrammarCheck(lambda: Vocabulary.of(tokenizer(), NUM_TOKENS, [EOS]), limits, metrics)


@pytest.fixture(scope="module")
def checker() -> Iterator[GrammarCheck]:
    checker = check_with(Limits(grammar_compile_s=1.0))
    yield checker
    checker.close()


@pytest.fixture
def service(service: ApiService, checker: GrammarCheck) -> ApiService:
    served = replace(service.models[MODEL], grammars=checker)
    return replace(service, models={MODEL: served}, limits=Limits.model_validate({"max_grammar_choices": 3}))


def ask(client: Client, path: str = "/v1/completions", **fields: Any) -> Any:
    prompt = {"prompt": "hi"} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "hi"}]}
    return client.post(path, {"model": MODEL, "max_tokens": 64, **prompt, **fields})


def json_schema(schema: object, **more: object) -> dict[str, object]:
    return {"type": "json_schema", "json_schema": {"name": "n", "schema": schema, **more}}


# --- what engines get ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, None),
        ({"response_format": None, "structured_outputs": None}, None),
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, Grammar("json_object")),
        (
            {"response_format": json_schema(SCHEMA, strict=True, description="d")},
            Grammar("json_schema", json.dumps(SCHEMA | {"additionalProperties": False}, separators=(",", ":"))),
        ),
        ({"structured_outputs": {"json": True}}, Grammar("json_schema", "true")),
        ({"structured_outputs": {"json": '{ "type": "null" }', "regex": None}},
         Grammar("json_schema", '{"type":"null"}')),
        ({"structured_outputs": {"json_object": True, "disable_fallback": False}}, Grammar("json_object")),
        ({"structured_outputs": {"regex": "[a-z]+"}}, Grammar("regex", "[a-z]+")),
        ({"structured_outputs": {"choice": ["ja", "né\n"]}}, Grammar("choice", '["ja", "né\\n"]')),
        ({"structured_outputs": {"grammar": 'start: "a"'}}, Grammar("lark", 'start: "a"')),
        ({"structured_outputs": {"regex": "a"}, "response_format": {"type": "text"}}, Grammar("regex", "a")),
    ],
)  # fmt: skip
def test_the_grammar_that_is_asked_for(
    client: Client, engine: ScriptedEngine, path: str, fields: dict[str, Any], expected: Grammar | None
) -> None:
    """Properties keep their order, in which they will be generated."""
    assert ask(client, path, **fields).status_code == 200
    assert engine.requests[0].sampling.grammar == expected


# --- bad input -----------------------------------------------------------------------------------------------

BAD: list[tuple[dict[str, Any], str, str]] = [
    ({"response_format": "json_object"}, "response_format", "must be an object"),
    ({"response_format": {}}, "response_format.type", "is required"),
    ({"response_format": {"type": "json"}}, "response_format.type", "must be one of text, json_object"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "is required"),
    ({"response_format": {"type": "text", "json_schema": {"name": "n", "schema": {}}}},
     "response_format.json_schema", "only allowed"),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": {}}}},
     "response_format.json_schema.name", "is required"),
    ({"response_format": json_schema("{}")}, "response_format.json_schema.schema", "must be a JSON schema"),
    ({"response_format": json_schema({"uniqueItems": True})},
     "response_format.json_schema.schema", "uniqueItems is not supported"),
    ({"response_format": json_schema({"type": "array", "items": {"contains": {}, "not": {}}})},
     "response_format.json_schema.schema", "contains and not are not supported"),
    ({"response_format": json_schema({"type": "strnig"})}, "response_format.json_schema.schema", "strnig"),
    ({"response_format": json_schema(False)}, "response_format.json_schema.schema", "a JSON object, or true"),
    ({"response_format": json_schema({"description": "x" * 70000})},
     "response_format.json_schema.schema", "at most 65536"),
    ({"response_format": json_schema(ENDLESS)}, "response_format.json_schema.schema", "too complex"),
    ({"structured_outputs": []}, "structured_outputs", "must be an object"),
    ({"structured_outputs": {}}, "structured_outputs", "needs one of"),
    ({"structured_outputs": {"json_object": False}}, "structured_outputs", "needs one of"),
    ({"structured_outputs": {"rexeg": "a"}}, "structured_outputs", "needs one of"),
    ({"structured_outputs": {"structural_tag": "a"}}, "structured_outputs.structural_tag", "not JSON"),
    ({"structured_outputs": {"whitespace_pattern": "a"}},
     "structured_outputs.whitespace_pattern", "not supported"),
    ({"structured_outputs": {"json": "{"}}, "structured_outputs.json", "not JSON"),
    ({"structured_outputs": {"json": [1]}}, "structured_outputs.json", "must be a JSON schema"),
    ({"structured_outputs": {"json": "[" * 60000}}, "structured_outputs.json", "not JSON"),
    ({"structured_outputs": {"regex": 5}}, "structured_outputs.regex", "must be a string"),
    ({"structured_outputs": {"regex": "(a"}}, "structured_outputs.regex", "unclosed group"),
    ({"structured_outputs": {"grammar": "root ::= ("}}, "structured_outputs.grammar", "it is no grammar in GBNF"),
    ({"guided_grammar": "root ::= missing"}, "guided_grammar", "Rule 'missing' not found"),
    ({"ebnf": 'root ::= "a" root'}, "ebnf", "can never end"),
    ({"structured_outputs": {"regex": "a" * 2049}}, "structured_outputs.regex", "at most 2048"),
    ({"structured_outputs": {"choice": []}}, "structured_outputs.choice", "at least one string"),
    ({"structured_outputs": {"choice": ["a", 1]}}, "structured_outputs.choice", "at least one string"),
    ({"structured_outputs": {"choice": ["a"] * 4}}, "structured_outputs.choice", "at most 3"),
    ({"structured_outputs": {"grammar": "start: foo"}}, "structured_outputs.grammar", 'unknown name: "foo"'),
    ({"structured_outputs": {"grammar": "start: %json {\"multipleOf\": 99999999}"}},
     "structured_outputs.grammar", "too complex"),
    ({"structured_outputs": {"grammar": "#" * 70000}}, "structured_outputs.grammar", "at most 65536"),
    ({"structured_outputs": {"grammar": 'start: "a" start'}},
     "structured_outputs.grammar", 'rule "start" can never end'),
    ({"structured_outputs": {"grammar": "start: \"yes\" BAD\nBAD: /[^\\s\\S]/"}},
     "structured_outputs.grammar", "BAD matches no text"),
    ({"guided_grammar": 'root ::= "a" rest\nrest ::= "b" rest'}, "guided_grammar", "can never end"),
    ({"structured_outputs": {"regex": "a[^\\s\\S]"}}, "structured_outputs.regex", "no output"),
    ({"response_format": json_schema({"type": "array", "items": {"$ref": "#"}, "minItems": 1})},
     "response_format.json_schema.schema", "without end"),
    ({"response_format": json_schema({**ONLY_A, "required": ["b"]})},
     "response_format.json_schema.schema", "required property 'b' is unsatisfiable"),
    ({"structured_outputs": {"structural_tag": {"type": "structural_tag", "triggers": ["<f"], "structures": [
        {"begin": "<f>", "schema": {"items": {"$ref": "#"}, "minItems": 1, "type": "array"}, "end": "</f>"}]}}},
     "structured_outputs.structural_tag", "without end"),
    ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs.choice", "cannot be combined"),
    ({"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}},
     "structured_outputs.regex", "cannot be combined"),
    ({"structured_outputs": {"regex": "a"}, "ignore_eos": True}, "ignore_eos", "must be false"),
    ({"structured_outputs": {"regex": "a"}, "use_beam_search": True, "n": 2},
     "structured_outputs", "use_beam_search"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "param", "complaint"), BAD)
def test_bad_input_is_a_400_that_names_the_field(
    client: Client, engine: ScriptedEngine, fields: dict[str, Any], param: str, complaint: str
) -> None:
    answer = ask(client, **fields)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param), error
    assert complaint in error["message"] and len(error["message"]) < 500
    assert engine.requests == []


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": json_schema({**ONLY_A, "required": ["a"]})},
        {"response_format": json_schema({"type": "string", "format": "password"})},
        {"guided_json": {"type": "object", "properties": {"a": {"format": "path", "nullable": True}}}},
        {"structured_outputs": {"grammar": 'start: "a" start | "b"'}},
        {"structured_outputs": {"grammar": 'start: %json {"type": "string", "format": "binary"}'}},
    ],
)
def test_a_constraint_that_an_answer_can_match_is_accepted(client: Client, fields: dict[str, Any]) -> None:
    assert ask(client, **fields).status_code == 200


def test_a_schema_may_be_so_deep_and_no_deeper(client: Client) -> None:
    def nested(levels: int) -> dict[str, Any]:
        schema: dict[str, Any] = {"type": "integer"}
        for _ in range(levels - 1):
            schema = {"items": schema}
        return {"response_format": json_schema(schema)}

    assert ask(client, **nested(32)).status_code == 200
    refused = ask(client, **nested(33)).json()["error"]
    assert refused["param"] == "response_format.json_schema.schema" and "32 levels" in refused["message"]


# --- the check itself ----------------------------------------------------------------------------------------


def run(limits: Limits, work: Callable[[GrammarCheck], Awaitable[None]]) -> dict[tuple[str, ...], float]:
    """Do `work` with a grammar check of its own, end its processes, and return what was counted meanwhile."""
    metrics = Metrics(MODEL, "i", "ingress")

    async def main() -> None:
        check = check_with(limits, metrics)
        try:
            await work(check)
        finally:
            check.close()

    asyncio.run(main())
    values = snapshot_of(metrics).values["grammar_requests_total"]
    return {key: count for key, count in values if count}


async def verdict(check: GrammarCheck, grammar: Grammar) -> str:
    try:
        await check.check(grammar)
    except (InvalidGrammar, Overloaded) as error:
        return type(error).__name__
    return "fine"


def test_verdicts_are_remembered_and_counted() -> None:
    fine, wrong = Grammar("json_object"), Grammar("regex", "(")
    endless = Grammar("json_schema", json.dumps(ENDLESS))

    async def work(check: GrammarCheck) -> None:
        for _ in range(2):
            got = [await verdict(check, grammar) for grammar in (fine, wrong, endless)]
            assert got == ["fine", InvalidGrammar.__name__, TooComplex.__name__]

    assert run(STRICT, work) == {("hit",): 1, ("miss",): 1, ("rejected",): 2, ("timeout",): 2}


def test_engines_get_the_size_of_the_memory_that_a_grammar_takes(client: Client, engine: ScriptedEngine) -> None:
    sizes = []
    for number in (97, 9973):
        schema = {"type": "integer", "multipleOf": number}
        assert ask(client, response_format=json_schema(schema)).status_code == 200
        given = engine.requests[-1].sampling.grammar
        assert given is not None
        sizes.append(given.compiled_bytes)
    assert 10_000 < sizes[0] < 1_000_000 < sizes[1]


def test_the_verdict_cache_is_bounded_in_bytes_however_large_the_grammars_are() -> None:
    """Each of 100 refused grammars has 60,000 characters, which are not kept with what is remembered of it."""
    limits = STRICT.model_copy(update={"known_grammar_bytes": 20_000})
    wrong = [Grammar("regex", f"{number}{'a' * 60_000}(") for number in range(100)]

    async def work(check: GrammarCheck) -> None:
        assert await verdict(check, wrong[0]) == InvalidGrammar.__name__
        gc.collect()
        tracemalloc.start()
        for grammar in wrong[1:]:
            assert await verdict(check, grammar) == InvalidGrammar.__name__
        gc.collect()
        kept, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert kept < 30_000

    run(limits, work)


def test_the_grammars_that_were_asked_for_last_are_remembered() -> None:
    limits = STRICT.model_copy(update={"known_grammar_bytes": 5000})
    first, others = Grammar("regex", "first"), [Grammar("regex", f"a{number}") for number in range(20)]

    async def work(check: GrammarCheck) -> None:
        for grammar in others:
            assert await verdict(check, first) == await verdict(check, grammar) == "fine"
        assert await verdict(check, others[-1]) == "fine"  # remembered
        assert await verdict(check, others[0]) == "fine"  # not any more

    assert run(limits, work) == {("miss",): 22, ("hit",): 20}


def test_a_grammar_that_many_requests_ask_for_together_is_compiled_once() -> None:
    async def work(check: GrammarCheck) -> None:
        many = [verdict(check, Grammar("json_object")) for _ in range(20)]
        first = asyncio.ensure_future(many[0])
        others = [asyncio.ensure_future(one) for one in many[1:]]
        await asyncio.sleep(0)
        first.cancel()  # its client went away: the others still get their answer
        assert await asyncio.gather(*others) == ["fine"] * 19

    assert run(STRICT, work) == {("miss",): 19}


def test_no_more_than_so_many_wait() -> None:
    async def work(check: GrammarCheck) -> None:
        got = await asyncio.gather(*(verdict(check, Grammar("regex", f"a{n}")) for n in range(5)))
        assert sorted(got) == ["Overloaded", "Overloaded", "fine", "fine", "fine"]

    run(STRICT, work)


def test_a_tenant_that_has_fewer_than_its_share_of_the_places_gets_one() -> None:
    """One tenant takes all processes and places; another's grammar is let in, and tried before the rest."""

    async def work(check: GrammarCheck) -> None:
        threads = FairThreads(2, "prepare")

        async def ask(tenant: str, grammar: Grammar) -> str:
            take_share(threads, tenant)
            return await verdict(check, grammar)

        done: list[str] = []
        flood = [asyncio.ensure_future(ask("a", Grammar("regex", f"a{n}"))) for n in range(4)]
        for task in flood:
            task.add_done_callback(lambda _: done.append("a"))
        await asyncio.sleep(0)
        others = [asyncio.ensure_future(ask("b", Grammar("regex", f"b{n}"))) for n in range(2)]
        others[0].add_done_callback(lambda _: done.append("b"))
        got = await asyncio.gather(*flood, *others)
        # Three places: the flood's fourth is refused, and of the other tenant's the one beyond its half of them.
        assert got == ["fine", "fine", "fine", "Overloaded", "fine", "Overloaded"]
        assert done.index("b") <= 2  # after the grammar that was being tried, and the refusal
        threads.close()

    run(STRICT, work)


def test_a_grammar_that_takes_too_long_delays_only_those_behind_it_and_leaves_nothing() -> None:
    before = set(psutil.Process().children(recursive=True))

    async def work(check: GrammarCheck) -> None:
        endless = asyncio.ensure_future(verdict(check, Grammar("json_schema", json.dumps(ENDLESS))))
        for number in range(20):  # the other process
            assert await verdict(check, Grammar("regex", f"b{number}")) == "fine"
        assert await endless == TooComplex.__name__

    run(STRICT.model_copy(update={"grammar_processes": 2}), work)
    left = set(psutil.Process().children(recursive=True)) - before
    assert psutil.wait_procs(left, timeout=60)[1] == []


def test_a_grammar_is_tried_again_within_other_limits() -> None:
    """What was too complex within one limit need not be so within another. The process is another one, too."""
    endless = Grammar("json_schema", json.dumps(ENDLESS))

    async def scenario() -> None:
        check = check_with(Limits(grammar_compile_s=0.1))
        try:
            for seconds in ("0.1", "0.2", "0.1"):
                check.take_over(Limits(grammar_compile_s=float(seconds)), None)
                with pytest.raises(TooComplex, match=f"more than {seconds} s"):
                    await check.check(endless)
                await check.check(Grammar("regex", "a+"))
        finally:
            check.close()

    asyncio.run(scenario())
