"""AutoGen: an assistant with tools, whole and streamed, and structured answers. It gives every message a name."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.clients.support.city import City
from tests.clients.support.weather import ANSWER, CITY, DESCRIBE, PARIS, Station

pytest.importorskip("autogen_ext", reason="`make clients` installs autogen-ext")
INFO = {
    "vision": False, "function_calling": True, "json_output": True, "structured_output": True, "family": "unknown",
}  # fmt: skip


def run(api: str, model: str, task: str, **options: Any) -> Any:
    """Return the last message of an agent that was given a task."""
    from autogen_agentchat.agents import AssistantAgent
    from autogen_ext.models.openai import OpenAIChatCompletionClient

    async def answer() -> Any:
        client = OpenAIChatCompletionClient(model=model, base_url=api, api_key="none", model_info=INFO)
        result = await AssistantAgent("helper", client, **options).run(task=task)
        await client.close()
        return result.messages[-1]

    return asyncio.run(answer())


@pytest.mark.parametrize("streams", [False, True])
def test_an_assistant_calls_and_reports_the_result(api: str, streams: bool) -> None:
    station = Station()
    tools = {"tools": [station.get_weather], "reflect_on_tool_use": True, "model_client_stream": streams}
    assert run(api, "agent", PARIS, **tools).content.strip() == ANSWER
    assert station.asked == ["Paris"]


def test_a_structured_answer_is_an_object(api: str) -> None:
    assert run(api, "plain", DESCRIBE, output_content_type=City).content == City(**CITY)
