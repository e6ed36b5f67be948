"""What a request's options cost for each of its tokens: penalties, stop strings, grammars.

For `benchmarks.sampling`. Each function yields rows with microseconds of processor time.
"""

from __future__ import annotations

import json
import random
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import deployments.demo_model
from cache import Namespace
from engine.grammar.compiled import CompiledGrammar
from engine.grammar.compiler import Compiler, matcher_name
from engine.grammar.constraint import Constraint
from engine.grammar.spec import Grammar
from engine.grammar.vocabulary import Vocabulary
from engine.sampling.masks import GrammarMasks
from engine.sampling.sampler import sampler_for
from engine.text.detokenizer import Detokenizer, TextStream
from engine.text.tokenizer import Tokenizer, load_tokenizer
from engine.values.request import Request
from engine.values.sampling_params import MAX_STOP_STRING_CHARS, MAX_STOP_STRINGS, SamplingParams
from engine.values.sampling_row import SamplingRow
from training.corpus import load_facts

DEMO_MODEL = Path(deployments.demo_model.__file__).parent
CONTEXTS = (1_000, 4_000, 16_000, 64_000, 128_000)
VOCABULARY = 151_936
OPTIONS: dict[str, dict[str, Any]] = {
    "none": {},
    "penalties": {"repetition_penalty": 1.1, "presence_penalty": 0.5, "frequency_penalty": 0.5},
    "penalties, logit_bias of 300, min_tokens": {
        "repetition_penalty": 1.1,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.5,
        "logit_bias": {token * 500: 1.0 for token in range(300)},
        "min_tokens": 1000,
    },
}
STEPS = 100
TEXT_TOKENS = 4000
NUM_ANSWERS, ANSWER_TOKENS = 10, 100
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "mail": {"type": "string", "pattern": "^[a-z]{1,20}@[a-z]{1,20}[.](com|org)$"},
        "sizes": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 9999}},
    },
    "required": ["name", "mail", "sizes"],
}


def _optional(number: int) -> Grammar:
    names = {f"p{at}": {"type": "string"} for at in range(number)}
    return Grammar(
        "json_schema", json.dumps({"type": "object", "properties": names, "additionalProperties": False})
    )


GRAMMARS = {
    "any JSON object": Grammar("json_object"),
    "a JSON schema": Grammar("json_schema", json.dumps(SCHEMA)),
    "one of 1,000 strings": Grammar("choice", json.dumps([f"the choice with number {at}" for at in range(1000)])),
    "a regular expression": Grammar("regex", r"([A-Z][a-z]{1,12} ){3,20}[0-9]{4}-[0-9]{2}-[0-9]{2}"),
    "of a right-recursive rule": Grammar("gbnf", "root ::= [a-z ] root | [a-z ]"),
    "of two recursive rules": Grammar(
        "gbnf", "root ::= [a-z ] root | [a-z ] f | [a-z ]\nf ::= [a-z ] f | [a-z ] root | [a-z ]"
    ),
    "of a rule that joins two of its own": Grammar("gbnf", 'root ::= root root | "a" | "b" | " " | root "c" root'),
    "an object with 40 optional properties": _optional(40),
    "an object with 600 optional properties": _optional(600),
}
Row = dict[str, Any]


# --- penalties ----------------------------------------------------------------------------------------------


def penalties() -> Iterator[Row]:
    """Measure tokens after contexts of several lengths, half of them prompt."""
    for options in OPTIONS:
        for context in CONTEXTS:
            yield {"options": options, "context": context, **_penalized(context, OPTIONS[options])}


def _penalized(context: int, options: dict[str, Any]) -> dict[str, float]:
    draw, eos = random.Random(context), 0
    tokens = draw.choices(range(1, VOCABULARY), k=context)
    sampling = SamplingParams(max_tokens=10**6, seed=1, temperature=0.7, **options)
    prompt, output = tokens[: context // 2], tokens[context // 2 :]
    request = Request.make("r", prompt, sampling, arrival=0.0, seed=1, namespace=Namespace("m"), output_ids=output)
    model = torch.randn(1, VOCABULARY, generator=torch.Generator().manual_seed(1)) * 3
    logits, sampler, times = torch.empty_like(model), sampler_for([eos], torch.device("cpu")), []
    for _ in range(STEPS):
        logits.copy_(model)
        began = time.process_time()
        (token,) = sampler.sample(logits, [SamplingRow.of(request)])[0].tolist()
        times.append(time.process_time() - began)
        request.tokens.append(token)
    return {"us": _us(min(times[1:])), "first_us": _us(times[0])}


# --- stop strings -------------------------------------------------------------------------------------------


def stop_strings() -> Iterator[Row]:
    """Measure the text of tokens with no stop strings, with some, and with the longest there may be."""
    tokenizer = load_tokenizer(DEMO_MODEL)
    text = " ".join(fact.sentence for fact in load_facts())
    usual = ["\n\nUser:", "</answer>", "Observation:", "###", "\n\n\n", "<|end|>", "Q: ", "[DONE]"]
    longest = ["a" * (MAX_STOP_STRING_CHARS - 1 - at) + "b" for at in range(MAX_STOP_STRINGS)]
    for number in (0, 1, 2, 4, 8):
        yield {"text": "docstrings", "strings": number, "us": _streamed(tokenizer, text, usual[:number])}
    for number in (0, 1, 8):
        yield {
            "text": "may begin one",
            "strings": number,
            "us": _streamed(tokenizer, "a" * 50_000, longest[:number]),
        }


def _streamed(tokenizer: Tokenizer, text: str, stop: Sequence[str]) -> float:
    """Return the mean for a token of the best of several streams."""
    ids, detokenizer = tokenizer.encode(text, add_special_tokens=False)[:TEXT_TOKENS], Detokenizer(tokenizer)
    best = float("inf")
    for _ in range(5):
        stream = TextStream(detokenizer.decoder(), stop)
        began = time.process_time()
        for token in ids:
            stream.push((token,))
        best = min(best, time.process_time() - began)
        if stream.stopped:
            raise ValueError(f"the text contains one of {stop}; choose others, or the rest of it costs nothing")
    return _us(best / len(ids))


# --- grammars -----------------------------------------------------------------------------------------------


def grammars() -> Iterator[Row]:
    """Measure masks along answers that were drawn by chance, and what compiling takes."""
    tokenizer: Any = load_tokenizer(DEMO_MODEL)
    eos = int(tokenizer.eos_token_id)
    vocabulary = Vocabulary.of(tokenizer, len(tokenizer), [eos])
    compiler = Compiler(lambda: vocabulary, cache_bytes=0)
    compiler.compile(Grammar("regex", "a"))  # it loads the vocabulary
    for name, untried in GRAMMARS.items():
        grammar = replace(untried, matcher=matcher_name(compiler.compile(untried).matcher))
        began = time.process_time()
        compiled = compiler.compile(grammar)
        compiling = time.process_time() - began
        answers = [_draw_answer(compiler.compile(grammar), eos, seed) for seed in range(NUM_ANSWERS)]
        del compiled
        compiled = compiler.compile(grammar)
        first, again = (_masked(compiled, eos, answers) for _ in range(2))
        yield {
            "grammar": name,
            "compile_ms": round(compiling * 1e3, 2),
            "first_us": _us(statistics.fmean(first)),
            "again_us": _us(statistics.fmean(again)),
            "again_p99_us": _us(sorted(again)[len(again) * 99 // 100]),
        }


def _draw_answer(compiled: CompiledGrammar, eos: int, seed: int) -> list[int]:
    draw, answer, matcher = random.Random(seed), list[int](), compiled.matcher.deep_copy()
    while len(answer) < ANSWER_TOKENS:
        bits = torch.frombuffer(bytearray(matcher.compute_bitmask()), dtype=torch.uint8)
        allowed = [token for token in range(compiled.tokenizer.vocab_size) if bits[token // 8] >> token % 8 & 1]
        token = draw.choice(allowed)
        if token == eos:
            break
        matcher.try_consume_tokens([token])
        answer.append(token)
    return answer


def _masked(compiled: CompiledGrammar, eos: int, answers: Sequence[Sequence[int]]) -> list[float]:
    """Return the seconds of each mask, and of consuming the token before it."""
    masks, seconds = GrammarMasks([eos]), list[float]()
    for answer in answers:
        sampling = SamplingParams(max_tokens=1000)
        request = Request.make("r", [1], sampling, arrival=0.0, seed=0, namespace=Namespace("m"))
        request.constraint = Constraint(compiled)
        for token in answer:
            row = SamplingRow.of(request)
            began = time.process_time()
            masks.fill([row])
            seconds.append(time.process_time() - began)
            request.tokens.append(token)
    return seconds


def _us(seconds: float) -> float:
    return round(seconds * 1e6, 2)
