"""A runner for scripted scenarios, which computes nothing but checks every page that it reads or writes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from engine.program.self_test import NAMESPACE
from engine.values.logprobs import PackedLogprobs, TokenLogprobs
from engine.values.plan import Chunk, Step, StepPlan, StepResult, num_accepted
from engine.values.request import PENDING, Request
from tests.engine.support import hash_model
from tests.engine.support.hash_model import EOS, next_token

Table = dict[int, int]
"""The pages of a page table by their slots."""
_NOTHING = (-1, -1, -1)


class MemoryRunner:
    """Keeps (token, position, group of layers) in each KV slot and samples from what the page table leads to.
    Group 0 are the layers without a window; the others see the last `window` positions.

    A page shared, copied or freed wrongly shows as a context that is not the request's own. So does a slot: the
    state of a model that has one is here the tokens that it contains.
    """

    def __init__(self, page_size: int, window: int = 0) -> None:
        self.page_size, self.window = page_size, window
        self.memory: dict[tuple[int, int], tuple[int, int, int]] = {}
        self.host: dict[tuple[int, int], tuple[int, int, int]] = {}
        self.states: dict[int, list[int]] = {}
        self.host_states: dict[int, tuple[int, list[int]]] = {}
        """What a host page has of a state: which of its pages it is, and the tokens of the state."""
        self.drafts: dict[int, list[int]] = {}
        self.plans: list[StepPlan] = []
        self.eos_after: dict[str, int] = {}
        """Request id to the number of output tokens after which its next token is EOS."""
        self.fail_next = False
        self.fail_if: Callable[[StepPlan], bool] = lambda plan: False
        self.on_run: Callable[[StepPlan], None] = lambda plan: None
        """Called as a step begins, in its thread."""
        self.failed: set[str] = set()
        """The requests of steps that failed."""
        self.invalid: set[str] = set()
        """Beam searches for which the model computes no valid probabilities."""
        self.mistakes: list[str] = []
        """Contexts that were not what their request holds: the loop must not take them for a failed step."""
        self._sampled: dict[str, int] = {}
        self._lost: set[str] = set()  # requests of a step that failed: the next may have been planned with them

    def prepare(self, plan: StepPlan) -> Step:
        """Read the page tables now: the scheduler changes them while the step is in flight."""
        self.plans.append(plan)
        tables = [page_tables(chunk) for chunk in plan.chunks]
        if not is_self_test(plan):  # whose rows share what nobody reads
            self._check_writes(plan)
        return lambda: self.run(plan, tables)

    def _check_writes(self, plan: StepPlan) -> None:
        """Check that no two requests write in one page."""
        written = Counter[int]()
        for chunk in plan.chunks:
            last = (chunk.start + chunk.num_tokens - 1) // self.page_size
            for table in page_tables(chunk):
                written.update(table[slot] for slot in range(chunk.start // self.page_size, last + 1))
        states = [chunk.state for chunk in plan.chunks if chunk.state is not None]
        slots = Counter(slot for use in states for slot in (use.target, *(slot for _, slot in use.borders)))
        read = {use.source for use in states if use.source != use.target}
        if max(slots.values(), default=1) > 1 or read & set(slots):
            self.mistakes.append(f"slots written twice in a step, or read by another request: {slots}, {read}")
        if max(written.values(), default=1) > 1:
            self.mistakes.append(f"pages written twice in a step: {written.most_common(3)}")

    def run(self, plan: StepPlan, tables: list[list[Table]]) -> StepResult:
        """Write the chunks' KV, read back each context, and sample."""
        self.on_run(plan)
        before, self._sampled = self._sampled, {}
        lost, self._lost = self._lost, set()
        if self.fail_next or self.fail_if(plan):
            self.fail_next = False
            self._lost = {chunk.request.request_id for chunk in plan.chunks}
            self.failed |= {(chunk.request.leader or chunk.request).request_id for chunk in plan.chunks}
            for chunk, groups in zip(plan.chunks, tables, strict=True):  # it is unknown how far the step came
                for position in range(chunk.start, chunk.start + chunk.num_tokens):
                    page, slot = divmod(position, self.page_size)
                    for table in groups:
                        self.memory[table[page], slot] = (-2, -2, -2)
                if chunk.state is not None:
                    for slot in (chunk.state.target, *(slot for _, slot in chunk.state.borders)):
                        self.states[slot] = [-2]
            raise RuntimeError("scripted failure")
        self._copy_to_host(plan)
        self._copy_from_host(plan)
        copied = [  # whole pages, as a device does it
            (copy.target, slot, self.memory.get((copy.source, slot), _NOTHING))
            for copy in plan.copies
            for slot in range(self.page_size)
        ]
        for target, slot, value in copied:
            self.memory[target, slot] = value
        written = []
        for chunk, groups in zip(plan.chunks, tables, strict=True):
            ids = [before.get(chunk.request.request_id, 1) if t == PENDING else t for t in chunk.token_ids]
            written.append(ids)
            for position, token in enumerate(ids, chunk.start):
                page, slot = divmod(position, self.page_size)
                for group, table in enumerate(groups):
                    self.memory[table[page], slot] = (token, position, group)
        tokens: list[int] = []
        logprobs: list[TokenLogprobs | None] = []
        counts, scores = [], {}
        for chunk, groups, ids in zip(plan.chunks, tables, written, strict=True):
            is_lost = chunk.request.request_id in lost or is_self_test(plan)
            context = [1] if is_lost else self._context(chunk, groups, ids)
            if chunk.state is not None:
                self._advance(chunk, ids, is_lost)
            if not is_lost:
                scores.update(_scores(chunk, context))
            if chunk.samples:
                first = len(context) - chunk.num_drafts
                sampled = [self._sample(chunk.request, context[:end]) for end in range(first, len(context) + 1)]
                counts.append(num_accepted(context[first:], sampled) + 1)
                tokens += sampled[: counts[-1]]
                is_invalid = (chunk.request.leader or chunk.request).request_id in self.invalid
                logprobs += [None if is_invalid else _candidates(chunk.request, context)] * counts[-1]
                self._sampled[chunk.request.request_id] = sampled[0]
        return StepResult(tokens, logprobs, counts, prompt_logprobs=scores)

    def _copy_to_host(self, plan: StepPlan) -> None:
        for device, host in plan.swap_out:
            _copy_page(self.memory, device, self.host, host, self.page_size)
            self.host_states.pop(host, None)
        for slot, hosts in plan.states_out:
            for index, host in enumerate(hosts):
                self.host_states[host] = index, list(self.states[slot])
                for inside in range(self.page_size):
                    self.host[host, inside] = _NOTHING
        filled = [host for _, host in plan.swap_out] + [host for copy in plan.states_out for host in copy.hosts]
        if len(set(filled)) < len(filled):
            self.mistakes.append(f"host pages written twice in a step: {filled}")

    def _copy_from_host(self, plan: StepPlan) -> None:
        for device, host in plan.swap_in:
            _copy_page(self.host, host, self.memory, device, self.page_size)
        for slot, hosts in plan.states_in:
            parts = [self.host_states.get(host, (-1, [-1])) for host in hosts]
            if parts != [(index, parts[0][1]) for index in range(len(parts))]:
                self.mistakes.append(f"slot {slot} gets {parts} from the pages {hosts}")
            self.states[slot] = list(parts[0][1])

    def _context(self, chunk: Chunk, groups: list[Table], ids: list[int]) -> list[int]:
        """Return the context that a request's pages hold, which must be its tokens."""
        held: list[int] = []
        end, size, find = chunk.start + chunk.num_tokens, self.page_size, self.memory.get
        tokens = [*chunk.request.tokens[: chunk.start], *ids]
        for group, table in enumerate(groups):
            first = max(0, chunk.start - self.window + 1) if group else 0
            page_of = table.get
            cells = [find((page_of(at // size, -1), at % size), _NOTHING) for at in range(first, end)]
            if not group:
                held = [token for token, _, _ in cells]
            if cells != [(tokens[at], at, group) for at in range(first, end)]:
                self.mistakes.append(f"{chunk.request.request_id} finds {cells} from {first} on of {group}")
        return held

    def _advance(self, chunk: Chunk, ids: list[int], is_lost: bool) -> None:
        """Read a request's state, which must be that before the chunk, and write it where the plan says."""
        use = chunk.state
        assert use is not None
        state = [] if use.source is None else list(self.states.get(use.source, [-1]))
        if use.num_missing and use.source is not None:
            state += self.drafts.get(use.source, [-1])[: use.num_missing]
        if state != chunk.request.tokens[: chunk.start] and not is_lost:
            self.mistakes.append(f"{chunk.request.request_id} finds the state {state} at {chunk.start}")
        for position, slot in use.borders:
            first = chunk.start if use.num_missing else chunk.start + 1  # Its state may have to catch up only.
            if not first <= position < chunk.start + chunk.num_tokens:
                self.mistakes.append(
                    f"{chunk.request.request_id} keeps a state at {position}, outside of its chunk"
                )
            self.states[slot] = state + ids[: position - chunk.start]
        self.states[use.target] = list(state) if chunk.num_drafts else state + ids
        if chunk.num_drafts:
            self.drafts[use.target] = list(ids)

    def _sample(self, request: Request, context: list[int]) -> int:
        if self.eos_after.get(request.request_id) == len(context) - request.num_prompt:
            return EOS
        return next_token(context, request.seed)


def is_self_test(plan: StepPlan) -> bool:
    """Whether a step is the loop's own, after one that failed."""
    return any(chunk.request.namespace == NAMESPACE for chunk in plan.chunks)


def _candidates(request: Request, context: list[int]) -> TokenLogprobs | None:
    """Return the candidates with which a beam search may continue."""
    if (beams := request.sampling.beams) is None:
        return None
    best = hash_model.continuations(context, request.seed, beams.num_candidates(len(request.stop_ids)))
    return TokenLogprobs(*best[0], top=tuple(best))


def _scores(chunk: Chunk, context: list[int]) -> dict[str, PackedLogprobs]:
    """Scores of the prompt tokens that the chunk's tokens predict and that were not reported yet, if asked for."""
    request, num_top = chunk.request, chunk.request.sampling.prompt_logprobs
    first = max(chunk.start + 1, request.num_prompt_reported)
    end = min(chunk.start + chunk.num_tokens + 1, request.num_prompt)
    if num_top is None or first >= end:
        return {}
    # The last of them is what comes after the chunk: it is not in the pages yet.
    known = [*context[: chunk.start + chunk.num_tokens], *request.prompt_ids[chunk.start + chunk.num_tokens : end]]
    return {request.request_id: hash_model.scores(known[:end], first, num_top)}


def page_tables(chunk: Chunk) -> list[Table]:
    """Return the page table of each group of layers, as it is now."""
    tables = [dict(enumerate(chunk.pages))]
    if (window := chunk.window) is not None:
        tables += [dict(enumerate(pages, window.first)) for pages in zip(*window.rows, strict=True)]
    return tables


def _copy_page(
    source: dict[tuple[int, int], tuple[int, int, int]],
    page: int,
    target: dict[tuple[int, int], tuple[int, int, int]],
    to: int,
    page_size: int,
) -> None:
    for slot in range(page_size):
        target[to, slot] = source.get((page, slot), _NOTHING)
