"""Semantic Kernel: an agent with a plugin, whose functions have the plugin's name before theirs."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.clients.support.weather import ANSWER, I_AM, PARIS, WHO, Station

pytest.importorskip("semantic_kernel", reason="`make clients` installs semantic-kernel")


def agent(api: str, model: str, **options: Any) -> Any:
    from openai import AsyncOpenAI
    from semantic_kernel.agents import ChatCompletionAgent
    from semantic_kernel.connectors.ai.open_ai import OpenAIChatCompletion

    client = AsyncOpenAI(base_url=api, api_key="none", max_retries=0)
    service = OpenAIChatCompletion(ai_model_id=model, async_client=client)
    return ChatCompletionAgent(service=service, name="helper", **options)


def test_an_agent_calls_a_plugin_and_reports_the_result(api: str) -> None:
    from semantic_kernel.functions import kernel_function

    station = Station()

    class Weather:
        @kernel_function(description="The weather in a city.")
        def get_weather(self, city: str) -> str:
            return station.get_weather(city)

    async def run() -> Any:
        return await agent(api, "agent", plugins=[Weather()]).get_response(messages=PARIS)

    assert str(asyncio.run(run())).strip() == ANSWER and station.asked == ["Paris"]


def test_a_stream_has_the_same_text(api: str) -> None:
    async def run() -> str:
        return "".join([str(part.content) async for part in agent(api, "plain").invoke_stream(messages=WHO)])

    assert asyncio.run(run()) == I_AM
