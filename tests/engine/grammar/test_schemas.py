"""Every answer to each of two hundred schemas is valid, whatever the model would otherwise generate."""

from __future__ import annotations

import json
import random
import re

import jsonschema
import pytest

from engine import LLM, SamplingParams
from engine.grammar.spec import Grammar
from tests.engine.support.grammar_models import ids, save_random
from tests.engine.support.json_schemas import Schema, schemas

SCHEMAS = schemas()
QUOTE = ids('"')[0]
FORMATS = jsonschema.FormatChecker()
PROMPTS = ["", "Answer as JSON: ", "def f(x):\n    ", "The quick brown fox"]


@FORMATS.checks("time")
def is_time(value: str) -> bool:
    """Check a time of RFC 3339, whose Z may be lower case, which the library's own check does not accept."""
    return re.fullmatch(r"\d\d:\d\d:\d\d(\.\d+)?([zZ]|[+-]\d\d:\d\d)", value) is not None


def has_any_names(schema: Schema) -> bool:
    return isinstance(schema, dict) and isinstance(schema.get("additionalProperties"), dict)


@pytest.fixture(scope="module", params=["embedded", "random"])
def llm(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LLM:
    """The embedded model, and an untrained one with the same tokenizer."""
    if request.param == "embedded":
        return LLM("demo", kv_pages=4096)
    return LLM(str(save_random(tmp_path_factory.mktemp("random"))), kv_pages=4096)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_every_answer_is_valid(llm: LLM, temperature: float) -> None:
    """All run in one batch, beside requests without a grammar, whose output is the same as alone."""
    draw = random.Random(1)
    free = SamplingParams(temperature=temperature, seed=3, max_tokens=20)
    held = [
        SamplingParams(
            temperature=temperature,
            max_tokens=400,
            seed=seed,
            # Digits of a fraction and names of additional properties have no bound: the one end when the model
            # tires of digits, the others when it likes to close strings.
            frequency_penalty=2.0,
            logit_bias={QUOTE: 30.0} if has_any_names(schema) else {},
            grammar=Grammar("json_schema", json.dumps(schema)),
        )
        for seed, schema in enumerate(SCHEMAS.values())
    ]
    alone = llm.generate("alone", free, progress=False)[0]
    prompts = ["alone", *("x" + draw.choice(PROMPTS) for _ in held)]
    first, *outputs = llm.generate(prompts, [free, *held], progress=False)
    assert first.token_ids == alone.token_ids
    wrong = []
    for (name, schema), output in zip(SCHEMAS.items(), outputs, strict=True):
        try:
            assert output.finish_reason == "stop", output.finish_reason
            jsonschema.Draft202012Validator(schema, format_checker=FORMATS).validate(json.loads(output.text))
        except (AssertionError, ValueError, jsonschema.ValidationError) as error:
            wrong.append(f"{name}: {str(error)[:200]} {output.error} {output.text[:400]!r}")
    assert not wrong, "\n".join(wrong)
    account = llm.engine.cache.account()
    assert account.locked == account.private == 0


def test_the_list_has_at_least_two_hundred_valid_schemas() -> None:
    assert len(SCHEMAS) >= 200
    for schema in SCHEMAS.values():
        jsonschema.Draft202012Validator.check_schema(schema)
