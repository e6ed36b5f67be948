"""Bodies: a number in the arguments of a call keeps its text, and anywhere else it is only a number."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deployments.api import Limits
from deployments.api.base import exact_json
from deployments.api.base.errors import ApiError
from deployments.api.http.body import parse_object
from tests.deployments.support.tool_answers import NUMBERS
from tests.support.examples import examples

LIMITS = Limits()
WORDS = st.sampled_from(["model", "arguments", "input", "parameters", "documents", "a", "-0 ", "é\\u00e9", "\\\\"])
NUMBER = st.sampled_from([number for number in NUMBERS if number != "1e400"]) | st.from_regex(
    r"-?(0|[1-9][0-9]{0,20})(\.[0-9]{1,20})?([eE][+-]?[0-9]{1,2})?", fullmatch=True
)


def values(numbers: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    """JSON of any form as text."""
    leaf = numbers | WORDS.map(lambda word: f'"{word}"') | st.sampled_from(["true", "null"])
    return st.recursive(leaf, lambda one: st.lists(one, max_size=3).map(array) | objects(one))


def array(parts: list[str]) -> str:
    return f"[{','.join(parts)}]"


def objects(one: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    members = st.dictionaries(WORDS, one, max_size=3)
    return members.map(
        lambda found: f"{{{','.join(f'{chr(34)}{name}{chr(34)}:{value}' for name, value in found.items())}}}"
    )


def read(text: str) -> dict[str, Any]:
    return parse_object(text.encode(), LIMITS)


@settings(max_examples=examples(200))
@given(text=objects(values(NUMBER)))
def test_arguments_keep_their_numbers_as_written_and_all_else_is_parsed_as_usual(text: str) -> None:
    def check(found: Any, plain: Any, written: Any, *, is_top: bool, is_shown: bool = False) -> None:
        if isinstance(written, dict):
            assert found.keys() == plain.keys() == written.keys()
        if not isinstance(written, dict | list):
            assert found == (written if is_shown else plain)
            assert is_shown or type(found) is type(plain)
            return
        for key, child in written.items() if isinstance(written, dict) else enumerate(written):
            if key in ("arguments", "input") and not is_top and isinstance(child, dict | list):
                assert exact_json.encode(found[key]) == exact_json.encode(child)
            else:
                kept = is_shown or (key in ("parameters", "documents") and isinstance(child, dict | list))
                check(found[key], plain[key], child, is_top=False, is_shown=kept)

    check(read(text), msgspec.json.decode(text), exact_json.parse(text), is_top=True)


@settings(max_examples=examples(100))
@given(arguments=objects(values(NUMBER | st.sampled_from(["1e400", "9" * 5000, "-" + "9" * 5000]))))
def test_arguments_are_written_as_they_were_read(arguments: str) -> None:
    for text in (f'{{"calls":[{{"arguments":{arguments}}}]}}', f'{{"a":{{"input":{arguments}}}}}'):
        assert exact_json.encode(read(text)) == exact_json.encode(exact_json.parse(text))


@pytest.mark.parametrize(
    "text, path",
    [
        ('{"temperature": 1e400}', "temperature"),
        ('{"input": -1e400}', "input"),
        ('{"input": [1, {"a": 1e400}]}', "input.1.a"),
        ('{"a": [{"input": {"n": 1e400}}, [1E999]]}', "a.1.0"),
        ('{"tools": [{"parameters": {"maximum": 1e400}}]}', "tools.0.parameters.maximum"),
        (f'{{"seed": {"9" * 5000}}}', "seed"),
        (f'{{"{"x" * 5000}": {{"y": 1e400}}}}', "x" * 64 + ".y"),
    ],
    ids=lambda value: value[:40],
)
def test_a_number_that_is_too_large_elsewhere_is_named(text: str, path: str) -> None:
    with pytest.raises(ApiError) as refused:
        read(text)
    assert refused.value.status == 400 and refused.value.param == path
    assert refused.value.message.startswith(f"{path} is ") and len(refused.value.message) < 400


@pytest.mark.parametrize(
    "rest, says",
    [
        ("}", "not valid JSON: Extra data at line 1"),
        (', "a": NaN', "not valid JSON: NaN"),
        (', "a": "\\ud800"', "surrogate"),
        (', "a": ' + "[" * 70 + "]" * 70, "nested deeper than 64"),
        (', "a": ' + "[" * 9000 + "]" * 9000, "nested deeper than 64"),
        (', "a": 01', "not valid JSON"),
    ],
    ids=lambda value: value[:20],
)
@pytest.mark.parametrize("number", ["1", "-0", "1e400", "0.10", "9" * 5000], ids=lambda value: value[:9])
def test_other_faults_are_named_whatever_numbers_there_are(number: str, rest: str, says: str) -> None:
    with pytest.raises(ApiError, match=says) as refused:
        read(f'{{"calls": {{"arguments": [{number}]}}{rest}}}')
    assert refused.value.status == 400
