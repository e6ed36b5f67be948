"""Where prompts are tokenized: on the event loop if little of them is new, and in a thread if much is."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import deployments.demo_model
from deployments.api import Limits, ModelCard, ServedModel, TextCodec
from deployments.api.conversation.encoder import Encoder
from deployments.api.conversation.template import ChatTemplate
from deployments.api.fields.protocol import Message
from deployments.api.prompt.token_ids import encode_messages, encode_text
from engine.text.tokenizer import load_tokenizer
from monitoring.metrics import Metrics
from tests.support.metric_values import count_of

LIMITS = Limits()
_CHARACTERS = "conversation_characters_total"
LONG = "All work and no play. " * 100


class Work:
    """Notes in which thread what is done."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(Limits, "inline_text_chars", 1000)
        monkeypatch.setattr(Limits, "inline_body_bytes", 20_000)
        self.done: list[tuple[str, bool]] = []
        monkeypatch.setattr(Encoder, "encode", self._noting("encode", Encoder.encode))
        monkeypatch.setattr(ChatTemplate, "render", self._noting("render", ChatTemplate.render))

    def _noting(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def noting(*args: Any, **options: Any) -> Any:
            self.done.append((name, threading.current_thread() is threading.main_thread()))
            return method(*args, **options)

        return noting

    def take(self) -> set[tuple[str, str]]:
        """Return what was done since the last call, and where: on the loop or in a thread."""
        found = {(name, "loop" if is_main else "thread") for name, is_main in self.done}
        self.done.clear()
        return found


@pytest.fixture
def work(monkeypatch: pytest.MonkeyPatch) -> Work:
    return Work(monkeypatch)


def served(max_cache_bytes: int = 10**6) -> ServedModel:
    tokenizer = load_tokenizer(Path(deployments.demo_model.__file__).parent)
    codec = TextCodec(tokenizer, max_cache_bytes=max_cache_bytes)
    card = ModelCard("demo", 1, 100_000, 4096)
    return ServedModel(card, Any, codec, Metrics("demo", "ingress-1"))  # type: ignore[arg-type]


def encoded(model: ServedModel, *contents: str, salt: str = "") -> list[int]:
    """Encode a conversation in which user and assistant take turns."""
    messages = [
        Message(role="assistant" if turn % 2 else "user", content=content) for turn, content in enumerate(contents)
    ]
    return asyncio.run(encode_messages(LIMITS, model, messages, salt=salt))


def test_short_texts_are_encoded_on_the_loop_and_long_ones_in_a_thread(work: Work) -> None:
    model = served()
    work.take()  # its template was tried, and its control tokens were encoded
    asyncio.run(encode_text(LIMITS, model, "Hello"))
    assert work.take() == {("encode", "loop")}
    asyncio.run(encode_text(LIMITS, model, LONG))
    assert work.take() == {("encode", "thread")}


def test_only_the_new_part_of_a_conversation_counts(work: Work) -> None:
    model = served()
    work.take()  # its control tokens were encoded
    encoded(model, LONG)
    assert work.take() == {("render", "loop"), ("encode", "thread")}
    grown = encoded(model, LONG, "Why?", "Tell me more.")
    assert work.take() == {("render", "loop"), ("encode", "loop")}
    assert encoded(model, LONG, "Why?", "Tell me more.") == grown
    assert work.take() == {("render", "loop")}
    assert encoded(served(0), LONG, "Why?", "Tell me more.") == grown


def test_without_a_cache_all_of_it_is_new(work: Work) -> None:
    model = served(0)
    work.take()  # its control tokens were encoded
    for _ in range(2):
        encoded(model, LONG, "Why?", "Tell me more.")
        assert work.take() == {("render", "loop"), ("encode", "thread")}


def test_text_that_another_tenant_has_sent_is_new_if_caches_are_separate(work: Work) -> None:
    model = served()
    encoded(model, LONG, salt="tenant:a:")
    work.take()
    encoded(model, LONG, salt="tenant:b:")
    assert work.take() == {("render", "loop"), ("encode", "thread")}
    encoded(model, LONG, salt="tenant:a:")
    assert work.take() == {("render", "loop")}


def test_kept_and_tokenized_pieces_are_counted() -> None:
    model = served()
    assert model.metrics is not None
    first = len(model.codec.decode(encoded(model, LONG)))
    assert count_of(model.metrics, _CHARACTERS, source="tokenized") == first
    assert count_of(model.metrics, _CHARACTERS, source="kept") == 0
    second = len(model.codec.decode(encoded(model, LONG, "Why?", "Tell me more.")))
    kept = count_of(model.metrics, _CHARACTERS, source="kept")
    assert len(LONG) < kept <= first
    assert count_of(model.metrics, _CHARACTERS, source="tokenized") == first + second - kept


def test_a_very_long_conversation_is_rendered_in_a_thread_too(work: Work) -> None:
    model = served()
    work.take()  # its control tokens were encoded
    encoded(model, LONG * 10)
    assert work.take() == {("render", "thread"), ("encode", "thread")}
