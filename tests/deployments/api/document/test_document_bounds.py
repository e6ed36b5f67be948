"""What /openapi.json says of bodies, methods and bounds is what the server does, field by field.

For each field of each body: values just inside its bounds are taken, those just outside are refused, and where it
has none, whatever is of its type is taken.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from deployments.api import Limits, TextCodec
from tests.deployments.support.all_routes import ADMIN
from tests.deployments.support.described_api import BODIES, USER, Api
from tests.deployments.support.scripted_api import MODEL

BESIDE: dict[str, dict[str, Any]] = {
    "top_logprobs": {"logprobs": True},
    "length_penalty": {"use_beam_search": True, "temperature": 1},
    "early_stopping": {"use_beam_search": True, "temperature": 1},
    "min_tokens": {"max_tokens": 2**31 - 1, "max_output_tokens": 2**31 - 1},
    "stream_options": {"stream": True},
    "messages": {"prompt": None},
}
"""Other fields that a field needs."""
ELSEWHERE = {
    "model": "a 404",
    "truncation_side": "its values",
    "thinking_token_budget": "the model's marks",
    "previous_response_id": "a 404",
    "conversation": "a 404",
    "input_file_id": "a 404",
    "tool_choice": "tools",
    "chat_template_kwargs": "its names",
}
"""Fields that depend on more than their own value, and on what: they have tests of their own."""
GRAMMARS = {"json_schema", "regex", "ebnf", "response_format", "structured_outputs", "text", "bad_words"}
LONG = "a" * 300


@pytest.fixture(scope="module")
def api(codec: TextCodec, tmp_path_factory: pytest.TempPathFactory) -> Api:
    return Api(codec, tmp_path_factory.mktemp("files"))


def test_every_body_of_json_is_tried(api: Api) -> None:
    bodies = {
        path
        for path, methods in api.document["paths"].items()
        if "application/json" in methods.get("post", {}).get("requestBody", {"content": {}})["content"]
    }
    assert bodies == BODIES.keys()


def numbers(form: dict[str, Any]) -> tuple[list[float], list[float]]:
    """Numbers that are in bounds, at these or far out, and that are not."""
    step: float = 1 if form["type"] == "integer" else 0.001
    inside: list[float] = []
    outside: list[float] = []
    for keyword, sign, far in (("inimum", -1, -(2**62)), ("aximum", 1, 2**62)):
        if (bound := form.get(f"m{keyword}")) is not None:
            inside.append(bound)
            outside.append(bound + sign * step)
        elif (bound := form.get(f"exclusiveM{keyword}")) is not None:
            inside.append(bound - sign * step)
            outside.append(bound)
        else:
            inside.append(far)
    excluded = form.get("not", {}).get("const")
    return inside, outside if excluded is None else [*outside, excluded]


def texts(form: dict[str, Any]) -> tuple[list[str], list[str]]:
    if "enum" in form or "const" in form:
        return list(form.get("enum", [form.get("const")])), ["other"]
    least, most = form.get("minLength", 0), form.get("maxLength")
    inside = ["a" * least or "", LONG if most is None else "a" * most]
    return inside, ([""] if least else []) + ([] if most is None else ["a" * (most + 1)])


def fields(path: str, api: Api) -> Iterator[tuple[str, dict[str, Any]]]:
    for name, schema in api.schema(path)["properties"].items():
        if path.endswith("score") and name not in BODIES[path]:
            continue  # other names of the two
        if name not in ELSEWHERE and name not in GRAMMARS and not name.startswith("guided_"):
            yield name, schema


@pytest.mark.parametrize("path", BODIES)
def test_numbers_and_texts_have_the_bounds_of_the_document(api: Api, path: str) -> None:
    for name, schema in fields(path, api):
        forms, other_fields = list(api.forms(schema)), BESIDE.get(name, {})
        if name == "messages" and path != "/tokenize":
            other_fields = {}
        other_fields = {key: value for key, value in other_fields.items() if key in api.schema(path)["properties"]}
        outside: list[Any] = []
        for form in forms:
            kind = form.get("type")
            if "pattern" in form or kind not in ("integer", "number", "string"):
                continue
            good, bad = numbers(form) if kind != "string" else texts(form)
            outside += bad
            for value in good:
                assert api.takes(path, {**other_fields, name: value}), (name, value)
        for value in outside:
            if not (
                isinstance(value, str)
                and any(form.get("type") == "string" and not texts(form)[1] for form in forms)
            ):
                assert not api.takes(path, {**other_fields, name: value}), (name, value)


@pytest.mark.parametrize("path", BODIES)
def test_arrays_have_the_lengths_and_the_entries_of_the_document(api: Api, path: str) -> None:
    for name, schema in fields(path, api):
        other_fields = {"prompt": None} if (name, path) == ("messages", "/tokenize") else {}
        arrays = [form for form in api.forms(schema) if form.get("type") == "array"]
        if not arrays:
            continue
        assert api.takes(path, {**other_fields, name: []}) == all(not form.get("minItems") for form in arrays), (
            name
        )
        for form in arrays:
            entry = api.resolved(form.get("items", {}))
            kind = entry.get("type")
            if kind == "integer":
                good, bad = numbers(entry)
                assert api.takes(path, {name: good}), (name, good)
                for value in bad:
                    assert not api.takes(path, {name: [value]}), (name, value)
            if "maxItems" in form and kind in ("string", "integer"):
                one: Any = "a" if kind == "string" else 5
                assert api.post(path, {name: [one] * (form["maxItems"] + 1)}).status_code == 400, name


@pytest.mark.parametrize("path", BODIES)
def test_integers_may_be_written_with_a_fraction_of_zero(api: Api, path: str) -> None:
    """In JSON, 5.0 is the integer 5: some languages have no other way to write it."""
    for name, schema in fields(path, api):
        for form in api.forms(schema):
            if form.get("type") == "integer":
                value = max(form.get("minimum", 1), 1)
                other_fields = {
                    key: v for key, v in BESIDE.get(name, {}).items() if key in api.schema(path)["properties"]
                }
                assert api.takes(path, {**other_fields, name: float(value)}), name
                assert not api.takes(path, {**other_fields, name: value + 0.5}), name


@pytest.mark.parametrize("rule", ["warn", "ignore", "refuse"])
def test_unknown_fields_are_accepted_where_the_document_allows_them(
    codec: TextCodec, tmp_path: Path, rule: str
) -> None:
    api = Api(codec, tmp_path, Limits(unknown_fields=rule))  # type: ignore[arg-type]
    for path in BODIES:
        others = api.schema(path).get("additionalProperties", True)
        assert others == ({"enum": [None, []]} if rule == "refuse" else True), path
        assert api.takes(path, {"of_another_server": 7}) == (rule != "refuse"), path
        assert api.takes(path, {"of_another_server": None}), path
        assert api.takes(path, {"of_another_server": []}), path


METHODS = ("GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")


def test_every_path_accepts_the_methods_of_the_document_and_lists_them(api: Api) -> None:
    for template, described in api.document["paths"].items():
        path = template.replace("{model_id}", MODEL)
        known = {method.upper() for method in described}
        allowed = ", ".join(sorted(known | ({"HEAD"} if "GET" in known else set()) | {"OPTIONS"}))
        for method in METHODS:
            if method in known or (template.endswith("/input_tokens") and method in ("GET", "DELETE")):
                continue  # by these, it is a response that is not there
            answer = api.client.request(method, path, headers=ADMIN)
            assert answer.status_code == (204 if method == "OPTIONS" else 405), (method, path)
            assert answer.headers["allow"] == allowed, (method, path)


def test_metadata_windows_and_expiries_have_their_bounds(api: Api) -> None:
    pairs = {f"n{at}": "x" for at in range(16)}
    for path in ("/v1/conversations", "/v1/conversations/{conversation_id}", "/v1/batches"):
        assert api.takes(path, {"metadata": {**pairs, "n0": "x" * 512}}) and api.takes(
            path, {"metadata": {"n" * 64: ""}}
        )
        for wrong in ({**pairs, "one more": "x"}, {"n" * 65: ""}, {"n": "x" * 513}, {"n": 7}):
            assert not api.takes(path, {"metadata": wrong}), (path, wrong)
        schema = next(
            form for form in api.forms(api.schema(path)["properties"]["metadata"]) if form["type"] == "object"
        )
        assert (schema["maxProperties"], schema["propertyNames"]) == (16, {"maxLength": 64})
    pattern = re.compile(api.schema("/v1/batches")["properties"]["completion_window"]["pattern"])
    for window in (
        "1s",
        "604800s",
        "10080m",
        "168h",
        "7d",
        "0s",
        "01s",
        "604801s",
        "10081m",
        "169h",
        "8d",
        "1w",
        "24",
    ):
        assert api.takes("/v1/batches", {"completion_window": window}) == bool(pattern.search(window)), window
    bias = next(
        form
        for form in api.forms(api.schema("/v1/completions")["properties"]["logit_bias"])
        if form["type"] == "object"
    )
    keys = re.compile(bias["propertyNames"]["pattern"])
    for key in ("0", "4095", "0017", "4096", "99999", "-1", "a", ""):
        assert api.takes("/v1/completions", {"logit_bias": {key: 1}}) == bool(keys.search(key)), key
    for value in (-100, 100, -100.5, 101):
        assert api.takes("/v1/completions", {"logit_bias": {"5": value}}) == (-100 <= value <= 100)


def test_texts_to_tokenize_are_one_of_two(api: Api) -> None:
    schema = {**copy.deepcopy(api.schema("/tokenize")), "components": api.document["components"]}
    validator = jsonschema.Draft202012Validator(schema)
    bodies: list[dict[str, Any]] = [
        {"prompt": "a"},
        {"prompt": ""},
        {"prompt": None, "messages": [USER]},
        {"messages": [USER]},
        {"messages": [USER], "add_special_tokens": False},
        {"messages": [{"role": "assistant"}]},
        {"messages": [{"role": "assistant", "content": []}, USER]},
        {"messages": [{"role": "tool", "content": None}]},
        {"messages": [{**USER, "reasoning": 7, "tool_calls": 7}]},
        {},
        {"prompt": None},
        {"messages": []},
        {"prompt": "a", "messages": [USER]},
        {"prompt": "a", "messages": []},
        {"messages": [USER], "add_special_tokens": True},
        {"messages": [{"role": "user"}]},
        {"messages": [{"role": "user", "content": None}]},
        {"messages": [{"role": "tool"}]},
        {"messages": [{"role": "tool", "content": []}]},
        {"messages": [{"role": "assistant", "reasoning_content": []}]},
        {"messages": [USER], "chat_template_kwargs": {"_a1": 1}},
        *({"prompt": "a", "chat_template_kwargs": {name: 1}} for name in ("a", "é", "1a", "bos_token", "tools")),
        *({"messages": [USER], "chat_template_kwargs": {name: 1}} for name in ("", "a b", "tokenize")),
        {"prompt": "a", "continue_final_message": True, "add_generation_prompt": False},
        {"prompt": "a", "continue_final_message": True, "add_generation_prompt": True},
    ]
    for body in bodies:
        status = api.client.post("/tokenize", body).status_code
        assert validator.is_valid(body) == (status == 200), (body, status)
