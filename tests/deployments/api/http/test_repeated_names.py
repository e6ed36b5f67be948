"""Arguments of calls that are objects name nothing twice: a body with a value that would be lost is refused."""

from __future__ import annotations

import pytest

from deployments.api import Limits
from deployments.api.base.errors import ApiError
from deployments.api.http.body import parse_object

CALL = '{"messages": [{"role": "user", "content": "hi"}, {"tool_calls": [{"function": {"arguments": %s}}]}]}'
BLOCK = '{"input": [1], "messages": [{"content": [{"type": "tool_use", "input": %s}]}]}'
PATHS = {CALL: "messages.1.tool_calls.0.function.arguments", BLOCK: "messages.0.content.0.input"}


@pytest.mark.parametrize("body", PATHS)
@pytest.mark.parametrize(
    ("arguments", "below"),
    [
        ('{"a": 1, "a": 2}', ""), ('{"a": 1, "a": 1}', ""),
        ('{"b": [{"c": {"a": 1, "b": 2, "a": {}}}]}', ".b.0.c"),
        ('{"\\u0061": 1, "a": "x: y"}', ""), ('{"a": -0, "a": 1e400}', ""), ('{"": 1, "a": {"": 2, "": 3}}', ".a"),
    ],
)  # fmt: skip
def test_a_name_that_stands_twice_is_refused_with_its_place(body: str, arguments: str, below: str) -> None:
    with pytest.raises(ApiError, match="twice") as caught:
        parse_object((body % arguments).encode(), Limits())
    assert (caught.value.status, caught.value.param) == (400, f"{PATHS[body]}{below}")


@pytest.mark.parametrize("body", PATHS)
@pytest.mark.parametrize(
    "arguments",
    [
        '{"a": 1, "b": {"a": 2}, "c": [{"a": 1}, {"a": 1}]}', '"{\\"a\\": 1, \\"a\\": 2}"', "{}", "null",
        '{"a": "\\"a\\": 1, \\\\", "b": ":{\\"arguments\\":{"}',
    ],
)  # fmt: skip
def test_a_body_that_names_each_value_once_is_accepted(body: str, arguments: str) -> None:
    parse_object((body % arguments).encode(), Limits())


def test_elsewhere_the_last_value_counts_as_it_always_did() -> None:
    once = '{"a": {"arguments": {"b": 1}}, "temperature": 0, "temperature": 1}'
    assert parse_object(once.encode(), Limits())["temperature"] == 1
    with pytest.raises(ApiError, match=r"a\.arguments has the name .b. twice"):
        parse_object(once.replace('{"b": 1}', '{"b": 1, "b": 1}').encode(), Limits())
