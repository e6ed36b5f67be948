"""A grammar that is slow to follow delays no other request, and has a bounded time."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from engine import Speculation
from engine.grammar.compiled import CompiledGrammar
from engine.grammar.mask_pace import LATE_SECONDS
from engine.grammar.matcher import GrammarMatcher
from engine.grammar.spec import Grammar
from engine.program.engine import Engine
from engine.settings.config import EngineConfig
from engine.values.sampling_params import SamplingParams
from engine.values.stream_delta import StreamDelta
from tests.engine.support.grammar_models import ids, save_random

SCHEMA = Grammar(
    "json_schema", '{"type":"array","items":{"type":"integer","minimum":0,"maximum":999},"maxItems":9}'
)
PROMPT = ids("Answer in a few words: what is it, and how large?")
HELD = SamplingParams(max_tokens=60, temperature=1.0, seed=1, grammar=SCHEMA)
FREE = SamplingParams(max_tokens=20, temperature=1.0, seed=2)


class Slow:
    """A matcher whose masks take longer than steps wait for, and, once it is halted, for ever."""

    def __init__(self, matcher: GrammarMatcher, may_continue: threading.Event) -> None:
        self._matcher, self._may_go_on = matcher, may_continue

    def deep_copy(self) -> Slow:
        return Slow(self._matcher.deep_copy(), self._may_go_on)

    def compute_bitmask(self) -> bytes:
        in_thread = threading.current_thread().name.startswith("grammar-mask")
        assert in_thread or self._may_go_on.is_set(), "a step would wait for ever"
        began = time.thread_time()
        while time.thread_time() < began + 2 * LATE_SECONDS or not self._may_go_on.is_set():
            pass
        return self._matcher.compute_bitmask()

    def try_consume_tokens(self, tokens: list[int]) -> int:
        return self._matcher.try_consume_tokens(tokens)

    def rollback(self, num_tokens: int) -> bool:
        return self._matcher.rollback(num_tokens)

    def is_accepting(self) -> bool:
        return self._matcher.is_accepting()

    def is_error(self) -> bool:
        return self._matcher.is_error()

    def get_error(self) -> str:
        return self._matcher.get_error()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_random(tmp_path_factory.mktemp("random"))


class Scene:
    """An engine whose requests may have the slow grammar."""

    def __init__(self, model: Path, **config: Any) -> None:
        settings = EngineConfig(
            **{"model": str(model), "device": "cpu", "page_size": 4, "kv_pages": 900, **config}
        )
        self.engine = Engine.from_config(settings)
        self.may_continue = threading.Event()
        self.may_continue.set()
        self.events: dict[str, list[StreamDelta]] = {}
        fast = self.engine.grammars.compile(SCHEMA)
        self._slow = CompiledGrammar(Slow(fast.matcher, self.may_continue), fast.tokenizer)

    def add(
        self, name: str, sampling: SamplingParams, *, is_slow: bool = False, output_ids: Sequence[int] = ()
    ) -> None:
        compiled = self._slow if is_slow else None
        self.events[name] = []
        request = self.engine.new_request(name, PROMPT, sampling, output_ids=output_ids, compiled=compiled)
        self.engine.loop.submit(request)

    def step(self) -> None:
        for event in self.engine.loop.step():
            self.events[event.request_id].append(event)

    def until(self, is_so: Callable[[], bool]) -> None:
        while not is_so():
            assert self.engine.loop.has_work, "all have ended before that"
            self.step()

    def finish(self) -> None:
        self.until(lambda: not self.engine.loop.has_work)

    def tokens(self, name: str) -> list[int]:
        return [token for event in self.events[name] for token in event.token_ids]

    def end(self, name: str) -> StreamDelta:
        return self.events[name][-1]

    def has_ended(self, name: str) -> bool:
        return bool(self.events[name]) and self.end(name).finish_reason is not None


@pytest.fixture
def scene(model: Path) -> Iterator[Scene]:
    scene = Scene(model)
    yield scene
    scene.may_continue.set()
    scene.engine.close()


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("drafts", [None, Speculation("ngram", adaptive=False, min_match=1)])
@pytest.mark.parametrize("pages", [900, 40], ids=["room for all", "preempted"])
def test_the_answer_of_a_slow_grammar_is_that_of_a_fast_one(
    model: Path, overlap: bool, drafts: Speculation | None, pages: int
) -> None:
    scene = Scene(model, overlap=overlap, speculation=drafts, kv_pages=pages)
    scene.add("fast", HELD)
    scene.add("slow", HELD, is_slow=True)
    scene.add("free", FREE)
    scene.finish()
    assert scene.tokens("slow") == scene.tokens("fast") != []
    assert [scene.end(name).finish_reason for name in ("fast", "slow", "free")] == ["stop", "stop", "length"]
    account = scene.engine.cache.account()
    assert account.locked == account.private == 0
    scene.engine.close()


def test_others_continue_while_its_mask_is_computed(scene: Scene) -> None:
    scene.add("slow", HELD, is_slow=True)
    scene.until(lambda: len(scene.tokens("slow")) >= 5)
    scene.may_continue.clear()
    scene.add("free", FREE)
    scene.add("fast", HELD)
    scene.until(lambda: scene.has_ended("free") and scene.has_ended("fast"))
    assert not scene.has_ended("slow")
    scene.may_continue.set()
    scene.finish()
    assert scene.tokens("slow") == scene.tokens("fast")


def test_the_output_of_another_engine_is_followed_in_a_thread(scene: Scene) -> None:
    scene.add("whole", HELD)
    scene.finish()
    whole = scene.tokens("whole")
    scene.may_continue.clear()
    scene.add("slow", HELD, is_slow=True, output_ids=whole[:4])
    scene.add("free", FREE)
    scene.until(lambda: scene.has_ended("free"))
    scene.may_continue.set()
    scene.finish()
    assert scene.tokens("slow") == whole[4:]


@pytest.mark.parametrize("is_halted", [True, False])
def test_a_request_over_its_time_ends_with_the_tokens_that_it_has(model: Path, is_halted: bool) -> None:
    """Whether one mask takes for ever, or many take too long together."""
    scene = Scene(model, grammar_mask_budget_s=(50 if is_halted else 10) * LATE_SECONDS)
    scene.add("slow", HELD, is_slow=True)  # the first with a grammar: it is found out in its first steps
    if is_halted:
        scene.until(lambda: len(scene.tokens("slow")) >= 5)
        scene.may_continue.clear()
    scene.add("free", FREE)
    scene.finish()
    scene.may_continue.set()
    scene.add("whole", HELD)
    scene.finish()
    end, written = scene.end("slow"), scene.tokens("slow")
    assert (end.finish_reason, end.error_code) == ("error", "grammar_too_complex")
    assert "engine.grammar_mask_budget_s" in (end.error or "")
    assert written and written == scene.tokens("whole")[: len(written)]
    assert scene.end("free").finish_reason == "length"
    scene.engine.close()


def test_a_request_that_is_aborted_meanwhile_leaves_nothing(scene: Scene) -> None:
    scene.add("slow", HELD, is_slow=True)
    scene.until(lambda: len(scene.tokens("slow")) >= 4)
    scene.may_continue.clear()
    scene.step()
    scene.engine.loop.abort("slow")
    scene.finish()
    assert scene.end("slow").finish_reason == "abort"
    account = scene.engine.cache.account()
    assert account.locked == account.private == 0


@pytest.mark.parametrize("budget", [0, -1.0, float("nan")])
def test_the_time_must_be_above_zero(budget: float) -> None:
    with pytest.raises(ValueError, match="grammar_mask_budget_s must be above 0"):
        EngineConfig(grammar_mask_budget_s=budget)
