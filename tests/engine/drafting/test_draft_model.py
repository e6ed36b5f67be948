"""The draft model's bookkeeping, with a scripted model that reads its context from the pages like a real one."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cache import Namespace
from engine.runner.draft_model import DraftModel
from engine.values.plan import StepPlan
from engine.values.request import PENDING, Request
from engine.values.sampling_params import SamplingParams
from tests.support.examples import examples

VOCABULARY = 50


def next_token(context: Sequence[int]) -> int:
    """Return the scripted draft model's next token; never 0."""
    state = 7
    for token in context:
        state = (state * 1000003 + token + 1) & 0xFFFFFFFF
    return 1 + state % (VOCABULARY - 1)


def continued(context: Sequence[int], count: int) -> list[int]:
    tokens = list(context)
    for _ in range(count):
        tokens.append(next_token(tokens))
    return tokens[len(context) :]


class Pages:
    """A model whose logits select the next token of the context that the page table leads to."""

    def __init__(self, num_pages: int = 64, page_size: int = 4, max_model_len: int = 1000) -> None:
        self.num_pages, self.page_size, self.max_model_len = num_pages, page_size, max_model_len
        self.memory: dict[tuple[int, int], tuple[int, int]] = {}
        self.plans: list[StepPlan] = []

    def logits(self, plan: StepPlan) -> torch.Tensor:
        self.plans.append(plan)
        held = dict(self.memory)
        for copy in plan.copies:
            for slot in range(copy.num_tokens):
                self.memory[copy.target, slot] = held[copy.source, slot]
        for chunk in plan.chunks:
            for position, token in enumerate(chunk.token_ids, chunk.start):
                page, slot = divmod(position, self.page_size)
                self.memory[chunk.pages[page], slot] = (token, position)
        rows = torch.zeros(len(plan.sampling_chunks), VOCABULARY)
        for row, chunk in zip(rows, plan.sampling_chunks, strict=True):
            context = []
            for position in range(chunk.start + chunk.num_tokens):
                token, written_for = self.memory[
                    chunk.pages[position // self.page_size], position % self.page_size
                ]
                assert written_for == position
                context.append(token)
            row[next_token(context)] = 9.0
        return rows


def request(tokens: Sequence[int], name: str = "r") -> Request:
    made = Request.make(
        name,
        list(tokens),
        SamplingParams(temperature=0, max_tokens=500),
        arrival=0.0,
        seed=0,
        namespace=Namespace("m"),
    )
    made.longest = 1000
    return made


def propose(drafter: DraftModel, requests: list[Request], most: int = 3) -> list[list[int]]:
    drafts = drafter.propose(requests, [most] * len(requests))
    account = drafter.cache.account()
    assert sum(account) == drafter.cache.num_pages
    return [list(draft) for draft in drafts]


def nothing_held(drafter: DraftModel) -> bool:
    account = drafter.cache.account()
    return account.locked == account.private == 0


def test_it_drafts_the_tokens_that_its_model_would_generate() -> None:
    drafter, one = DraftModel(Pages(), ()), request([5, 6, 7])
    assert propose(drafter, [one], most=4) == [continued(one.tokens, 4)]


@settings(max_examples=examples(150), deadline=None)
@given(data=st.data(), page_size=st.sampled_from([1, 3, 4, 16]), room=st.integers(1, 12))
def test_the_next_draft_tokens_follow_the_request_whatever_became_of_the_last_ones(
    data: st.DataObject, page_size: int, room: int
) -> None:
    """Drafts are accepted in part or not at all, some steps have none, requests arrive, end and are preempted."""
    drafter = DraftModel(Pages(num_pages=160 // page_size, page_size=page_size), (), max_prefill_tokens=room)
    running: list[Request] = []
    for number in range(data.draw(st.integers(1, 25), label="steps")):
        action = data.draw(st.sampled_from(["come", "go", "step", "step", "step"]))
        if action == "come" and len(running) < 4:
            prompt = [data.draw(st.integers(1, 2)) for _ in range(data.draw(st.integers(1, 9)))]
            running.append(request(prompt, str(number)))
        elif action == "go" and running:
            drafter.forget(running.pop(data.draw(st.integers(0, len(running) - 1))))
        asked = [one for one in running if data.draw(st.booleans())]
        drafts = propose(drafter, asked, most=data.draw(st.integers(1, 5))) if asked else []
        for one, draft in zip(asked, drafts, strict=True):
            assert draft == continued(one.tokens, len(draft))
            if data.draw(st.booleans(), label="placed"):
                right = data.draw(st.integers(0, len(draft)))
                one.tokens += [*draft[:right], data.draw(st.integers(1, VOCABULARY - 1))]
        for one in running:
            if one not in asked and data.draw(st.booleans(), label="goes on without"):
                one.tokens += data.draw(st.lists(st.integers(1, VOCABULARY - 1), max_size=6))
    for one in running:
        drafter.forget(one)
    assert nothing_held(drafter)


def test_after_accepted_draft_tokens_only_the_rest_is_computed() -> None:
    pages, one = Pages(), request(range(1, 30))
    drafter = DraftModel(pages, ())
    [draft] = propose(drafter, [one], most=4)
    one.tokens += [*draft, 9]  # all of them, and what the model said next
    before = len(pages.plans)
    propose(drafter, [one], most=1)
    [plan] = pages.plans[before:]
    assert [list(chunk.token_ids) for chunk in plan.chunks] == [[draft[-1], 9]]


def test_a_long_prompt_is_computed_in_parts_while_others_get_draft_tokens() -> None:
    pages = Pages(num_pages=200)
    drafter = DraftModel(pages, (), max_prefill_tokens=100)
    short, long = request([1, 2, 3], "short"), request([4] * 250, "long")
    for expected in ([], [], continued(long.tokens, 3)):
        [first, second] = propose(drafter, [short, long])
        assert first == continued(short.tokens, 3)
        assert second == expected
        short.tokens += first
    assert max(plan.num_tokens for plan in pages.plans) <= 100 + 4


def test_requests_that_begin_alike_share_its_pages() -> None:
    pages = Pages()
    drafter = DraftModel(pages, ())
    first, second = request([3] * 41, "a"), request([*[3] * 41, 8], "b")
    propose(drafter, [first])
    computed = sum(plan.num_tokens for plan in pages.plans)
    assert propose(drafter, [second]) == [continued(second.tokens, 3)]
    assert sum(plan.num_tokens for plan in pages.plans) - computed == 1 + 2
    for one in (first, second):
        drafter.forget(one)
    assert nothing_held(drafter)


def test_out_of_its_own_pages_it_draft_tokens_nothing_and_holds_nothing() -> None:
    drafter = DraftModel(Pages(num_pages=4), ())
    large, small = request(range(1, 40), "large"), request([1, 2], "small")
    assert propose(drafter, [large, small]) == [[], continued(small.tokens, 3)]
    drafter.forget(small)
    assert nothing_held(drafter)


def test_without_room_for_the_rest_the_cached_prefix_stays_as_it_was() -> None:
    """The cached prefix ends in the middle of a page, which has not been copied."""
    drafter = DraftModel(Pages(num_pages=4), ())
    first = request([3] * 10, "first")
    propose(drafter, [first], most=1)
    drafter.forget(first)
    assert propose(drafter, [request([*[3] * 10, *range(1, 20)], "large")]) == [[]]
    assert nothing_held(drafter)
    assert propose(drafter, [request([*[3] * 10, 8], "small")], most=1) == [continued([*[3] * 10, 8], 1)]


def test_a_page_that_was_copied_may_go() -> None:
    drafter = DraftModel(Pages(), ())
    first, second = request([3] * 10, "first"), request([*[3] * 10, 8], "second")
    propose(drafter, [first], most=1)
    drafter.forget(first)
    propose(drafter, [second], most=1)
    account = drafter.cache.account()
    assert (account.locked, account.evictable) == (2, 1)


def test_it_stops_where_its_context_ends() -> None:
    drafter = DraftModel(Pages(max_model_len=12), ())
    assert [len(propose(drafter, [request([1] * count, str(count))])[0]) for count in (9, 10, 11, 12, 13)] == [
        3,
        3,
        2,
        1,
        0,
    ]


def test_nothing_is_drafted_after_a_token_that_ends_the_request() -> None:
    drafter, one = DraftModel(Pages(), ()), request([5, 6, 7])
    expected = continued(one.tokens, 6)
    one.stop_ids = frozenset(expected[2:3])
    assert propose(drafter, [one], most=6) == [expected[:3]]


def test_a_request_is_let_go_of_while_its_token_is_in_flight() -> None:
    drafter, one = DraftModel(Pages(), ()), request([5, 6, 7])
    propose(drafter, [one])
    one.tokens.append(PENDING)
    drafter.forget(one)
    drafter.forget(one)
    assert nothing_held(drafter)
    drafter.propose([request([5, 6, 7, 9], "again")], [1])


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_without_valid_probabilities_it_draft_tokens_nothing(bad: float) -> None:
    pages = Pages()
    right = pages.logits
    drafter, one = DraftModel(pages, ()), request([5, 6, 7])
    pages.logits = lambda plan: right(plan) * bad  # type: ignore[method-assign]
    assert propose(drafter, [one]) == [[]]
    pages.logits = right  # type: ignore[method-assign]
    assert propose(drafter, [one]) == [continued(one.tokens, 3)]
