"""The scripted service of the API's tests, with a chat template of the test's choice."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

import deployments.demo_model
from deployments.api import ApiService, Limits, ModelCard, ServedModel, TextCodec, create_app
from deployments.config.settings import ChatSettings
from engine.grammar.spec import Grammar
from engine.text.tokenizer import load_tokenizer
from monitoring.metrics import Metrics
from tests.deployments.support.api_over_engines import no_metrics
from tests.deployments.support.scripted_api import MODEL, Client, ScriptedEngine
from tests.engine.support.grammar_models import compiler, tokenizer

ASK: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "Is it raining in Oslo?"}]}


def tool(name: str, **properties: Any) -> dict[str, Any]:
    """A function with arguments of these schemas, all required."""
    schema = {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }
    return {"type": "function", "function": {"name": name, "description": f"Does {name}.", "parameters": schema}}


WEATHER = tool("get_weather", city={"type": "string", "maxLength": 12})
CLOCK = tool("clock", zone={"enum": ["utc", "local"]})
TOOLS = [WEATHER, CLOCK]


@dataclass
class Talk:
    """A client, and the engine with scripted answers."""

    service: ApiService
    engine: ScriptedEngine
    metrics: Metrics

    @cached_property
    def client(self) -> Client:
        """A client of the service."""
        return Client(httpx.ASGITransport(create_app(self.service)))

    def of(self, service: ApiService) -> Talk:
        """Return a talk with another service around the same engine."""
        return Talk(service, self.engine, self.metrics)

    def whole(self, **options: Any) -> Any:
        """An answer in one piece."""
        return self.client.run(lambda ai: ai.chat.completions.create(**{**ASK, **options}))

    def chunks(self, **options: Any) -> list[Any]:
        """A stream's chunks."""

        async def collect(ai: openai.AsyncOpenAI) -> list[Any]:
            return [chunk async for chunk in await ai.chat.completions.create(**{**ASK, **options}, stream=True)]

        return self.client.run(collect)  # type: ignore[return-value]

    def streamed(self, **options: Any) -> Any:
        """A stream as the openai client puts it together; it raises what max_tokens cut off."""

        async def collect(ai: openai.AsyncOpenAI) -> Any:
            async with ai.chat.completions.stream(**{**ASK, **options}) as stream:
                try:
                    return await stream.get_final_completion()
                except openai.LengthFinishReasonError as error:
                    return error.completion

        return self.client.run(collect)

    def prompt(self) -> str:
        """The prompt that the engine got last, as text."""
        return self.engine.codec.decode(self.engine.requests[-1].prompt_ids)

    def refused(self, **change: Any) -> dict[str, Any]:
        """Return the error of a bad request, which must not have reached any engine."""
        heard = len(self.engine.requests)
        response = self.client.post("/v1/chat/completions", {**ASK, **change})
        assert response.status_code == 400, response.text
        assert len(self.engine.requests) == heard
        error: dict[str, Any] = response.json()["error"]
        return error


@cache
def codec_of(template: str | None, added: tuple[str, ...], chat: frozenset[tuple[str, str]]) -> TextCodec:
    """The embedded model's tokenizer with such a template, further tokens and settings; reading it takes time."""
    tokenizer: Any = load_tokenizer(Path(deployments.demo_model.__file__).parent)
    if template is not None:
        tokenizer.chat_template = template
    codec = TextCodec(tokenizer, ChatSettings(**dict(chat)))  # type: ignore[arg-type]
    tokenizer.add_tokens(list(added))
    return codec


@pytest.fixture
def talk() -> Callable[..., Talk]:
    """A service on the embedded model's tokenizer, with `template` in place of its own where one is given."""

    def make(
        template: str | None = None, limits: Limits | None = None, added: tuple[str, ...] = (), **chat: str
    ) -> Talk:
        codec, metrics = codec_of(template, added, frozenset(chat.items())), Metrics(MODEL, "ingress-1")
        card = ModelCard(MODEL, created=1, max_model_len=4096, vocab_size=4096)
        engine = ScriptedEngine(codec)
        served = {MODEL: ServedModel(card, engine, codec, metrics)}
        service = ApiService(served, no_metrics, limits or Limits(), metrics)
        return Talk(service, engine, metrics)

    return make


def takes(grammar: Grammar, text: str) -> bool:
    """Whether an answer may be exactly `text`."""
    matcher, ids = (
        compiler().compile(grammar).matcher.deep_copy(),
        tokenizer().encode(text, add_special_tokens=False),
    )
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()
