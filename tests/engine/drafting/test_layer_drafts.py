"""Drafts of layers that read hidden states, MTP's and EAGLE-3's, compared with the layers in plain torch."""

from __future__ import annotations

import dataclasses
import gc
import itertools
import shutil
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch

from engine.drafting.payoff import DraftCost
from engine.grammar.spec import Grammar
from engine.models.torch_operations import TorchOperations
from engine.program.load_with_layer import load_with_layer
from engine.runner.hidden_states import HiddenStates
from engine.values.plan import Chunk, StepPlan
from engine.values.request import Request
from engine.values.sampling_params import SamplingParams
from tests.engine.support.counted_reads import noted_reads
from tests.engine.support.engine_run import Run
from tests.engine.support.grammar_models import DEMO, EOS, NUM_TOKENS, compiler
from tests.engine.support.mtp_models import NAMES
from tests.engine.support.recorded_graphs import record_as_on_gpus
from tests.engine.support.watched_drafts import GREEDY, Drafted, Watched, request, run_both, save_drafted

BOTH = ["glm4_moe", "eagle3 qwen3"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Drafted]:
    """A tiny model with a layer, by its name."""
    return cache(lambda name: save_drafted(name, tmp_path_factory.mktemp("drafted")))


Models = Callable[[str], Drafted]
EAGLE3_FAMILIES = ["eagle3 llama3.1", "eagle3 qwen3", "eagle3 granite", "eagle3 gemma3", "eagle3 qwen3_next"]


@pytest.mark.parametrize("name", [*NAMES, *EAGLE3_FAMILIES])
def test_drafts_are_the_layer_s_predictions(model: Models, name: str) -> None:
    runner, drafter = load_with_layer(model(name).config())
    one = request(range(30, 57))
    result = runner.run(StepPlan((Chunk(one, 0, 27, one.tokens, [0, 1, 2], True),)))
    one.tokens += result.token_ids
    assert drafter.propose([one], [4]) == [model(name).predict(one.tokens, 4)]


@pytest.mark.parametrize("name", ["eagle3 qwen3", "eagle3 gemma3"])
def test_states_stay_as_they_were_where_operations_add_in_place(
    model: Models, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As kernels for GPUs do."""
    add_norm = TorchOperations.add_norm

    def added_in_place(operations: Any, x: torch.Tensor, branch: torch.Tensor | None, *rest: Any) -> Any:
        return add_norm(operations, x if branch is None else x.add_(branch), None, *rest)

    monkeypatch.setattr(TorchOperations, "add_norm", added_in_place)
    runner, drafter = load_with_layer(model(name).config(attention="reference"))
    one = request(range(30, 57))
    one.tokens += runner.run(StepPlan((Chunk(one, 0, 27, one.tokens, [0, 1, 2], True),))).token_ids
    assert drafter.propose([one], [4]) == [model(name).predict(one.tokens, 4)]


@pytest.mark.parametrize("name", ["glm4_moe", "qwen3_next", "eagle3 qwen3"])
def test_the_layer_continues_drafts_on_the_device(
    model: Models, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From its own states, which stay there too. The host reads the tokens of a call together."""
    recordings, reads = record_as_on_gpus(monkeypatch), noted_reads(monkeypatch)
    runner, drafter = load_with_layer(model(name).config(cuda_graphs="lazy"))
    assert runner.num_pages == drafter.cache.num_pages == 60
    for number in range(3):
        requests = [request(range(30 + number, 57), f"a{number}"), request(range(40, 49 + number), f"b{number}")]
        for at, one in enumerate(requests):
            chunk = Chunk(one, 0, one.num_tokens, one.tokens[:], [2 * at, 2 * at + 1], True)
            one.tokens += runner.run(StepPlan((chunk,))).token_ids
        expected = [model(name).predict(one.tokens, count) for one, count in zip(requests, (3, 2), strict=True)]
        assert drafter.propose(requests, [3, 2]) == expected
    assert reads == [6] * 3 and recordings[-1].num_replayed == 2


@pytest.mark.parametrize("name", BOTH)
def test_the_layer_s_first_call_after_a_step_is_a_graph(
    model: Models, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of rows with up to `max_drafts` + 1 tokens; a prompt, which is longer, is computed without one."""
    recordings = record_as_on_gpus(monkeypatch)
    runner, drafter = load_with_layer(model(name).config(cuda_graphs="lazy"))
    requests = [request(range(30, 57), "a"), request(range(40, 49), "b")]
    replays = list[int]()
    for counts in ((27, 9), (1, 4), (3, 2), (1, 1)):
        for at, (one, count) in enumerate(zip(requests, counts, strict=True)):
            one.tokens += range(20, 20 + count - 1) if replays else ()
            ids = one.tokens[-count:]
            chunk = Chunk(one, one.num_tokens - count, count, ids, [3 * at, 3 * at + 1, 3 * at + 2], True)
            one.tokens += runner.run(StepPlan((chunk,))).token_ids
        before = recordings[-1].num_replayed
        drafts = drafter.propose(requests, [1, 1])
        replays.append(recordings[-1].num_replayed - before)
        assert drafts == [model(name).predict(one.tokens, 1) for one in requests]
    assert replays == [0, 0, 1, 0], "a size is computed, and then recorded, when it comes for the first time"


WHATEVER = [
    *itertools.product(["deepseek_v3", "glm4_moe", "qwen3_next"], [1, 3, 16]),
    ("eagle3 llama3.1", 3),
    ("eagle3 qwen3", 16),
]


@pytest.mark.parametrize(("name", "page_size"), WHATEVER)
def test_drafts_are_the_layer_s_predictions_whatever_came_before(model: Models, name: str, page_size: int) -> None:
    """Draft tokens were accepted or not, prompts came in chunks, began alike and were computed again."""
    prompts = [
        list(range(20, 26)) * 4,
        list(range(30, 71)),
        list(range(30, 60)),
        [20, 21, 22],
        list(range(30, 71)),
    ]
    settings: dict[str, Any] = {
        "page_size": page_size,
        "kv_pages": 96 // page_size,
        "max_running": 4,
        "max_step_tokens": 24,
    }
    watched = run_both(model(name).config(**settings), prompts)
    assert watched.run.engine.scheduler.load(0.0).num_preemptions > 0
    assert 0 < watched.run.num_accepted < watched.run.num_drafts
    assert watched.starts.count(1) > 0.5 * len(watched.starts)
    watched.check(model(name), every=3)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("name", ["glm4_moe", "qwen3_next", "eagle3 llama3.1"])
def test_drafts_are_the_same_where_steps_are_replayed(
    model: Models, name: str, overlap: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three of four steps have no draft tokens; graphs that sample replay some of these."""
    recordings = record_as_on_gpus(monkeypatch)
    settings: dict[str, Any] = {"cuda_graphs": "lazy", "overlap": overlap, "max_running": 4}
    prompts = [20, 21, 22], list(range(30, 41)), [5, 6]
    watched = run_both(model(name).config(**settings), prompts, every=4)
    assert recordings[0].num_replayed > 3
    assert sum(len(draft) for *_, draft in watched.drafts) > 10
    assert set(watched.starts) <= {0, 1}
    watched.check(model(name))


@pytest.mark.parametrize("name", BOTH)
def test_requests_that_begin_alike_share_the_layer_s_kv(model: Models, name: str) -> None:
    watched = Watched(model(name).config())
    for one in ("first", "second"):
        watched.run.submit(one, list(range(30, 71)), SamplingParams(**GREEDY))
        watched.run.finish()
    computed = [tokens for tokens, _, _ in watched.drafts if len(tokens) == 42]
    assert len(computed) == 2 and watched.starts.count(1) == len(watched.starts)
    assert watched.drafter.cache.stats.inserted_tokens < 2 * 41
    watched.check(model(name))


@pytest.mark.parametrize("name", ["qwen3_next", "eagle3 llama3.1"])
def test_a_context_begins_where_hidden_states_are_known(model: Models, name: str) -> None:
    """The first prompt is longer than what is kept. Of the second, the model has KV from its cache, and the layer
    has none.
    """
    watched = Watched(model(name).config({"max_prefill_tokens": 8}))
    watched.run.submit("long", list(range(30, 71)), SamplingParams(**GREEDY))
    watched.run.finish()
    assert set(watched.starts) == {41 - 8 + 1}
    assert watched.drafter.cache.stats.inserted_tokens == 0
    watched.run.submit("again", list(range(30, 75)), SamplingParams(**GREEDY))
    watched.run.finish()
    assert watched.starts[-1] > 41 - 8 + 1
    watched.check(model(name))


@pytest.mark.parametrize("name", BOTH)
def test_a_request_that_was_not_drafted_for_continues_where_hidden_states_are_known(
    model: Models, name: str
) -> None:
    runner, drafter = load_with_layer(model(name).config({"max_prefill_tokens": 6}))
    one = request(range(30, 57))

    def step(start: int) -> None:
        ids = one.tokens[start:]
        result = runner.run(StepPlan((Chunk(one, start, len(ids), ids, [0, 1, 2], True),)))
        one.tokens += result.token_ids

    step(0)
    [first] = drafter.propose([one], [2])
    assert first == model(name).predict(one.tokens, 2, start=27 - 6 + 1)
    for start in range(27, 36):  # more tokens than are kept
        step(start)
    [second] = drafter.propose([one], [2])
    assert second == model(name).predict(one.tokens, 2, start=36 - 6 + 1)
    drafter.forget(one)
    account = drafter.cache.account()
    assert account.locked == account.private == 0


@pytest.mark.parametrize("name", BOTH)
def test_without_hidden_states_nothing_is_drafted(model: Models, name: str) -> None:
    """As after KV came from elsewhere: once a step has computed a token, there are drafts."""
    runner, drafter = load_with_layer(model(name).config())
    one = request(range(30, 57))
    assert [list(draft) for draft in drafter.propose([one], [3])] == [[]]
    one.tokens += runner.run(StepPlan((Chunk(one, 0, 27, one.tokens, [0, 1, 2], True),))).token_ids
    [draft] = drafter.propose([one], [3])
    assert len(draft) == 3


@pytest.mark.parametrize("name", ["deepseek_v3", "eagle3 llama3.1"])
def test_a_layer_that_is_never_right_is_soon_not_asked(
    model: Models, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A draft token costs a fifth of a step's; how long steps take here decides nothing."""
    monkeypatch.setattr(DraftCost, "per_draft_token", lambda cost, num_requests: 0.2)
    run = Run(model(name).config({"adaptive": True}))
    run.submit("long", [1, 2, 3], SamplingParams(temperature=0, max_tokens=300))
    run.finish()
    assert 0 < run.num_drafts < 300  # 3 in each of 300 steps, if it were always asked
    assert len(run.tokens("long")) == 300


@pytest.mark.parametrize("name", BOTH)
def test_aborted_requests_release_all_that_the_layer_has(model: Models, name: str) -> None:
    """Some requests end while they are drafted for; the others' tokens stay the same."""
    run, plain = Run(model(name).config()), Run(dataclasses.replace(model(name).config(), speculation=None))
    for number in range(6):
        for each in (run, plain):
            each.submit(str(number), range(20 + number, 40 + number), SamplingParams(**GREEDY))
            each.step()
        if number % 2:
            run.engine.loop.abort(str(number - 1))
    drafter = run.engine.scheduler.speculator.drafter
    run.finish()
    plain.finish()
    assert run.num_accepted > 0
    assert run.engine.scheduler.speculator.drafter is drafter, "it has not failed"
    assert [run.tokens(str(number)) for number in (1, 3, 5)] == [plain.tokens(str(number)) for number in (1, 3, 5)]
    assert all(len(run.tokens(str(number))) < 18 for number in (0, 2, 4))


NAMES_OF_PEOPLE = Grammar("json_schema", '{"enum": ["Ada Lovelace, 1815", "Alan Turing"]}')
ANSWERS: list[dict[str, Any]] = [
    {"grammar": Grammar("regex", "(yes|no|maybe so) [a-z]{30}"), "temperature": 0},
    {"grammar": Grammar("regex", "[a-z ]{30,90}"), "temperature": 1.0, "seed": 4, "frequency_penalty": 0.3},
    {"grammar": NAMES_OF_PEOPLE, "temperature": 1.0, "seed": 5},
    {"temperature": 0.7, "seed": 6},
]


@pytest.mark.parametrize("is_graphed", [False, True])
@pytest.mark.parametrize("name", BOTH)
def test_answers_that_match_a_grammar_are_the_same_with_drafts(
    name: str, is_graphed: bool, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The layer chooses among the tokens that the grammar allows, too; EAGLE-3's has only some of them. With
    graphs, the other request's drafts are computed behind steps.
    """
    saved = save_drafted(name, tmp_path_factory.mktemp("grammars"), vocab_size=NUM_TOKENS, eos_token_id=EOS)
    for file in DEMO.glob("*token*"):
        shutil.copy(file, saved.directory)
    if is_graphed:
        record_as_on_gpus(monkeypatch)
    config = saved.config(cuda_graphs="lazy" if is_graphed else "start")
    run, plain = Run(config), Run(dataclasses.replace(config, speculation=None))
    for each in (run, plain):
        for number, asked in enumerate(ANSWERS):
            grammar = asked.get("grammar")
            compiled = None if grammar is None else compiler().compile(grammar)
            each.submit(str(number), [5, 6, number], SamplingParams(max_tokens=60, **asked), compiled=compiled)
        each.finish()
    for one in plain.events:
        assert run.tokens(one) == plain.tokens(one)
        assert run.events[one][-1].finish_reason == plain.events[one][-1].finish_reason
    assert run.num_accepted > 0


# --- hidden states --------------------------------------------------------------------------------------------


def states(positions: range) -> torch.Tensor:
    return torch.tensor([[float(position)] for position in positions])


def kept(hidden: HiddenStates, one: Request, start: int, count: int) -> list[float]:
    return torch.cat(hidden.take(one, start, count)).flatten().tolist()


def chunk(one: Request, positions: range) -> Chunk:
    return Chunk(one, positions.start, len(positions), [0] * len(positions), [], True)


def test_hidden_states_of_wrong_draft_tokens_are_replaced() -> None:
    hidden, one, other = HiddenStates(8, torch.clone), request([1] * 20), request([2] * 20)
    hidden.add([chunk(one, range(4)), chunk(other, range(2))], torch.cat((states(range(4)), states(range(2)))))
    hidden.add([chunk(one, range(2, 5))], states(range(2, 5)) + 100)
    assert kept(hidden, one, 0, 5) == [0, 1, 102, 103, 104]
    assert kept(hidden, other, 0, 2) == [0, 1]


def test_only_the_last_hidden_states_are_kept_and_those_before_a_gap_are_dropped() -> None:
    hidden, one = HiddenStates(3, torch.clone), request([1] * 20)
    hidden.add([chunk(one, range(7))], states(range(7)))
    assert hidden.first(one) == 4
    hidden.add([chunk(one, range(7, 8))], states(range(7, 8)))
    assert kept(hidden, one, 5, 3) == [5, 6, 7]
    assert hidden.first(one) == 7
    hidden.add([chunk(one, range(9, 10))], states(range(9, 10)))
    assert hidden.first(one) == 9


def test_hidden_states_are_copied_and_end_with_their_request() -> None:
    hidden, one, rows = HiddenStates(8, torch.clone), request([1] * 20), states(range(3))
    hidden.add([chunk(one, range(3))], rows)
    rows.zero_()
    assert kept(hidden, one, 0, 3) == [0, 1, 2]
    assert len(hidden._kept) == 1
    del one
    gc.collect()
    assert len(hidden._kept) == 0
