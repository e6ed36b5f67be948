"""A grammar that leads nowhere, or becomes too complex, is the client's fault, and the answer says so."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import pytest

import deployments.demo_model
from engine.loading.load_model import load_model
from engine.text.tokenizer import load_tokenizer
from tests.deployments.support.api_over_engines import Api, api_over

VOID = r"void[max_tokens=5]: /[^\s\S]/"
DEAD_END = f'start: "né," ("a"{{8}} void | "b"{{8}} void)\n{VOID}'
"""After ten characters, nothing may follow; it is not found out before an answer is there."""
COMPLEX = 'start: /[A-Za-z](?s:.*)/ | "-" (' + " | ".join(f'"a{number}"' for number in range(5000)) + ")"
"""What may follow the hyphen is too much; random answers that begin with a letter do not show it."""
HYPHEN = load_tokenizer(Path(deployments.demo_model.__file__).parent).encode("-", add_special_tokens=False)[0]
FAULTS = pytest.mark.parametrize(
    ("grammar", "code", "said"),
    [(DEAD_END, "grammar_dead_end", "after 'né,"), (COMPLEX, "grammar_too_complex", "too complex")],
)
PATHS: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "hi"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}]},
    "/v1/responses": {"input": "hi"},
}


def asked(path: str, grammar: str, **change: Any) -> dict[str, Any]:
    length = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
    held = {"structured_outputs": {"grammar": grammar}, "logit_bias": {str(HYPHEN): 100}}
    return {"model": "m", length: 60, "temperature": 0, **held, **PATHS[path], **change}


def error_of(path: str, response: httpx.Response) -> dict[str, Any]:
    """Return the error of an answer, or of the last event of a stream."""
    if not response.headers["content-type"].startswith("text/event-stream"):
        assert response.status_code == 400, response.text
        return dict(response.json()["error"])
    data = [line.removeprefix("data: ") for line in response.text.splitlines() if line.startswith("data: ")]
    assert len(data) >= 2, "text came before the error"
    if path == "/v1/responses":
        error, failed = json.loads(data[-2]), json.loads(data[-1])
        assert (failed["type"], failed["response"]["error"]["message"]) == ("response.failed", error["message"])
        return dict(error)
    return dict(json.loads(data[-1])["error"])


def run(work: Any) -> None:
    async def main() -> None:
        async with api_over(2, load=load_model, model="demo", kv_pages=256, page_size=16) as api:
            await work(api)

    asyncio.run(main())


@FAULTS
@pytest.mark.parametrize("path", PATHS)
def test_the_error_is_a_400_that_quotes_where_it_happened_and_in_a_stream_its_last_event(
    path: str, grammar: str, code: str, said: str
) -> None:
    async def work(api: Api) -> None:
        for change in ({}, {"stream": True}):
            error = error_of(path, await api.http.post(path, json=asked(path, grammar, **change)))
            assert error["code"] == code and said in error["message"] and len(error["message"]) < 500
        for report in api.reports:
            assert report.generation is not None and report.error_type == "invalid_request_error"
            (timeline,) = report.generation.choices.timelines
            assert (len(timeline.spans), timeline.migrations) == (1, []), "it was tried at no other engine"

    run(work)


@FAULTS
def test_requests_that_run_at_the_same_time_are_not_affected(grammar: str, code: str, said: str) -> None:
    async def work(api: Api) -> None:
        path = "/v1/completions"
        fine = asked(path, 'start: "yes"', n=3)
        several, *others = await asyncio.gather(
            api.http.post(path, json=asked(path, grammar, n=3, temperature=1)),
            *(api.http.post(path, json=fine) for _ in range(4)),
        )
        assert error_of(path, several)["code"] == code and said in several.text
        for answer in others:
            assert [choice["text"] for choice in answer.json()["choices"]] == ["yes"] * 3

    run(work)
