"""LiteLLM: its SDK, and its proxy in front of Raydix."""

from __future__ import annotations

import json
import os
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.clients.support.ports import free_port
from tests.clients.support.weather import ANSWER, I_AM, PARIS, TOOL, WHO, Station

os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # else it asks the network for a list of prices
litellm = pytest.importorskip("litellm", reason="`make clients` installs litellm")
_READY_S = 120.0


def ask(api: str, model: str, messages: list[Any], **fields: Any) -> Any:
    return litellm.completion(
        model=f"openai/{model}", api_base=api, api_key="none", messages=messages, num_retries=0, **fields
    )


def said(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def test_a_stream_has_the_same_text(api: str) -> None:
    chunks = list(ask(api, "plain", [said(WHO)], stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == I_AM


def test_an_agent_thinks_calls_and_reports_the_result(api: str) -> None:
    station, messages = Station(), [said(PARIS)]
    for _ in range(3):
        message = ask(api, "agent", messages, tools=[TOOL]).choices[0].message
        assert message.reasoning_content
        messages.append(message)
        for call in message.tool_calls or ():
            result = station.get_weather(**json.loads(call.function.arguments))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
        if not message.tool_calls:
            break
    assert message.content.strip() == ANSWER and station.asked == ["Paris"]


def test_a_prompt_that_is_too_long_is_a_context_overflow(api: str) -> None:
    with pytest.raises(litellm.ContextWindowExceededError):
        ask(api, "plain", [said(WHO * 20_000)])


@pytest.fixture(scope="module")
def proxy(api: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The base URL of LiteLLM's proxy, which asks Raydix."""
    directory, port = tmp_path_factory.mktemp("litellm"), free_port()
    parameters = {"model": "openai/agent", "api_base": api, "api_key": "none"}
    config = {"model_list": [{"model_name": "behind", "litellm_params": parameters}]}
    (directory / "config.yaml").write_text(yaml.safe_dump(config))
    program = Path(litellm.__file__).parents[4] / "bin/litellm"
    command = [
        str(program),
        "--config",
        str(directory / "config.yaml"),
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
    ]
    with (directory / "output").open("wb") as output:
        server = subprocess.Popen(command, cwd=directory, stdout=output, stderr=output)
        try:
            _wait_until_ready(server, f"http://127.0.0.1:{port}/health/liveliness", directory / "output")
            yield f"http://127.0.0.1:{port}/v1"
        finally:
            server.terminate()
            server.wait(timeout=60)


def _wait_until_ready(server: subprocess.Popen[bytes], url: str, output: Path) -> None:
    deadline = time.monotonic() + _READY_S
    while time.monotonic() < deadline and server.poll() is None:
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except OSError:
            time.sleep(0.5)
    pytest.fail(f"the proxy did not start:\n{output.read_text(errors='replace')[-4000:]}")


def test_its_proxy_passes_on_streams_with_calls(proxy: str) -> None:
    from openai import OpenAI

    client = OpenAI(base_url=proxy, api_key="none", max_retries=0)
    asked: dict[str, Any] = {"model": "behind", "tools": [TOOL], "stream": True}
    chat: Any = client.chat.completions
    stream = chat.create(messages=[said(PARIS)], **asked)
    deltas = [chunk.choices[0].delta for chunk in stream if chunk.choices]
    calls = [call for delta in deltas for call in delta.tool_calls or ()]
    assert calls[0].function and calls[0].function.name == "get_weather"
    arguments = "".join((call.function and call.function.arguments) or "" for call in calls)
    assert json.loads(arguments) == {"city": "Paris"}
    answer = chat.create(model="behind", messages=[said(WHO)])
    assert answer.choices[0].message.content == I_AM
