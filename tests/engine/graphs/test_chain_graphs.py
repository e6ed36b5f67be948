"""Drafts that continue on the device are those of one call after the other, and the host reads them once."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cache import Namespace
from engine.attention.batch import AttentionBatch
from engine.grammar.compiler import Compiler
from engine.grammar.constraint import Constraint
from engine.grammar.spec import Grammar
from engine.grammar.vocabulary import Vocabulary
from engine.graphs.chain_graphs import ChainGraphs, ChainStart, chain_sizes
from engine.graphs.row_assignment import RowLayout
from engine.runner.draft_model import DraftModel
from engine.runner.model_runner import ModelRunner
from engine.sampling.graph_chooser import RowParams, torch_graph_chooser
from engine.settings.config import EngineConfig
from engine.values.request import Request
from engine.values.sampling_params import SamplingParams
from tests.engine.support.counted_reads import noted_reads
from tests.engine.support.grammar_models import EOS, save_random, tokenizer
from tests.engine.support.oracle import VOCAB
from tests.engine.support.recorded_graphs import Recording, graphed
from tests.support.examples import examples

MAX_LEN = 44
MOST = 5


class Drafters(NamedTuple):
    """Two drafters with the same model: one that continues drafts on the device, and one that does not."""

    chained: DraftModel
    plain: DraftModel
    runner: ModelRunner
    recording: Recording

    @classmethod
    def of(cls, runner: ModelRunner, **settings: Any) -> Drafters:
        """Make drafters with empty pages; the second one's pages are as many, without a page for padding."""
        recording = Recording()
        own, others = runner.with_pages(runner.num_pages + 1), runner.with_pages(runner.num_pages)
        chains = own.chain_graphs(chain_sizes(6, MOST), recording)
        chained = DraftModel(own, [7], **settings, chains=chains)
        return cls(chained, DraftModel(others, [7], **settings), own, recording)

    def check(self, requests: Sequence[Request], most: Sequence[int]) -> list[list[int]]:
        """Return the drafts of both, which are the same, as is the state that they leave."""
        found, expected = (each.propose(requests, most) for each in (self.chained, self.plain))
        assert [list(draft) for draft in found] == [list(draft) for draft in expected]
        states = [
            {name: (one.num_computed, one.most, len(one.lease.pages)) for name, one in each._followers.items()}
            for each in (self.chained, self.plain)
        ]
        assert states[0] == states[1]
        assert self.chained.cache.account() == self.plain.cache.account()
        assert not self.runner.pages.data[:, :, self.runner.pages.null_page].any()
        return [list(draft) for draft in found]


def runner_of(model: Path, page_size: int = 4) -> ModelRunner:
    given: dict[str, Any] = {"page_size": page_size, "max_model_len": MAX_LEN, "windowed_kv": "off", "threads": 1}
    return graphed(EngineConfig(str(model), device="cpu", attention="reference", kv_pages=40, **given))[0]


@pytest.fixture(scope="module")
def runners(model: Path) -> dict[int, ModelRunner]:
    """A runner for each size of pages."""
    return {page_size: runner_of(model, page_size) for page_size in (1, 4)}


def request(name: str, tokens: Sequence[int], stops: Sequence[int] = (), **asked: Any) -> Request:
    params = SamplingParams(**{"temperature": 0.0, "max_tokens": 100, **asked})
    made = Request.make(name, list(tokens), params, arrival=0.0, seed=5, namespace=Namespace("m"))
    made.longest, made.stop_ids = MAX_LEN, frozenset(stops)
    return made


ON_DEVICE: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 0.8},
    {"temperature": 1.2, "top_p": 0.8},
    {"temperature": 1.0, "top_k": 9, "min_p": 0.02},
    {"temperature": 0.7, "min_tokens": 5},
)
ON_HOST: tuple[dict[str, Any], ...] = (
    {"temperature": 0.8, "repetition_penalty": 1.4},
    {"presence_penalty": 1.0},
    {"logit_bias": {40: 3.0}},
)


@settings(max_examples=examples(25), deadline=None)
@given(
    seed=st.integers(0, 2**32),
    page_size=st.sampled_from([1, 4]),
    kv_tokens=st.sampled_from([48, 100, 240]),
    room=st.integers(3, 40),
    share_on_host=st.sampled_from([0.0, 0.1]),
)
def test_drafts_are_those_of_one_call_after_the_other(
    runners: dict[int, ModelRunner], seed: int, page_size: int, kv_tokens: int, room: int, share_on_host: float
) -> None:
    """Requests come, end and are aborted, with prompts that share a beginning and are computed in parts. They ask
    for drafts of several lengths, are drawn from in all ways, stop inside drafts, reach the end of their context,
    and do not fit in the pages. Drafts are accepted in part or not at all.
    """
    drafters = Drafters.of(runners[page_size].with_pages(kv_tokens // page_size), max_prefill_tokens=room)
    running: list[Request] = []
    rng = random.Random(seed)
    for number in range(12):
        if len(running) < 5 and rng.random() < 0.6:
            prompt = [9] * rng.choice([0, 3, 8]) + [rng.randrange(8, VOCAB) for _ in range(rng.randint(1, 20))]
            asked = rng.choice(ON_HOST if rng.random() < share_on_host else ON_DEVICE)
            stops = rng.sample(range(VOCAB), rng.choice([0, 0, 20]))
            running.append(request(str(number), prompt, stops, seed=number, **asked))
        if running and rng.random() < 0.15:
            gone = running.pop(rng.randrange(len(running)))
            for drafter in (drafters.chained, drafters.plain):
                drafter.forget(gone)
        drafting = [one for one in running if rng.random() < 0.8 and one.num_tokens <= MAX_LEN]
        drafts = drafters.check(drafting, [rng.randint(1, MOST) for _ in drafting])
        for one, draft in zip(drafting, drafts, strict=True):
            one.tokens += [*draft[: rng.randint(0, len(draft))], rng.randrange(8, VOCAB)]


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    return noted_reads(monkeypatch)


def test_the_host_reads_all_tokens_together(runners: dict[int, ModelRunner], reads: list[int]) -> None:
    """Rows want drafts of several lengths. Four calls are one graph; shorter chains replay that of one call."""
    drafters = Drafters.of(runners[4])
    requests = [request(f"r{i}", range(20 + i, 26 + 2 * i), temperature=0.9 * (i % 2)) for i in range(3)]
    replays = []
    for most in ([5, 2, 1], [5, 5, 5], [1, 3, 2], [4, 4, 4], [1, 1, 1]):
        reads.clear()
        before = drafters.recording.num_replayed
        drafts = drafters.check(requests, most)
        assert [len(draft) for draft in drafts] == most
        assert len(reads) == 1 + max(most) and reads[0] == 3 * max(most)
        replays.append(drafters.recording.num_replayed - before)
        for one, draft in zip(requests, drafts, strict=True):
            one.tokens += [*draft, 50]
    assert replays == [0, 1, 1, 3, 0], "a size is computed, and then recorded, when it comes for the first time"
    assert drafters.recording.num_recorded == 2


@pytest.mark.parametrize("asked", ON_HOST)
def test_rows_whose_tokens_need_the_host_are_drafted_for_as_before(
    runners: dict[int, ModelRunner], reads: list[int], asked: dict[str, Any]
) -> None:
    drafters = Drafters.of(runners[4])
    drafters.check([request("plain", range(20, 26)), request("other", range(30, 40), **asked)], [4, 4])
    assert reads == [2] * 8 and drafters.recording.num_recorded == 0


def test_grammars_need_the_host_for_all_rows(tmp_path: Path, reads: list[int]) -> None:
    drafters = Drafters.of(runner_of(save_random(tmp_path)))
    size = drafters.runner.model_config.vocab_size
    compiler = Compiler(lambda: Vocabulary.of(tokenizer(), size, [EOS]))
    plain, bound = request("plain", range(20, 26)), request("bound", range(30, 40))
    bound.constraint = Constraint(compiler.compile(Grammar("regex", "[0-9]{30}")))
    for most in ([3, 3], [4, 1]):
        reads.clear()
        drafts = drafters.check([plain, bound], most)
        assert [len(draft) for draft in drafts] == most
        assert tokenizer().decode(drafts[1]).isdigit()
    assert reads[0] == 2 and reads[1] == 3, "once only the other row continues, its tokens stay on the device"


# --- the graphs by themselves ---------------------------------------------------------------------------------

SIZE, PAGE, EMPTY, NULL = 20, 4, 14, 15


class Script:
    """A draft model whose next token is three larger, without KV. Notes the inputs of its calls."""

    def __init__(self, max_drafts: int, bad: int | None = None) -> None:
        """After token `bad` there is no valid choice."""
        self.bad, self.recording = bad, Recording()
        self.places: list[list[list[int]]] = []
        self.noise: list[list[int]] = []
        layout = RowLayout(4, 16, PAGE, EMPTY, NULL)
        carried = torch.zeros(4, 1)
        sizes = chain_sizes(4, max_drafts)
        self.graphs = ChainGraphs(self, sizes, layout, 64, self.choose, carried, self.recording)

    def choose(
        self, logits: torch.Tensor, params: RowParams, positions: torch.Tensor, *, cuts: bool
    ) -> torch.Tensor:
        self.noise.append(positions.tolist())
        return torch_graph_chooser(logits, params, positions, cuts=cuts)

    def __call__(
        self, ids: torch.Tensor, batch: AttentionBatch, carried: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        inputs = ids, batch.positions, batch.slot_mapping, batch.kv_lens, carried[:, 0]
        self.places.append([values.tolist() for values in inputs])
        return self.logits(ids), carried + 10

    def tokens(self, starts: Sequence[tuple[int, Sequence[int], int]], num_calls: int) -> list[list[int]] | None:
        """Draw drafts whose first tokens, which are given, have these positions in pages."""
        rows = [ChainStart(request(str(at), [1] * at), at - 1, 0, pages) for at, pages, _ in starts]
        return self.drawn(rows, [token for *_, token in starts], num_calls)

    def drawn(
        self,
        rows: Sequence[ChainStart],
        first: Sequence[int],
        num_calls: int,
        later: torch.Tensor | None = None,
    ) -> list[list[int]] | None:
        """Draw drafts whose first tokens are given."""
        carried = torch.arange(len(rows), dtype=torch.float32)[:, None]
        chain = self.graphs.plan(rows, num_calls)
        if chain is None:
            return None
        with torch.inference_mode():
            found = self.graphs.tokens(chain, self.logits(torch.tensor(first) - 3), carried, later)
        return found.T.tolist()

    def logits(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the logits of the tokens that follow `ids`."""
        logits = torch.zeros(len(ids), SIZE)
        logits[torch.arange(len(ids)), (ids + 3) % SIZE] = 9.0
        logits[ids == self.bad] = torch.nan
        return logits


def test_each_call_has_the_tokens_places_and_numbers_of_the_one_before() -> None:
    """The second row has one page, so that its later KV goes to the page of empty rows, as the fourth one's."""
    script = Script(max_drafts=5)
    starts = [(6, [2, 5, 3], 1), (2, [7], 4), (1, [1, 8], 18)]
    assert script.tokens(starts, 4) == [[1, 4, 7, 10, 13], [4, 7, 10, 13, 16], [18, 1, 4, 7, 10]]
    empty = EMPTY * PAGE
    assert script.places == [
        [[1, 4, 18, 0], [6, 2, 1, 0], [22, 30, 5, empty], [7, 3, 2, 1], [0, 1, 2, 0]],
        [[4, 7, 1, 0], [7, 3, 2, 0], [23, 31, 6, empty], [8, 4, 3, 1], [10, 11, 12, 10]],
        [[7, 10, 4, 0], [8, 4, 3, 0], [12, empty, 7, empty], [9, 5, 4, 1], [20, 21, 22, 20]],
        [[10, 13, 7, 0], [9, 5, 4, 0], [13, empty + 1, 32, empty], [10, 6, 5, 1], [30, 31, 32, 30]],
    ]


def test_a_chain_that_is_longer_than_a_graph_replays_several() -> None:
    script = Script(max_drafts=13)
    assert {size.calls for size in script.graphs.graphs.sizes} == {1, 8}
    for replayed in (3, 5):
        before = script.recording.num_replayed
        found = script.tokens([(6, [2, 5, 3, 6, 7], 1)], 12)
        assert found == [[(1 + 3 * number) % SIZE for number in range(13)]]
        assert script.recording.num_replayed - before == replayed, "eight calls and four times one"


def test_a_row_without_a_valid_choice_does_not_affect_the_others() -> None:
    [bad, good] = Script(5, bad=7).tokens([(6, [2, 5, 3], 1), (2, [7, 4], 5)], 4) or []
    assert bad[:4] == [1, 4, 7, -1] and good == [5, 8, 11, 14, 17]


def test_noise_and_the_least_number_of_tokens_count_those_that_pages_leave_out() -> None:
    """The prompt has six tokens, of which the pages leave out four; the answer has at least three."""
    script, one = Script(5), request("r", [1] * 6, min_tokens=3)
    assert script.drawn([ChainStart(one, 3, 4, [2, 5])], [9], 2) is None
    assert script.drawn([ChainStart(one, 4, 4, [2, 5])], [9], 2) == [[9, 12, 15]]
    assert script.noise == [[3], [4], [5]]


def test_only_the_device_may_know_where_a_draft_begins() -> None:
    """The last tokens of three rows are up to four positions later than the first possible one. Their noise is
    that of their positions, and their tables have the pages of all positions that they may have.
    """
    script = Script(max_drafts=3)
    pages = [2, 5, 3, 9]
    rows = [ChainStart(request(str(at), [1] * 5), 6, 0, pages, most_later=4) for at in range(3)]
    found = script.drawn(rows, [1, 4, 8], 2, torch.tensor([0, 3, 4]))
    assert found == [[1, 4, 7], [4, 7, 10], [8, 11, 14]]
    assert script.noise == [[2, 5, 6], [3, 6, 7, 1], [4, 7, 8, 1]]
    places = [[positions, slots] for _, positions, slots, *_ in script.places]
    empty = EMPTY * PAGE
    assert places == [
        [[7, 10, 11, 0], [23, 14, 15, empty]],
        [[8, 11, 12, 0], [12, 15, 36, empty]],
    ]


def test_drafts_that_may_leave_the_context_wherever_they_begin_are_refused() -> None:
    script, one = Script(5), request("r", [1] * 4)
    assert script.drawn([ChainStart(one, 55, 0, range(16), most_later=4)], [1], 4, torch.tensor([4])) is not None
    assert script.drawn([ChainStart(one, 56, 0, range(16), most_later=4)], [1], 4, torch.tensor([0])) is None
    assert script.drawn([ChainStart(one, 55, 0, range(16), most_later=5)], [1], 4, torch.tensor([0])) is None


def test_chains_that_would_leave_the_context_or_have_too_many_rows_are_refused() -> None:
    script = Script(5)
    assert script.tokens([(60, range(16), 1)], 4) is not None
    assert script.tokens([(60, range(16), 1), (61, range(16), 1)], 4) is None
    assert script.tokens([(row, [row], 1) for row in range(5)], 1) is None


def test_sizes() -> None:
    assert chain_sizes(3, 1) == [(1, 0), (2, 0), (3, 0)]
    assert chain_sizes(3, 2) == [(1, 1), (2, 1), (3, 1)]
    assert chain_sizes(3, 4) == [(1, 1), (2, 1), (3, 1), (1, 3), (2, 3), (3, 3)]
    assert chain_sizes(300, 64)[-1] == (64, 8)
