"""`vllm bench serve`: the requests that it sends and the lines that it reads. vLLM is not installed for it."""

from __future__ import annotations

import json
import urllib.request
from typing import Any

import pytest

from tests.clients.support.weather import I_AM, WHO

COMPLETION = {
    "model": "plain", "prompt": WHO, "repetition_penalty": 1.0, "temperature": 0.0, "max_tokens": 40,
    "logprobs": None, "stream": True, "stream_options": {"include_usage": True}, "ignore_eos": True,
}  # fmt: skip
CHAT = {
    "model": "plain", "messages": [{"role": "user", "content": [{"type": "text", "text": WHO}]}],
    "max_completion_tokens": 40, "temperature": 0.0, "stream": True, "stream_options": {"include_usage": True},
    "ignore_eos": True,
}  # fmt: skip


@pytest.mark.parametrize("path, body", [("completions", COMPLETION), ("chat/completions", CHAT)])
def test_a_stream_has_text_and_counts_every_token_that_was_asked_for(
    api: str, path: str, body: dict[str, Any]
) -> None:
    headers = {"content-type": "application/json", "authorization": "Bearer none"}
    request = urllib.request.Request(f"{api}/{path}", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=60) as answer:
        events = [line.decode().strip().removeprefix("data: ") for line in answer if line.strip()]
    assert events.pop() == "[DONE]"
    chunks = [json.loads(event) for event in events]
    texts = [
        choice.get("text") or choice.get("delta", {}).get("content") for c in chunks for choice in c["choices"]
    ]
    assert "".join(text or "" for text in texts) == I_AM
    assert [chunk["usage"]["completion_tokens"] for chunk in chunks if chunk.get("usage")] == [40]
