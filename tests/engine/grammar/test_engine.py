"""Requests with a grammar in the engine: their output depends on nothing but themselves."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Mapping, Sequence
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from engine import Speculation
from engine.base.errors import InvalidGrammar
from engine.grammar.spec import Grammar
from engine.program.engine import Engine
from engine.settings.config import EngineConfig
from engine.values.sampling_params import InvalidSamplingParams, SamplingParams
from engine.values.stream_delta import StreamDelta
from tests.engine.support.grammar_models import EOS, ids, save_random, tokenizer

RECORD = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 3, "maxLength": 12},
        "sizes": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 999}, "maxItems": 6},
        "kind": {"enum": ["first", "second", "third"]},
    },
    "required": ["name", "sizes", "kind"],
    "additionalProperties": False,
}  # fmt: skip
GRAMMARS: Mapping[str, Grammar | None] = {
    "schema": Grammar("json_schema", json.dumps(RECORD)),
    "regex": Grammar("regex", r"[a-z]{2,9}-[0-9]{1,6}(\.[0-9]{1,4})?"),
    "choice": Grammar("choice", json.dumps(["yes", "no", "it depends", 'né\n"?'])),
    "lark": Grammar(
        "lark", 'start: sum\nsum: term ("+" term){2,5}\nterm: NUM | "(" sum ")"\nNUM: /[1-9][0-9]{0,2}/'
    ),
    "none": None,
}
PROMPT = ids("Answer in a few words: what is it, and how large?")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_random(tmp_path_factory.mktemp("random"))


def engine(model: Path, **config: Any) -> Engine:
    return Engine.from_config(
        EngineConfig(model=str(model), device="cpu", **{"page_size": 4, "kv_pages": 900, **config})
    )


def params(kind: str, seed: int = 0, **sampling: Any) -> SamplingParams:
    return SamplingParams(
        **{
            "max_tokens": 150,
            "seed": seed,
            "temperature": 1.0,
            "frequency_penalty": 1.0,
            "grammar": GRAMMARS[kind],
            **sampling,
        }
    )


class Run:
    """Requests that an engine computes, and their results."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.events: list[list[StreamDelta]] = []

    def add(
        self, sampling: SamplingParams, prompt: Sequence[int] = PROMPT, output_ids: Sequence[int] = ()
    ) -> None:
        name = str(len(self.events))
        self.events.append([])
        self.engine.loop.submit(self.engine.new_request(name, prompt, sampling, output_ids=output_ids))

    def finish(self) -> list[list[int]]:
        """Return the tokens of all requests, in order."""
        while self.engine.loop.has_work:
            for event in self.engine.loop.step():
                self.events[int(event.request_id)].append(event)
        account = self.engine.cache.account()
        assert account.locked == account.private == 0
        return [[token for event in events for token in event.token_ids] for events in self.events]

    def ends(self) -> list[str | None]:
        return [events[-1].finish_reason for events in self.events]


@cache
def undisturbed(model: Path, kind: str, seed: int, temperature: float) -> list[int]:
    """Return the tokens of a request that is alone in an engine, without overlap or cache."""
    run = Run(engine(model, overlap=False, prefix_cache=False))
    run.add(params(kind, seed, temperature=temperature, max_tokens=150 if kind != "none" else 30))
    return run.finish()[0]


def text(tokens: Sequence[int]) -> str:
    return tokenizer().decode([token for token in tokens if token != EOS])


@pytest.mark.parametrize("temperature", [0.0, 1.3])
def test_outputs_match_and_end_by_themselves(model: Path, temperature: float) -> None:
    run = Run(engine(model))
    for kind in ("regex", "choice", "lark"):
        for seed in range(12):
            run.add(params(kind, seed, temperature=temperature))
    outputs = run.finish()
    assert set(run.ends()) == {"stop"}
    texts = [text(tokens) for tokens in outputs]
    assert all(re.fullmatch(r"[a-z]{2,9}-[0-9]{1,6}(\.[0-9]{1,4})?", said) for said in texts[:12])
    assert all(said in ("yes", "no", "it depends", 'né\n"?') for said in texts[12:24])
    for said in texts[24:]:
        assert re.fullmatch(r"[0-9+()]+", said) and isinstance(eval(said), int)
    assert temperature == 0 or len(set(texts)) > 20


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("pages", [900, 45], ids=["room for all", "preempted"])
def test_any_mix_of_requests_in_any_memory(model: Path, overlap: bool, pages: int) -> None:
    """Requests with and without a grammar run together, arrive at any time, and are preempted or not."""
    draw = random.Random(3)
    run = Run(engine(model, overlap=overlap, kv_pages=pages, max_step_tokens=64, max_running=24))
    wanted = []
    for number in range(24):
        kind, temperature = draw.choice(list(GRAMMARS)), draw.choice([0.0, 1.0])
        seed = number % 3
        run.add(params(kind, seed, temperature=temperature, max_tokens=150 if kind != "none" else 30))
        wanted.append(undisturbed(model, kind, seed, temperature))
        for _ in range(draw.randint(0, 3)):
            for event in run.engine.loop.step():
                run.events[int(event.request_id)].append(event)
    assert run.finish() == wanted
    num_preempted = run.engine.loop.load().num_preemptions
    assert (num_preempted > 2) is (pages < 900)


@pytest.mark.parametrize("method", ["ngram", "draft_model"])
def test_draft_tokens_change_nothing(model: Path, method: str) -> None:
    """Neither draft tokens that the grammar allows nor those it forbids change the output; both occur."""
    drafts = (
        Speculation("ngram", adaptive=False, min_match=1)
        if method == "ngram"
        else Speculation("draft_model", model=str(model), adaptive=False)
    )
    run = Run(engine(model, speculation=drafts))
    wanted = []
    for kind, seed, temperature in product(GRAMMARS, range(3), (0.0, 1.0)):
        run.add(params(kind, seed, temperature=temperature, max_tokens=150 if kind != "none" else 30))
        wanted.append(undisturbed(model, kind, seed, temperature))
    assert run.finish() == wanted
    num_steps = run.engine.loop.load().num_steps
    assert num_steps < max(map(len, wanted))


@pytest.mark.parametrize("kind", ["schema", "lark"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_resumed_at_every_token(model: Path, kind: str, temperature: float) -> None:
    """Another engine resumes from the tokens alone, with the prompt in its cache or not."""
    whole = undisturbed(model, kind, 1, temperature)
    run = Run(engine(model))
    run.add(params(kind, 1, temperature=temperature))
    run.finish()
    for cut in range(len(whole) + 1):
        run.add(params(kind, 1, temperature=temperature), output_ids=whole[:cut])
    assert run.finish()[1:] == [whole[cut:] for cut in range(len(whole) + 1)]
    assert set(run.ends()) == {"stop"}
    assert run.events[5][-1].num_cached >= len(PROMPT) - 1


def test_an_output_that_the_grammar_cannot_have_made_fails_only_that_request(model: Path) -> None:
    run = Run(engine(model))
    run.add(params("schema"), output_ids=ids("no JSON at all"))
    run.add(params("schema"))
    outputs = run.finish()
    assert run.ends() == ["error", "stop"]
    assert "grammar" in (run.events[0][-1].error or "")
    assert outputs[1] == undisturbed(model, "schema", 0, 1.0)


def test_a_grammar_that_fails_in_the_middle_fails_only_that_request(model: Path) -> None:
    """5000 rules can start with the same letter, which is more than the parser supports."""
    source = "start: " + " | ".join(f'"a{number}"' for number in range(5000))
    rules = Grammar("lark", source, matcher="llguidance")  # so that no random answer shows it
    run = Run(engine(model))
    run.add(params("none", grammar=rules))
    run.add(params("schema"))
    outputs = run.finish()
    assert run.ends() == ["error", "stop"]
    assert run.events[0][-1].error_code == "grammar_too_complex"
    assert "too complex" in (run.events[0][-1].error or "")
    assert outputs[1] == undisturbed(model, "schema", 0, 1.0)


@pytest.mark.parametrize("drafts", [None, Speculation("ngram", adaptive=False, min_match=1)])
def test_where_nothing_may_follow_the_request_ends_and_its_error_quotes_the_output(
    model: Path, drafts: Speculation | None
) -> None:
    """The last of these grammars allows nothing after its first 240 characters."""
    void = r"void[max_tokens=5]: /[^\s\S]/"
    run = Run(engine(model, speculation=drafts))
    for written in ('"yes"', '"né\\n"', " ".join(['"abcdef"'] * 40)):
        run.add(params("none", max_tokens=400, grammar=Grammar("lark", f"start: {written} void\n{void}")))
    run.add(params("schema"))
    outputs = run.finish()
    assert run.ends() == ["error"] * 3 + ["stop"]
    last = [events[-1] for events in run.events[:3]]
    assert {end.error_code for end in last} == {"grammar_dead_end"}
    assert [str(end.error).partition(" after ")[2] for end in last] == [
        "'yes'", r"'né\n'", repr("…" + "abcdef" * 20)
    ]  # fmt: skip
    assert outputs[3] == undisturbed(model, "schema", 0, 1.0)


def test_min_tokens_hold_up_to_the_end_of_the_grammar(model: Path) -> None:
    run = Run(engine(model))
    open_end, closed = Grammar("regex", "a[bc]*"), Grammar("regex", "ab")
    run.add(params("none", grammar=open_end, min_tokens=12, logit_bias={EOS: 50.0}))
    run.add(params("none", grammar=closed, min_tokens=12))
    run.add(params("none", grammar=open_end, logit_bias={EOS: 50.0}))
    outputs = run.finish()
    assert run.ends() == ["stop"] * 3
    assert [len(tokens) for tokens in outputs] == [13, len(ids("ab")) + 1, 2]


def test_max_tokens_cut_it_off(model: Path) -> None:
    run = Run(engine(model))
    run.add(params("schema", 2, max_tokens=9))
    assert run.finish()[0] == undisturbed(model, "schema", 2, 1.0)[:9]
    assert run.ends() == ["length"]


def test_ignore_eos_with_a_grammar_and_an_invalid_grammar_are_refused(model: Path) -> None:
    with pytest.raises(InvalidSamplingParams, match="ignore_eos") as caught:
        params("schema", ignore_eos=True)
    assert caught.value.param == "ignore_eos"
    with pytest.raises(InvalidGrammar, match="unclosed group"):
        engine(model).new_request("r", PROMPT, params("none", grammar=Grammar("regex", "(")))


def test_the_bound_of_the_compiled_grammars_that_are_kept_is_a_setting(model: Path) -> None:
    for config, is_kept in (({}, True), ({"grammar_cache_bytes": 0}, False)):
        run = Run(engine(model, **config))
        for seed in range(2):
            run.add(params("choice", seed))
        run.finish()
        grammars = run.engine.grammars
        assert bool(grammars.num_bytes) is is_kept
        assert (grammars.num_hits, grammars.num_misses) == (1, 1)  # the first request still had it
