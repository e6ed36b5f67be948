"""openai-agents: agents over Responses, which is its default, and over chat completions; typed outputs."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.clients.support.city import City
from tests.clients.support.weather import ANSWER, CITY, DESCRIBE, PARIS, Station

agents = pytest.importorskip("agents", reason="`make clients` installs openai-agents")


def model(api: str, name: str, kind: str) -> Any:
    from openai import AsyncOpenAI

    agents.set_tracing_disabled(True)
    return getattr(agents, kind)(name, AsyncOpenAI(base_url=api, api_key="none", max_retries=0))


KINDS = ["OpenAIResponsesModel", "OpenAIChatCompletionsModel"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("streams", [False, True])
def test_an_agent_calls_and_reports_the_result(api: str, kind: str, streams: bool) -> None:
    station = Station()
    tools = [agents.function_tool(station.get_weather)]

    async def run() -> Any:
        agent = agents.Agent(name="helper", model=model(api, "agent", kind), tools=tools)
        if not streams:
            return (await agents.Runner.run(agent, PARIS)).final_output
        result = agents.Runner.run_streamed(agent, PARIS)
        async for _ in result.stream_events():
            pass
        return result.final_output

    assert asyncio.run(run()).strip() == ANSWER and station.asked == ["Paris"]


@pytest.mark.parametrize("kind", KINDS)
def test_an_output_has_its_type(api: str, kind: str) -> None:
    async def run() -> Any:
        agent = agents.Agent(name="helper", model=model(api, "plain", kind), output_type=City)
        return (await agents.Runner.run(agent, DESCRIBE)).final_output

    assert asyncio.run(run()) == City(**CITY)
