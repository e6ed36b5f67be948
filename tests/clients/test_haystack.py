"""Haystack: its agent with a tool, and streams."""

from __future__ import annotations

from typing import Annotated, Any

import pytest

from tests.clients.support.weather import ANSWER, I_AM, PARIS, WHO, Station

haystack = pytest.importorskip("haystack", reason="`make clients` installs haystack-ai")


def generator(api: str, model: str, **options: Any) -> Any:
    from haystack.components.generators.chat import OpenAIChatGenerator
    from haystack.utils import Secret

    key = Secret.from_token("none")
    return OpenAIChatGenerator(model=model, api_base_url=api, api_key=key, max_retries=0, **options)


def user(text: str) -> list[Any]:
    from haystack.dataclasses import ChatMessage

    return [ChatMessage.from_user(text)]


def test_an_agent_calls_and_reports_the_result(api: str) -> None:
    from haystack.components.agents import Agent
    from haystack.tools import create_tool_from_function

    station = Station()

    def get_weather(city: Annotated[str, "The city."]) -> str:
        """The weather in a city."""
        return station.get_weather(city)

    agent = Agent(chat_generator=generator(api, "agent"), tools=[create_tool_from_function(get_weather)])
    assert agent.run(messages=user(PARIS))["last_message"].text.strip() == ANSWER
    assert station.asked == ["Paris"]


def test_a_stream_has_the_same_text(api: str) -> None:
    parts: list[str] = []
    streaming = generator(api, "plain", streaming_callback=lambda chunk: parts.append(chunk.content))
    assert streaming.run(user(WHO))["replies"][0].text == "".join(parts) == I_AM
