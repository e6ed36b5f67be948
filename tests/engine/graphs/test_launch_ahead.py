"""Steps are launched before the tokens of earlier ones are read: a device does not wait for the host."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.attention.host_pages import HostKVPages
from engine.loading.load_model import load_model
from engine.program.engine import Engine
from engine.runner.model_runner import ModelRunner
from engine.runner.stage_clock import StageClock
from engine.runner.token_reader import TokenReader, TokensUnderway
from engine.settings.config import EngineConfig
from engine.values.plan import Chunk, StepPlan, StepResult, result_of
from engine.values.request import PENDING
from engine.values.sampling_params import SamplingParams
from tests.engine.support.counted_copies import META, CountedCopies
from tests.engine.support.graph_workloads import greedy_request, last_chunk_of
from tests.engine.support.recorded_graphs import graphed

_PATIENCE_S = 60.0
"""Only a test that fails waits so long."""
NUM_TOKENS = 9


class GatedReader(TokenReader):
    """Tokens of a step do not come before the next step was launched, as if the device were slow."""

    def __init__(self, num_steps: int) -> None:
        super().__init__(torch.device("cpu"))
        self.launched = [threading.Event() for _ in range(num_steps + 1)]
        self.launched[num_steps].set()  # Nothing follows the last one.
        self.num_launched = 0
        self.said: list[tuple[str, int]] = []

    def begin(self, tokens: torch.Tensor) -> TokensUnderway:
        step, self.num_launched = self.num_launched, self.num_launched + 1
        self.said.append(("launch", step))
        self.launched[step].set()
        return GatedTokens(tokens, self, step)


class GatedTokens(TokensUnderway):
    def __init__(self, tokens: torch.Tensor, reader: GatedReader, step: int) -> None:
        super().__init__(tokens.clone(), None)
        self._reader, self._step = reader, step

    def is_done_within(self, seconds: float) -> bool:
        return False

    def wait(self) -> list[int]:
        if not self._reader.launched[self._step + 1].wait(_PATIENCE_S):
            raise AssertionError(f"step {self._step} is read before step {self._step + 1} is launched")
        self._reader.said.append(("read", self._step))
        return super().wait()


def config_for(model: Path, **settings: Any) -> EngineConfig:
    given = {"kv_pages": 32, "max_running": 2, "overlap": True, "threads": 1, "windowed_kv": "off", **settings}
    return EngineConfig(str(model), device="cpu", attention="reference", page_size=4, max_model_len=60, **given)


def generate(engine: Engine) -> list[int]:
    sampling = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    engine.loop.submit(engine.new_request("r", [11, 12, 13, 14], sampling))
    tokens: list[int] = []
    while engine.loop.has_work:
        for event in engine.loop.step():
            assert event.error is None, event.error
            tokens += event.token_ids
    engine.loop.stop()
    return tokens


def test_a_step_is_launched_before_the_tokens_of_the_last_one_are_read(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, reader = config_for(model), GatedReader(NUM_TOKENS)
    with monkeypatch.context() as patch:
        patch.setattr("engine.runner.model_runner.TokenReader", lambda device: reader)
        runner, recording = graphed(config)
    assert generate(Engine(config, runner)) == generate(Engine(config, load_model(config)))
    assert recording.num_replayed > 0
    for step in range(NUM_TOKENS - 1):  # The first one computes the prompt.
        assert reader.said.index(("launch", step + 1)) < reader.said.index(("read", step))


class HeldReader(TokenReader):
    """Tokens may be read only after `release`."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.is_released = False

    def begin(self, tokens: torch.Tensor) -> TokensUnderway:
        return HeldTokens(tokens, self)


class HeldTokens(TokensUnderway):
    def __init__(self, tokens: torch.Tensor, reader: HeldReader) -> None:
        super().__init__(tokens.clone(), None)
        self._reader = reader

    def is_done_within(self, seconds: float) -> bool:
        return self._reader.is_released

    def wait(self) -> list[int]:
        if not self._reader.is_released:
            raise RuntimeError("the host waits for tokens")
        return super().wait()


STEPS = (
    [("a", 5)],
    [("a", 1), ("b", 4)],  # the first tokens of a prompt: nothing is sampled after them
    [("a", 1), ("b", 5)],
    [("a", 1), ("b", 1)],  # only decodes: replayed
    [("b", 1), ("a", 1), ("c", 3)],
    [("b", 1), ("a", 1), ("c", 1)],
)
"""The requests of each step, with their numbers of tokens."""


def play(runner: ModelRunner, reader: HeldReader | None = None, **asked: Any) -> list[list[int]]:
    """Run the steps and return the tokens of each. With a reader, all are launched before any tokens are read."""
    requests = {name: greedy_request(name, length, **asked) for name, length in (("a", 5), ("b", 9), ("c", 3))}
    pages = {"a": [0, 1, 2], "b": [3, 4, 5], "c": [6, 7]}
    computed, launched = dict.fromkeys(requests, 0), []
    for step in STEPS:
        chunks = []
        for name, count in step:
            request, start = requests[name], computed[name]
            computed[name] = end = start + count
            ids, samples = request.tokens[start:end], end == request.num_tokens
            chunks.append(Chunk(request, start, count, ids, pages[name], samples))
        plan = StepPlan(tuple(chunks))
        launched.append(runner.prepare(plan)())
        sampling = plan.sampling_chunks
        sampled = [PENDING] * len(sampling) if reader is not None else result_of(launched[-1]).token_ids
        for chunk, token in zip(sampling, sampled, strict=True):
            chunk.request.tokens.append(token)
    if reader is not None:
        assert not any(isinstance(found, StepResult) or found.is_done_within(0) for found in launched)
        reader.is_released = True
    return [list(result_of(found).token_ids) for found in launched]


@pytest.fixture
def held(model: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[ModelRunner, HeldReader]:
    reader = HeldReader()
    with monkeypatch.context() as patch:
        patch.setattr("engine.runner.model_runner.TokenReader", lambda device: reader)
        runner, _ = graphed(config_for(model), max_tokens=8)
    return runner, reader


@pytest.mark.parametrize(
    "asked",
    [
        {},
        {"temperature": 0.9},
        {"temperature": 0.9, "top_k": 9, "top_p": 0.9, "min_p": 0.01},
        {"min_tokens": 3},
        {"logit_bias": {3: 4.0}},
        {"logprobs": 1},
    ],
    ids=str,
)
def test_the_host_launches_any_steps_without_their_tokens(
    model: Path, held: tuple[ModelRunner, HeldReader], asked: dict[str, Any]
) -> None:
    """Steps with prompts, too: the next ones begin with tokens that only the device knows."""
    runner, reader = held
    assert play(runner, reader, **asked) == play(load_model(config_for(model)), **asked)


@pytest.mark.parametrize("asked", [{"repetition_penalty": 1.3}, {"presence_penalty": 1.0}], ids=str)
def test_the_host_reads_the_tokens_that_penalties_depend_on(
    model: Path, held: tuple[ModelRunner, HeldReader], asked: dict[str, Any]
) -> None:
    runner, reader = held
    with pytest.raises(RuntimeError, match="the host waits for tokens"):
        play(runner, reader, **asked)
    reader.is_released = True
    assert play(graphed(config_for(model))[0], **asked) == play(load_model(config_for(model)), **asked)


def test_a_prompt_whose_tokens_cannot_be_read_ends_its_own_request_only(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next step was launched before that, and continues both the lost request and another one."""
    config = config_for(model)
    runner, _ = graphed(config)
    engine = Engine(config, runner)
    ends: dict[str, Any] = {}
    tokens: dict[str, list[int]] = {"lost": [], "after": [], "again": []}

    def step() -> None:
        for event in engine.loop.step():
            tokens[event.request_id] += event.token_ids
            if event.finish_reason:
                ends[event.request_id] = event.finish_reason

    def submit(name: str) -> None:
        sampling = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True)
        engine.loop.submit(engine.new_request(name, [11, 12, 13, 14], sampling))

    submit("lost")
    step()  # It launches the prompt.
    submit("after")
    with monkeypatch.context() as patch:
        patch.setattr(TokensUnderway, "wait", lambda _: 1 / 0)
        step()
    assert ends == {"lost": "error"}
    while engine.loop.has_work:
        step()
    submit("again")
    while engine.loop.has_work:
        step()
    engine.loop.stop()
    assert ends == {"lost": "error", "after": "length", "again": "length"}
    assert tokens["after"] == tokens["again"] and not tokens["lost"]
    account = engine.cache.account()
    assert account.locked == account.private == 0


def test_a_step_is_sent_to_its_device_in_one_copy(model: Path) -> None:
    """A decode whose token is pending, and a prompt."""
    runner = load_model(config_for(model))
    a, b = greedy_request("a", 5), greedy_request("b", 9)
    a.tokens.append(PENDING)
    chunks = Chunk(a, 5, 1, [PENDING], [0, 1], samples=True), Chunk(b, 0, 9, b.tokens, [2, 3, 4], samples=True)
    with CountedCopies() as copies:
        step = runner.read(StepPlan(chunks), META)
    assert len(copies.sizes) == 1
    assert step.batch is not None and {step.ids.device, step.batch.block_table.device} == {META}


def test_tokens_keep_their_values_when_later_steps_run(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each step's tokens lie in memory of their own until they are read."""
    runner, _ = graphed(config_for(model))
    config = config_for(model, overlap=False)
    expected = generate(Engine(config, load_model(config)))
    seen: list[torch.Tensor] = []
    begin = TokenReader.begin

    def noting(reader: TokenReader, tokens: torch.Tensor) -> TokensUnderway:
        seen.append(tokens)
        return begin(reader, tokens)

    monkeypatch.setattr(TokenReader, "begin", noting)
    generate(Engine(config, runner))
    assert [int(tokens[0]) for tokens in seen] == expected


def test_a_step_that_was_launched_early_counts_from_the_end_of_the_one_before(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it waited for the device is no part of its time, or every step would seem to take two."""
    from engine.program.timed_step import TimedStep

    times = iter([1.0, 1.5, 9.0])

    class Underway:
        def is_done_within(self, seconds: float) -> bool:
            return True

        def wait(self) -> StepResult:
            return StepResult((), ())

    class Launcher:
        def prepare(self, plan: StepPlan) -> Any:
            return Underway

    step = TimedStep(Launcher(), StepPlan(), lambda: next(times))
    found = step.run()
    assert isinstance(found, Underway) and step.underway is found
    step.wait(found, 6.0)
    assert step.seconds == 3.0


def test_stages_of_a_step_read_later_are_reported_without_waiting() -> None:
    stages = StageClock(torch.device("cpu"))
    stages.begin_forward()
    stages.begin_sampling()
    stages.end_sampling()
    assert stages.sample_seconds() >= 0


def test_a_steps_result_is_there_when_its_copies_to_the_host_are(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever learns the result may read host pages in another thread; what is launched waits for nothing."""
    runner, _ = graphed(config_for(model, preemption="swap", host_kv_gib=0.001))
    waited: list[int] = []
    assert runner.host_memory.num_pages
    monkeypatch.setattr(HostKVPages, "fence", lambda _: lambda: waited.append(1))
    decode = last_chunk_of(greedy_request("r", 6), [0, 1])
    for swapped, count in ((((5, 0),), 1), ((), 0)):
        plan = StepPlan((decode,), swap_out=swapped)
        for _ in range(2):
            underway = runner.prepare(plan)()
            assert not waited
            result_of(underway)
            assert len(waited) == count
            waited.clear()
        request = greedy_request("p", 7)
        prompt = Chunk(request, 0, 7, request.tokens, [2, 3], samples=True)
        underway = runner.prepare(StepPlan((prompt,), swap_out=swapped))()
        assert not waited and not isinstance(underway, StepResult)
        underway.wait()
        assert len(waited) == count
        waited.clear()
    runner.run(StepPlan(swap_out=((5, 0),)))
    assert waited == [1], "without any token, too"
