"""smolagents: an agent whose every answer is a forced call, and one that writes code."""

from __future__ import annotations

from typing import Any

import pytest

from tests.clients.support.weather import Station

smolagents = pytest.importorskip("smolagents", reason="`make clients` installs smolagents")
ANSWER = "21 degrees and sunny"


def agent(api: str, kind: str, model: str, station: Station) -> Any:
    @smolagents.tool
    def get_weather(city: str) -> str:
        """The weather in a city.

        Args:
            city: The city's name.
        """
        return station.get_weather(city)

    asked = smolagents.OpenAIServerModel(model, api_base=api, api_key="none")
    return getattr(smolagents, kind)(tools=[get_weather], model=asked, max_steps=3, verbosity_level=0)


def test_an_agent_calls_until_its_final_answer(api: str) -> None:
    station = Station()
    answer = agent(api, "ToolCallingAgent", "agent", station).run("Find out the weather in Paris.")
    assert answer == ANSWER and station.asked == ["Paris"]


def test_code_that_the_model_writes_is_run(api: str) -> None:
    station = Station()
    answer = agent(api, "CodeAgent", "plain", station).run("Compute the weather in Paris.")
    assert answer == ANSWER and station.asked == ["Paris"]
