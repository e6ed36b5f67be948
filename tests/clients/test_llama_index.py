"""LlamaIndex: streams, an agent with a function, and structured answers by a forced call."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.clients.support.city import City
from tests.clients.support.weather import ANSWER, CITY, FORM, I_AM, PARIS, WHO, Station

pytest.importorskip("llama_index.llms.openai_like", reason="`make clients` installs LlamaIndex")


def model(api: str, name: str) -> Any:
    from llama_index.llms.openai_like import OpenAILike

    return OpenAILike(
        model=name, api_base=api, api_key="none", is_chat_model=True, is_function_calling_model=True,
        context_window=32_768, max_retries=0,
    )  # fmt: skip


def test_a_stream_has_the_same_text(api: str) -> None:
    assert "".join(part.delta or "" for part in model(api, "plain").stream_complete(WHO)) == I_AM


def test_an_agent_calls_and_reports_the_result(api: str) -> None:
    from llama_index.core.agent.workflow import FunctionAgent

    station = Station()

    async def run() -> str:
        return str(await FunctionAgent(llm=model(api, "agent"), tools=[station.get_weather]).run(PARIS))

    assert asyncio.run(run()).strip() == ANSWER and station.asked == ["Paris"]


def test_a_structured_answer_is_an_object(api: str) -> None:
    from llama_index.core.prompts import PromptTemplate

    assert model(api, "agent").structured_predict(City, PromptTemplate(FORM)) == City(**CITY)
