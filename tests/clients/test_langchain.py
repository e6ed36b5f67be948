"""LangChain and LangGraph: streams, structured output, agents over chat completions and Responses, overflows."""

from __future__ import annotations

from typing import Any

import pytest

from tests.clients.support.city import City
from tests.clients.support.weather import ANSWER, CITY, DESCRIBE, I_AM, PARIS, WHO, Station

langchain_openai = pytest.importorskip("langchain_openai", reason="`make clients` installs langchain-openai")


def chat(api: str, model: str, **options: Any) -> Any:
    return langchain_openai.ChatOpenAI(model=model, base_url=api, api_key="none", max_retries=0, **options)


def test_a_stream_has_the_same_text_and_its_usage(api: str) -> None:
    chunks = list(chat(api, "plain", stream_usage=True).stream(WHO))
    assert "".join(chunk.content for chunk in chunks) == I_AM
    assert sum(chunk.usage_metadata["output_tokens"] for chunk in chunks if chunk.usage_metadata) > 10


def test_messages_may_have_names(api: str) -> None:
    from langchain_core.messages import HumanMessage

    assert chat(api, "plain").invoke([HumanMessage(WHO, name="ann")]).content == I_AM


def test_structured_output_is_an_object(api: str) -> None:
    assert chat(api, "plain").with_structured_output(City).invoke(DESCRIBE) == City(**CITY)


@pytest.mark.filterwarnings("ignore:create_react_agent has been moved")
@pytest.mark.parametrize("options", [{}, {"streaming": True}, {"use_responses_api": True}])
def test_an_agent_of_langgraph_calls_and_reports_the_result(api: str, options: dict[str, Any]) -> None:
    from langgraph.prebuilt import create_react_agent

    station = Station()
    agent = create_react_agent(chat(api, "agent", **options), [station.get_weather])
    messages = agent.invoke({"messages": [("user", PARIS)]})["messages"]
    assert messages[-1].text.strip() == ANSWER and station.asked == ["Paris"]


def test_a_prompt_that_is_too_long_is_a_context_overflow(api: str) -> None:
    from langchain_core.exceptions import ContextOverflowError

    with pytest.raises(ContextOverflowError):
        chat(api, "plain").invoke(WHO * 20_000)
