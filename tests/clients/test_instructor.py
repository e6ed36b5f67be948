"""instructor: forms that a forced call or a JSON schema fills in, whole and piece by piece."""

from __future__ import annotations

from typing import Any

import pytest

from tests.clients.support.city import City
from tests.clients.support.weather import CITY, DESCRIBE, FORM

instructor = pytest.importorskip("instructor", reason="`make clients` installs instructor")


def client(api: str, mode: str) -> Any:
    from openai import OpenAI

    return instructor.from_openai(
        OpenAI(base_url=api, api_key="none", max_retries=0), mode=instructor.Mode[mode]
    ).chat.completions


def test_a_forced_call_fills_in_a_form(api: str) -> None:
    asked = [{"role": "user", "content": FORM}]
    filled = client(api, "TOOLS").create(model="agent", messages=asked, response_model=City, max_retries=0)
    assert filled.model_dump() == CITY


def test_a_json_schema_fills_in_a_form(api: str) -> None:
    asked = [{"role": "user", "content": DESCRIBE}]
    filled = client(api, "JSON_SCHEMA").create(model="plain", messages=asked, response_model=City, max_retries=0)
    assert filled.model_dump() == CITY


def test_a_form_can_be_read_while_it_is_filled_in(api: str) -> None:
    asked = [{"role": "user", "content": FORM}]
    parts = list(client(api, "TOOLS").create_partial(model="agent", messages=asked, response_model=City))
    assert parts[-1].model_dump() == CITY
