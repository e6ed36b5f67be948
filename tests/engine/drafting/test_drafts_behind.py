"""Drafts that are computed behind a step, before its tokens are known, are those that the host would ask for."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine import Speculation
from engine.attention.batch import AttentionBatch
from engine.attention.pinned import to_device
from engine.drafting.payoff import DraftCost
from engine.graphs import chain_graphs, setup
from engine.graphs.chain_graphs import ChainSize
from engine.runner.draft_model import DraftModel
from engine.runner.drafts_behind import DraftsBehind, num_right
from engine.runner.launched_step import LaunchedStep
from engine.runner.layer_drafter import LayerDrafter, LayerRunner
from engine.runner.model_runner import ModelRunner
from engine.runner.next_drafts import DraftsUnderway, NextDrafts
from engine.runner.prepared_step import PreparedStep
from engine.scheduling.prefill_budget import PrefillBudget
from engine.settings.config import EngineConfig
from engine.values.plan import Chunk, StepPlan, num_accepted
from engine.values.request import PENDING, Request
from engine.values.sampling_params import SamplingParams
from tests.engine.support.counted_copies import META, CountedCopies
from tests.engine.support.counted_reads import noted_reads
from tests.engine.support.eagle3_models import save_eagle3
from tests.engine.support.engine_run import Run
from tests.engine.support.mtp_models import save_with_mtp
from tests.engine.support.operations_seen import FOR_THE_HOST, Operations
from tests.engine.support.oracle import save_tiny
from tests.engine.support.recorded_graphs import GatheringAttention, Recording, record_as_on_gpus
from tests.engine.support.watched_drafts import request

VOCAB = 12
"""So small that draft tokens of random models are often right."""
KINDS = ["draft model", "glm4_moe", "qwen3_next", "eagle3"]
BOTH = ["draft model", "eagle3"]
Config = Callable[..., EngineConfig]
Configs = Callable[[str], Config]


@pytest.fixture(scope="module")
def configs(tmp_path_factory: pytest.TempPathFactory) -> Configs:
    """Settings of an engine that always drafts, by the name of what drafts: a model, or the layer of one."""

    @cache
    def make(kind: str) -> Config:
        directory = tmp_path_factory.mktemp("behind")
        if kind not in ("draft model", "eagle3"):
            model, method = save_with_mtp(kind, directory / "model", vocab_size=VOCAB), {"method": "mtp"}
        else:
            model = save_tiny("llama3.1", directory / "model", vocab_size=VOCAB)
            if kind == "eagle3":
                drafter = save_eagle3(directory / "layer", model, drafted=[0, 1, 2, 3, 4, 6, 7, 8, 9, 11])
            else:
                drafter = save_tiny("qwen3", directory / "draft", seed=3, num_hidden_layers=1, vocab_size=VOCAB)
            method = {"method": "eagle3" if kind == "eagle3" else "draft_model", "model": str(drafter)}
        return lambda speculation=None, **given: config_of(model, {**method, **(speculation or {})}, **given)

    return make


def config_of(model: Path, speculation: dict[str, Any], **given: Any) -> EngineConfig:
    speculation = {"max_drafts": 3, "adaptive": False, **speculation}
    settings = {"device": "cpu", "kv_pages": 80, "max_running": 4, "page_size": 4, "threads": 1, **given}
    return EngineConfig(str(model), cuda_graphs="lazy", speculation=Speculation(**speculation), **settings)


@pytest.fixture(autouse=True)
def recordings(monkeypatch: pytest.MonkeyPatch) -> list[Recording]:
    return record_as_on_gpus(monkeypatch)


def put_prompts_first(run: Run) -> None:
    """Put the chunks of each step in the opposite order."""
    schedule = run.engine.scheduler.schedule

    def turned(now: float) -> StepPlan:
        plan = schedule(now)
        return dataclasses.replace(plan, chunks=plan.chunks[::-1])

    run.engine.scheduler.schedule = turned  # type: ignore[method-assign]


def runner_of(run: Run) -> ModelRunner:
    """Return the runner of what drafts."""
    runner = drafter_of(run)._runner
    assert isinstance(runner, ModelRunner)
    return runner


def drafter_of(run: Run) -> DraftModel:
    drafter = run.engine.scheduler.speculator.drafter
    assert isinstance(drafter, DraftModel), "it has failed"
    return drafter


class Noted:
    """An engine with its drafts: which of them the host asked for, and what the others were when it read them."""

    def __init__(self, config: EngineConfig, monkeypatch: pytest.MonkeyPatch, *, is_behind: bool = True) -> None:
        self.run = Run(config)
        self.num_behind = self.num_asked = 0
        self.steps: list[list[bool]] = []  # for each draft of a step, whether it was computed behind the last one
        self.drafts: dict[tuple[str, tuple[int, ...]], list[int]] = {}
        self._contexts: dict[str, tuple[int, ...]] = {}
        drafter = drafter_of(self.run)
        if not is_behind:
            drafter.behind = None
        propose, read = drafter.propose, DraftsUnderway.read

        def proposing(requests: Sequence[Request], max_tokens: Sequence[int]) -> list[Sequence[int]]:
            found = propose(requests, max_tokens)
            self.steps.append([PENDING in draft for draft in found])
            for one, draft, count in zip(requests, found, max_tokens, strict=True):
                assert len(draft) <= count
                context = tuple(one.tokens)
                self.num_behind += PENDING in draft
                self.num_asked += bool(draft) and PENDING not in draft
                if PENDING in draft:
                    assert set(draft) == {PENDING}
                    self._contexts[one.request_id] = context
                elif draft:
                    self.drafts[one.request_id, context] = list(draft)
            return found

        def reading(underway: DraftsUnderway, request_id: str, count: int) -> Sequence[int]:
            draft = read(underway, request_id, count)
            self.drafts[request_id, self._contexts.pop(request_id, ())] = list(draft)
            return draft

        drafter.propose = proposing  # type: ignore[method-assign]
        monkeypatch.setattr(DraftsUnderway, "read", reading)

    def submit(self, name: str, prompt: Sequence[int], **asked: Any) -> None:
        self.run.submit(name, prompt, SamplingParams(**{"max_tokens": 24, **asked}))


ASKED: tuple[dict[str, Any], ...] = (
    {"temperature": 0},
    {"temperature": 8.0, "seed": 1},
    {"temperature": 4.0, "seed": 2, "top_p": 0.9},
    {"temperature": 5.0, "seed": 3, "top_k": 6, "min_p": 0.05},
)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_drafts_behind_steps_are_those_that_the_host_would_ask_for(
    configs: Configs, kind: str, overlap: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Draft tokens are right in part, or all of them, or none, in each row of a batch. Parts of prompts are in the
    same steps, before these rows or after them.
    """
    config = configs(kind)(overlap=overlap, max_step_tokens=20)
    behind, asked = Noted(config, monkeypatch), Noted(config, monkeypatch, is_behind=False)
    for each in (behind, asked):
        if overlap:
            put_prompts_first(each.run)
        for number, choice in enumerate(ASKED):
            each.submit(str(number), [(number + 3 * at) % VOCAB for at in range(3 + 5 * number)], **choice)
            each.run.step()
        each.run.finish()
    assert asked.num_behind == 0 < len(ASKED) == behind.num_asked, "only the first draft of each"
    assert behind.num_behind > 20
    assert behind.run.tokens("1") == asked.run.tokens("1") and len(behind.run.tokens("1")) == 24
    same = behind.drafts.keys() & asked.drafts.keys()
    assert len(same) > 0.9 * len(asked.drafts)
    for at in same:
        length = min(len(behind.drafts[at]), len(asked.drafts[at]))
        assert behind.drafts[at][:length] == asked.drafts[at][:length], at
    assert 0.1 * behind.run.num_drafts < behind.run.num_accepted < 0.9 * behind.run.num_drafts
    counts = {(step.num_draft_tokens, step.num_accepted_tokens) for step in behind.run.steps}
    assert len(counts) > 5
    assert any(step.num_draft_tokens and step.num_prefill_tokens for step in behind.run.steps)
    pages = runner_of(behind.run).pages
    assert not pages.data[:, :, pages.null_page].any()


@pytest.mark.parametrize("kind", KINDS)
def test_deferrable_requests_are_drafted_for_behind_the_same_steps_as_others(
    configs: Configs, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The drafter is asked twice for a step: for the others, then for these."""
    monkeypatch.setattr(PrefillBudget, "num_deferrable_decodes", lambda *_, **__: 4)  # whatever time they take
    config = configs(kind)(overlap=True)
    both, plain = Noted(config, monkeypatch), Run(dataclasses.replace(config, speculation=None))
    for run in (both.run, plain):
        for number in range(4):
            asked = SamplingParams(max_tokens=24, temperature=0)
            run.submit(str(number), [number, 3, 5], asked, is_deferrable=number > 1)
        run.finish()
    assert [both.run.tokens(str(number)) for number in range(4)] == [
        plain.tokens(str(number)) for number in range(4)
    ]
    assert both.num_asked == 4 < both.num_behind, "only the first draft of each"


def sampling(rng: random.Random, room: int) -> SamplingParams:
    """Parameters with which the device can draw drafts or, of one request in six, with which it cannot."""
    asked: dict[str, Any] = {"temperature": rng.choice([0.0, 3.0, 8.0]), "seed": rng.randrange(100)}
    asked |= rng.choice([{}, {"top_p": 0.8}, {"top_k": 4}, {"min_p": 0.1}, {"logprobs": 2}, {"min_tokens": 6}])
    if rng.random() < 0.4:
        asked["stop_token_ids"] = tuple(rng.sample(range(VOCAB), 1))
    if rng.random() < 0.17:
        asked |= rng.choice([{"repetition_penalty": 1.3}, {"logit_bias": {3: 2.0}}, {"presence_penalty": 0.5}])
    return SamplingParams(max_tokens=rng.randint(6, room), **asked)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_no_token_changes_whatever_requests_come_and_go(
    configs: Configs, kind: str, overlap: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests arrive, end inside drafts, are aborted and preempted, reach the end of the context, and are drafted
    for on the device or by the host, with prompts in chunks next to them and as many draft tokens as pay.
    """
    monkeypatch.setattr(DraftCost, "per_draft_token", lambda cost, num_requests: 0.2)
    num_behind = num_preemptions = num_accepted = 0
    for seed, page_size in enumerate((1, 4, 16)):
        speculation = {
            "adaptive": seed != 1,
            "max_prefill_tokens": (512, 7, 1)[seed],
            "max_drafts": (3, 5, 1)[seed],
        }
        config = configs(kind)(
            speculation,
            overlap=overlap,
            page_size=page_size,
            kv_pages=96 // page_size,
            max_step_tokens=24,
            max_model_len=48,
        )
        behind = Noted(config, monkeypatch)
        plain = Run(dataclasses.replace(config, speculation=None))
        aborted = set()
        for run in (behind.run, plain):
            rng = random.Random(seed)
            for number in range(14):
                prompt = [1, 2, 3] * rng.choice([0, 1, 3]) + [
                    rng.randrange(VOCAB) for _ in range(rng.randint(1, 30))
                ]
                run.submit(str(number), prompt, sampling(rng, 48 - len(prompt)))
                for _ in range(rng.choice([0, 0, 1, 5])):
                    run.step()
                if rng.random() < 0.15:
                    aborted.add(str(number))
                    run.engine.loop.abort(str(number))
            run.finish()
        drafter_of(behind.run)
        for name in plain.events:
            found, expected = behind.run.tokens(name), plain.tokens(name)
            length = min(len(found), len(expected)) if name in aborted else None
            assert found[:length] == expected[:length], name
            if name not in aborted:
                reasons = [run.events[name][-1].finish_reason for run in (behind.run, plain)]
                assert reasons[0] == reasons[1]
        num_behind += behind.num_behind
        num_accepted += behind.run.num_accepted
        num_preemptions += behind.run.engine.scheduler.load(0.0).num_preemptions
    assert num_behind > 60 and num_accepted > 30 and num_preemptions > 0


def noted_order(patch: pytest.MonkeyPatch) -> list[str]:
    """Note in which order steps and drafts are launched and read."""
    said: list[str] = []

    def noting(owner: type, name: str, event: str) -> None:
        does = getattr(owner, name)

        def noted(*arguments: Any, **named: Any) -> Any:
            said.append(event)
            return does(*arguments, **named)

        patch.setattr(owner, name, noted)

    noting(ModelRunner, "_launch", "launch a step")
    noting(DraftsUnderway, "launched", "launch drafts")
    noting(LaunchedStep, "wait", "read a step")
    noting(DraftsUnderway, "read", "read drafts")
    return said


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_is_launched_before_its_drafts_are_read(
    configs: Configs, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are launched before the tokens are read that they follow."""
    said, reads = noted_order(monkeypatch), noted_reads(monkeypatch)
    run = Run(configs(kind)(overlap=True))
    run.submit("r", [1, 2, 3], SamplingParams(max_tokens=24, temperature=0))
    run.finish()
    while said[-1] != "read drafts":
        said.pop()
    first = said.index("launch drafts") - 1
    assert said[first:][:3] == ["launch a step", "launch drafts", "read a step"], "the host drafted for this step"
    each = ["launch a step", "launch drafts", "read a step", "read drafts"]
    assert said[first + 3 :] == each * (len(said[first:]) // 4)
    assert len(said) > 20 and len(reads) == 1


@pytest.mark.parametrize("kind", BOTH)
def test_a_step_and_the_drafts_behind_it_are_sent_to_the_device_in_one_copy(
    configs: Configs, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The host waits for nothing while it launches the drafts."""
    launch, launch_drafts, seen = ModelRunner._launch, NextDrafts.launch, list[PreparedStep]()

    def launching(runner: ModelRunner, step: PreparedStep) -> Any:
        seen.append(step)
        return launch(runner, step)

    def launching_drafts(drafts: NextDrafts, *tensors: torch.Tensor) -> None:
        with Operations() as operations:
            launch_drafts(drafts, *tensors)
        assert not operations.seen & FOR_THE_HOST

    monkeypatch.setattr(ModelRunner, "_launch", launching)
    monkeypatch.setattr(NextDrafts, "launch", launching_drafts)
    run = Run(configs(kind)())
    for name in ("a", "b"):
        run.submit(name, [1, 2, 3], SamplingParams(max_tokens=24, temperature=8.0, seed=1))
    run.finish()
    steps = [step for step in seen if step.drafts is not None and step.next_drafts is not None]
    assert len(steps) > 3
    with CountedCopies() as copies:
        sent = to_device(steps[0], META)
    assert len(copies.sizes) == 1
    assert sent.drafts is not None and sent.next_drafts is not None
    tensors = sent.ids, sent.drafts.places, sent.next_drafts.batch.kv_lens, sent.next_drafts.chain.tables
    assert {tensor.device for tensor in tensors} == {META}
    assert steps[0].next_drafts is not None and sent.next_drafts.underway is steps[0].next_drafts.underway


def finished(config: EngineConfig, *, count: int = 4, **asked: Any) -> tuple[Run, Run]:
    """Run some requests with drafts and without them; their tokens are the same."""
    run, plain = Run(config), Run(dataclasses.replace(config, speculation=None))
    for each in (run, plain):
        for number in range(count):
            params: dict[str, Any] = {"max_tokens": 20, "temperature": 6.0, "seed": number, **asked}
            each.submit(str(number), [number % VOCAB, 5, 9][: 1 + number % 3], SamplingParams(**params))
            each.step()
        each.finish()
    for name in plain.events:
        assert run.tokens(name) == plain.tokens(name)
    return run, plain


@pytest.mark.parametrize("kind", BOTH)
def test_a_drafter_that_fails_behind_a_step_is_not_asked_again(
    configs: Configs, kind: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """No request fails, and the drafts that were begun are not used."""
    calls = iter([False, False, True, *[False] * 99])
    right = ModelRunner.draft_call_behind if kind == "draft model" else LayerRunner.draft_call_behind

    def failing(*arguments: Any) -> Any:
        if next(calls):
            raise RuntimeError("scripted failure")
        return right(*arguments)

    owner = ModelRunner if kind == "draft model" else LayerRunner
    monkeypatch.setattr(owner, "draft_call_behind", failing)
    run, _ = finished(configs(kind)(overlap=True))
    assert not run.engine.scheduler.speculator.is_on
    assert "speculative decoding is off" in caplog.text and "scripted failure" in caplog.text
    assert not run.engine.loop.self_test.counts["other"]
    assert run.num_drafts < 60 and len(list(calls)) == 99


def test_a_drafter_that_cannot_plan_a_draft_is_not_asked_again(
    configs: Configs, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(DraftsBehind, "plan", lambda *_: 1 / 0)
    run, _ = finished(configs("draft model")())
    assert not run.engine.scheduler.speculator.is_on and "ZeroDivisionError" in caplog.text
    assert not run.engine.loop.self_test.counts["other"]


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("kind", BOTH)
def test_a_step_that_fails_ends_its_requests_and_leaves_nothing(
    configs: Configs, kind: str, overlap: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The drafts for it were begun. Later requests with the same names and tokens are drafted for as if new."""
    config = configs(kind)(overlap=overlap)
    run, plain = Run(config), Run(dataclasses.replace(config, speculation=None))
    launch, steps = ModelRunner._launch, iter(range(999))

    def failing(runner: ModelRunner, step: Any) -> Any:
        if step.has_drafts and next(steps) == 4:
            raise RuntimeError("scripted failure")
        return launch(runner, step)

    sampling = SamplingParams(max_tokens=30, temperature=6.0, seed=3)
    monkeypatch.setattr(ModelRunner, "_launch", failing)
    for name in ("a", "b"):
        run.submit(name, [1, 2, 3], sampling)
    run.finish()
    assert [run.events[name][-1].finish_reason for name in ("a", "b")] == ["error", "error"]
    assert run.engine.loop.self_test.counts["other"] == 1
    for each in (run, plain):
        for name in ("a", "b"):
            each.submit(name, [1, 2, 3], sampling)
        each.finish()
    assert run.tokens("a") == run.tokens("b") == plain.tokens("a")
    assert drafter_of(run).behind is not None and len(run.tokens("a")) == 30


@pytest.mark.parametrize("kind", BOTH)
def test_a_request_that_needs_the_host_is_drafted_for_next_to_others(
    configs: Configs, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    noted = Noted(configs(kind)(), monkeypatch)
    asked: tuple[dict[str, Any], ...] = ({"temperature": 0}, {"repetition_penalty": 1.3}, {"temperature": 8.0})
    for name, choice in enumerate(asked):
        noted.submit(str(name), [1, 2, 3], seed=3, **choice)
    noted.run.finish()
    by_host = {name for (name, context), _ in noted.drafts.items() if len(context) > 8} - {"0", "2"}
    assert by_host == {"1"} and noted.num_behind > 10 and noted.num_asked > 5


@pytest.mark.parametrize("kind", BOTH)
def test_drafts_end_where_the_context_does(configs: Configs, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The host asks for the last ones, as long as there is room for any."""
    noted = Noted(configs(kind)(max_model_len=32), monkeypatch)
    noted.submit("r", [1, 2, 3, 4], max_tokens=28, temperature=8.0, seed=5)
    noted.run.finish()
    assert len(noted.run.tokens("r")) == 28 and noted.num_behind > 3
    assert max(len(context) + len(draft) for (_, context), draft in noted.drafts.items()) == 31


@pytest.mark.parametrize("kind", BOTH)
def test_without_a_graph_of_their_size_a_step_s_tokens_are_computed_too(
    configs: Configs, kind: str, monkeypatch: pytest.MonkeyPatch, recordings: list[Recording]
) -> None:
    monkeypatch.setattr(GatheringAttention, "captures_prompts", False)
    noted = Noted(configs(kind)(), monkeypatch)
    for number in range(4):
        noted.submit(str(number), [number, 2, 3], temperature=8.0, seed=number)
    noted.run.finish()
    assert noted.num_behind > 10 and noted.run.num_accepted > 10
    assert recordings[-1].num_recorded <= 2 * 3, "only chains have graphs: of one, two and four rows"


@pytest.mark.parametrize("kind", BOTH)
def test_the_host_asks_for_drafts_of_more_requests_than_graphs_have_rows(
    configs: Configs, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chain_graphs, "chain_sizes", lambda most_rows, most: [ChainSize(2, most - 1)])
    monkeypatch.setattr(setup, "chain_sizes", chain_graphs.chain_sizes)
    noted = Noted(configs(kind)(), monkeypatch)
    for number in range(4):
        noted.submit(str(number), [number, 2, 3], temperature=8.0, seed=number, max_tokens=10 + 15 * (number > 1))
    noted.run.finish()
    assert max(len(step) for step in noted.steps if any(step)) == 2 < max(map(len, noted.steps))
    assert noted.num_behind > 5 and noted.num_asked > 8


@pytest.mark.parametrize("kind", BOTH)
def test_without_a_valid_choice_any_token_is_drafted(
    configs: Configs, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner = ModelRunner if kind == "draft model" else LayerRunner
    right = owner.draft_call_behind

    def without_choice(*arguments: Any) -> Any:
        logits, carried = right(*arguments)
        return logits * torch.nan, carried

    monkeypatch.setattr(owner, "draft_call_behind", without_choice)
    noted = Noted(configs(kind)(), monkeypatch)
    plain = Run(dataclasses.replace(configs(kind)(), speculation=None))
    for run in (noted.run, plain):
        run.submit("r", [1, 2, 3], SamplingParams(max_tokens=24, temperature=8.0, seed=1))
        run.finish()
    assert noted.run.tokens("r") == plain.tokens("r") and noted.num_behind > 10
    assert all(draft[0] == 0 <= min(draft) for (_, context), draft in noted.drafts.items() if len(context) > 8)


@pytest.mark.parametrize("kind", BOTH)
def test_a_request_without_a_valid_token_ends_and_others_are_drafted_for(
    configs: Configs, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, plain = Run(configs(kind)()), Run(dataclasses.replace(configs(kind)(), speculation=None))
    runner = run.engine.runner
    assert isinstance(runner, ModelRunner)
    sample = runner._sampler.sample

    def failing(logits: torch.Tensor, rows: Sequence[Any]) -> Any:
        tokens, reports = sample(logits, rows)
        is_bad = [row.request.request_id == "bad" and row.num_output > 6 for row in rows]
        return torch.where(torch.tensor(is_bad), -1, tokens), reports

    monkeypatch.setattr(runner._sampler, "sample", failing)
    for each in (run, plain):
        for name in ("bad", "good"):
            each.submit(name, [1, 2, 3], SamplingParams(max_tokens=24, temperature=8.0, seed=1))
        each.finish()
    assert run.events["bad"][-1].finish_reason == "error"
    assert run.tokens("bad") == plain.tokens("good")[:7]
    assert run.tokens("good") == plain.tokens("good") and drafter_of(run)


def test_the_states_that_a_layer_no_longer_needs_are_released(configs: Configs) -> None:
    run = Run(configs("eagle3")())
    run.submit("r", [1, 2, 3], SamplingParams(max_tokens=40, temperature=8.0, seed=1))
    drafter = drafter_of(run)
    assert isinstance(drafter, LayerDrafter)
    most = 0
    while run.engine.loop.has_work:
        run.step()
        most = max([most, *(len(pieces) for pieces in drafter._hidden._kept.values())])
    assert most <= 2


@given(data=st.data())
def test_right_draft_tokens_are_counted_as_the_host_counts_them(data: st.DataObject) -> None:
    counts = data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=4), label="tokens of each row")
    some = st.lists(st.integers(0, 1), min_size=sum(counts), max_size=sum(counts))
    tried, drawn = data.draw(some), data.draw(some)
    rows = [request([0] * count, str(at)) for at, count in enumerate(counts)]
    chunks = [Chunk(row, 0, count, [0] * count, [0] * 5, True) for row, count in zip(rows, counts, strict=True)]
    found = num_right(torch.tensor(tried), torch.tensor(drawn), AttentionBatch.from_chunks(chunks, 1, 9))
    expected, at = [], 0
    for count in counts:
        expected.append(num_accepted(tried[at + 1 : at + count], drawn[at : at + count - 1]))
        at += count
    assert found.tolist() == expected
