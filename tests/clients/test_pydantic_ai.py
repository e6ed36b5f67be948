"""pydantic-ai: agents over chat completions and over Responses, typed outputs, streams."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.clients.support.city import City
from tests.clients.support.weather import ANSWER, CITY, DESCRIBE, I_AM, PARIS, WHO, Station

pydantic_ai = pytest.importorskip("pydantic_ai", reason="`make clients` installs pydantic-ai-slim")


def model(api: str, name: str, kind: str = "chat") -> Any:
    from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
    from pydantic_ai.providers.openai import OpenAIProvider

    provider = OpenAIProvider(base_url=api, api_key="none")
    return (OpenAIResponsesModel if kind == "responses" else OpenAIChatModel)(name, provider=provider)


@pytest.mark.parametrize("kind", ["chat", "responses"])
def test_an_agent_calls_and_reports_the_result(api: str, kind: str) -> None:
    station = Station()
    agent = pydantic_ai.Agent(model(api, "agent", kind), tools=[station.get_weather])

    async def run() -> Any:
        return (await agent.run(PARIS)).output

    assert asyncio.run(run()).strip() == ANSWER and station.asked == ["Paris"]


def test_an_output_has_its_type(api: str) -> None:
    agent = pydantic_ai.Agent(model(api, "plain"), output_type=pydantic_ai.NativeOutput(City))

    async def run() -> Any:
        return (await agent.run(DESCRIBE)).output

    assert asyncio.run(run()) == City(**CITY)


def test_a_stream_has_the_same_text(api: str) -> None:
    async def run() -> str:
        async with pydantic_ai.Agent(model(api, "plain")).run_stream(WHO) as result:
            return "".join([part async for part in result.stream_text(delta=True)])

    assert asyncio.run(run()) == I_AM
