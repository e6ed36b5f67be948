"""Rows on the device equal a batch built from scratch, whatever requests join, leave, grow and move."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cache import KVCacheManager, Lease, Namespace, OutOfPages
from cache.resume.windows import Window
from engine.attention.batch import AttentionBatch
from engine.graphs.device_rows import DeviceRows
from engine.graphs.row_assignment import STATE, RowAssigner, RowChanges, RowLayout
from engine.sampling.graph_chooser import RowParams
from engine.values.plan import Chunk
from engine.values.request import PENDING, Request
from engine.values.sampling_params import SamplingParams
from tests.engine.support.row_words import write_words
from tests.support.examples import examples

CPU = torch.device("cpu")
NUM_PAGES, MAX_ROWS, MAX_LEN = 80, 5, 24
EMPTY, NULL = NUM_PAGES, NUM_PAGES + 1
SPACE = Namespace("m")

_NUMBER = st.integers(0, 9)
_COME = st.tuples(st.just("come"), st.integers(1, 12), st.integers(0, 1), st.floats(0, 2))
_DECODE = st.tuples(st.just("decode"), st.randoms(use_true_random=False))
_OTHERS = (
    st.tuples(st.sampled_from(["go", "back", "preempt", "insert", "insert"]), _NUMBER),
    st.tuples(st.just("elsewhere"), _NUMBER, st.booleans()),
    st.tuples(st.just("fail")),
)
ACTIONS = st.lists(st.one_of(_COME, _DECODE, _DECODE, _OTHERS[0], _OTHERS[0], *_OTHERS), min_size=25, max_size=60)


def most_likely(logits: torch.Tensor, params: RowParams, positions: torch.Tensor, *, cuts: bool) -> torch.Tensor:
    """Implement `GraphChooser`."""
    return logits.argmax(-1)


class World:
    """Requests over a real cache; their next tokens are a function of the tokens before."""

    def __init__(self, page_size: int, window: Window | None = None) -> None:
        self.page_size, self.num_groups = page_size, 1 if window is None else 1 + window.num_groups
        self.cache = KVCacheManager(NUM_PAGES, page_size, window=window)
        max_pages = -(-MAX_LEN // page_size)
        self.layout = RowLayout(MAX_ROWS, max_pages, page_size, EMPTY, NULL, self.num_groups)
        self.book, self.rows = RowAssigner(self.layout), DeviceRows(self.layout, CPU)
        self.requests: list[Request] = []
        self.sampled: torch.Tensor | None = None
        self.places: dict[str, int] = {}
        self.num_made = 0

    def lease(self, request: Request) -> Lease:
        assert request.lease is not None
        return request.lease

    def come(self, request: Request) -> None:
        """Add a request whose prompt another step computed and inserted; its next token is the last step's."""
        self.num_made += 1
        if len(self.requests) == MAX_ROWS or len(request.tokens) > MAX_LEN - 2:
            return
        lease = self.cache.lock(self.cache.match(SPACE, request.tokens, 0.0))
        try:
            self.cache.extend(lease, len(request.tokens))
        except OutOfPages:
            self.cache.finish(lease, [], 0.0)
            return
        self.cache.release_copy(lease)
        request.lease, request.num_computed = lease, len(request.tokens)
        self.cache.insert(lease, request.tokens, 0.0)
        self.requests.append(request)
        request.tokens.append(7)
        self.sampled, self.places = None, {}

    def go(self, request: Request) -> None:
        self.cache.finish(self.lease(request), request.tokens[: request.num_computed], 0.0)
        request.lease = None
        self.requests.remove(request)

    def compute_elsewhere(self, request: Request, is_pending: bool) -> None:
        """Let a mixed step compute a request's token and sample the next one, known by now or still pending."""
        if request.num_computed + 2 >= MAX_LEN:
            return
        try:
            self.cache.extend(self.lease(request), request.num_computed + 1)
        except OutOfPages:
            return
        request.num_computed += 1
        request.tokens.append(55)
        self.sampled, self.places = None, {}
        if is_pending:
            self.sampled, self.places = torch.tensor([3, 55]), {request.request_id: 1}

    def decode(self, requests: list[Request]) -> None:
        """Run a step of these requests and compare the rows with a batch built from scratch."""
        chunks = []
        for request in requests:
            start, tokens, lease = request.num_computed, request.tokens, self.lease(request)
            if start + 1 >= MAX_LEN:
                continue
            try:
                self.cache.extend(lease, start + 1, 0.0, (start, start + 1))
            except OutOfPages:
                continue
            is_pending = request.request_id in self.places
            ids = [PENDING] if is_pending else tokens[start : start + 1]
            chunks.append(Chunk(request, start, 1, ids, lease.pages, samples=True, window=lease.window))
        if not chunks:
            return
        changes = self.book.place(chunks, self.places)
        self.rows.write(changes, self.sampled)
        assert sorted(changes.rows) == list(range(len(chunks)))
        self.check(chunks, changes.rows)
        logits = torch.zeros(MAX_ROWS, 100)
        for row, chunk in zip(changes.rows, chunks, strict=True):
            chunk.request.tokens.append(31 * chunk.start % 100)
            logits[row, chunk.request.tokens[-1]] = 1e6
            chunk.request.num_computed += 1
        self.rows.advance(MAX_ROWS, self.rows.choose(MAX_ROWS, logits, most_likely, cuts=False))
        self.sampled = self.rows.sampled[: len(chunks)].clone()
        self.places = {chunk.request.request_id: row for row, chunk in zip(changes.rows, chunks, strict=True)}

    def inputs_of_sampling(self) -> tuple[RowParams, torch.Tensor]:
        """Return the parameters of all rows, and how many tokens each has generated."""
        seen: list[tuple[RowParams, torch.Tensor]] = []

        def noting(
            logits: torch.Tensor, params: RowParams, positions: torch.Tensor, *, cuts: bool
        ) -> torch.Tensor:
            seen.append((params, positions))
            return logits

        self.rows.choose(MAX_ROWS, torch.empty(0), noting, cuts=False)
        return seen[0]

    def check(self, chunks: list[Chunk], rows: Any) -> None:
        self.rows.enter(MAX_ROWS)
        ordered = [chunks[list(rows).index(row)] for row in range(len(chunks))]
        made, expected = (
            self.rows.batch(MAX_ROWS, MAX_LEN),
            AttentionBatch.from_chunks(ordered, self.page_size, NULL, num_groups=self.num_groups),
        )
        count, width = expected.block_table.shape
        for name in ("kv_lens", "positions", "slot_mapping"):
            assert torch.equal(getattr(made, name)[:count], getattr(expected, name)), name
        assert torch.equal(made.block_table[:count, :width], expected.block_table)
        assert (made.block_table[:count, width:] == NULL).all()
        ids = [chunk.request.tokens[chunk.start] for chunk in ordered]
        assert self.rows.token_ids(MAX_ROWS).tolist() == ids + [0] * (MAX_ROWS - count)
        asked = [chunk.request.sampling for chunk in ordered]
        params, outputs = self.inputs_of_sampling()
        assert outputs[:count].tolist() == [chunk.start + 1 - chunk.request.num_prompt for chunk in ordered]
        assert params.seeds[:count].tolist() == [chunk.request.seed for chunk in ordered]
        assert params.top_k[:count].tolist() == [each.top_k for each in asked]
        assert params.top_p[:count].tolist() == [each.top_p for each in asked]
        assert params.min_p[:count].tolist() == [each.min_p for each in asked]
        assert not any(values[count:].any() for values in params), "empty rows are greedy"
        assert (made.kv_lens[count:] == 1).all()
        tables, slots = [made.block_table], [made.slot_mapping]
        if self.num_groups > 1:
            assert made.more_tables is not None and made.more_slots is not None
            assert expected.more_tables is not None and expected.more_slots is not None
            assert torch.equal(made.more_slots[:, :count], expected.more_slots)
            assert torch.equal(made.more_tables[:, :count, :width], expected.more_tables)
            assert (made.more_tables[:, :count, width:] == NULL).all()
            tables, slots = [*tables, *made.more_tables], [*slots, *made.more_slots]
        for table, of_group in zip(tables, slots, strict=True):
            assert (of_group[count:] == EMPTY * self.page_size).all(), "an empty row writes into its own page"
            assert (table[count:, 0] == EMPTY).all() and (table[count:, 1:] == NULL).all()


@settings(max_examples=examples(150), deadline=None)
@given(ACTIONS, st.sampled_from([1, 4, 16]), st.sampled_from([None, Window(5, 2, 64), Window(9, 1, 64)]))
def test_rows_equal_those_of_a_new_batch(
    actions: list[tuple[Any, ...]], page_size: int, window: Window | None
) -> None:
    """Pages are exchanged for the tree's, requests leave, return, and are computed by other steps. Layers with a
    window have page tables of their own, which end behind it.
    """
    world = World(page_size, window)
    gone: list[Request] = []
    for kind, *values in actions:
        if kind == "come":
            length, beginning, temperature = values
            sampling = SamplingParams(temperature=temperature if temperature > 0.1 else 0.0)
            name, seed = f"r{world.num_made}", world.num_made * 2**40 - 2**39
            prompt = [beginning + 1] * length
            world.come(Request.make(name, prompt, sampling, arrival=0.0, seed=seed, namespace=SPACE))
        elif kind == "decode":
            some = [request for request in world.requests if values[0].random() < 0.8]
            values[0].shuffle(some)
            world.decode(some)
        elif kind == "fail":
            world.book.forget()
            write_words(world.rows, 0, torch.full((world.layout.num_words,), 99))
        elif kind == "back" and gone:
            world.come(gone.pop())
        elif kind != "back" and world.requests:
            chosen = world.requests[values[0] % len(world.requests)]
            if kind == "go":
                world.go(chosen)
                gone.append(chosen)
            elif kind == "preempt":
                world.go(chosen)
                world.come(chosen)
            elif kind == "insert":
                world.cache.insert(world.lease(chosen), chosen.tokens[: chosen.num_computed], 0.0)
            elif kind == "elsewhere":
                world.compute_elsewhere(chosen, is_pending=values[1])
    world.decode(world.requests)


def decoding(world: World, count: int, length: int) -> list[Request]:
    for number in range(count):
        prompt = [number + 1] * length
        world.come(Request.make(f"r{number}", prompt, SamplingParams(), arrival=0.0, seed=number, namespace=SPACE))
    return list(world.requests)


def words_sent(world: World, requests: list[Request]) -> int:
    """Count the words written before a step of these requests, including tokens taken from the last step."""
    sent: list[int] = []
    place = world.book.place

    def watched(*args: Any) -> RowChanges:
        changes = place(*args)
        sent.append(0 if changes.packet is None else len(changes.packet) // 2)
        return changes

    with patch.object(world.book, "place", watched):
        world.decode(requests)
    return sent[0]


def test_a_steady_step_copies_nothing_and_a_new_page_one_word() -> None:
    world = World(page_size=4)
    requests = decoding(world, 3, length=5)
    world.decode(requests)
    assert [words_sent(world, requests) for _ in range(6)] == [0, 0, 3, 0, 0, 0]
    assert words_sent(world, requests[::-1]) == 3, "the order of a step's requests does not matter, pages do"


def test_only_the_last_row_moves_when_one_leaves() -> None:
    world = World(page_size=16)
    requests = decoding(world, 5, length=3)
    world.decode(requests)
    fields, page = STATE, 1  # it has no state
    assert words_sent(world, [requests[0], *requests[2:]]) == (fields - 2 + page + 2) + (fields + page)
    assert words_sent(world, [requests[0], *requests[2:]]) == 0


def test_a_request_that_comes_back_under_its_name_has_other_pages() -> None:
    """The request returns at once, into the row it had, whose former contents are no longer valid."""
    world = World(page_size=4)
    first, second = decoding(world, 2, length=9)
    world.decode([first, second])
    for request in (first, second):
        world.go(request)
    world.cache.reset()
    for request in (second, first):  # they get each other's pages
        world.come(request)
    world.decode([first, second])


def test_another_request_of_the_same_name_takes_nothing_over() -> None:
    world = World(page_size=4)
    (first,) = decoding(world, 1, length=9)
    world.decode([first])
    world.go(first)
    other = Request.make("r0", [5] * 10, SamplingParams(), arrival=0.0, seed=77, namespace=SPACE)
    world.come(other)
    world.decode([other])
    assert world.inputs_of_sampling()[1].tolist() == [1, 1, 1, 1, 1], "at position 10, after a prompt of 10"


def test_only_the_new_page_of_a_window_and_the_one_that_it_leaves_are_written() -> None:
    """Each of two groups has three pages for a window of nine tokens. A border changes two words of each group."""
    world = World(page_size=4, window=Window(9, 2, 64))
    requests = decoding(world, 1, length=17)
    world.decode(requests)
    assert [words_sent(world, requests) for _ in range(5)] == [0, 0, 1 + 2 * 2, 0, 0]
