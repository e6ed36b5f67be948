"""Scores of prompt tokens: the packed records, and the slices in which they are computed."""

from __future__ import annotations

import math
import struct

import msgspec
import pytest
import torch

from engine.sampling.prompt_logprobs import PromptSpan, score
from engine.values.logprobs import PackedLogprobs, TokenLogprobs, joined

VOCAB, HIDDEN = 50, 12


def records(start: int, *values: float, num_top: int = 1) -> PackedLogprobs:
    packed = b"".join(struct.pack("<fI" + "If" * num_top, value, 3, *[7, -0.25] * num_top) for value in values)
    return PackedLogprobs(start, num_top, packed)


# --- the value ------------------------------------------------------------------------------------------------


def test_records_are_read_with_their_tokens() -> None:
    part = records(2, -0.5, -1.5)
    assert part.end == 4
    read = [TokenLogprobs(12, -0.5, ((7, -0.25),), 3), TokenLogprobs(13, -1.5, ((7, -0.25),), 3)]
    assert part.read([12, 13]) == read
    assert records(1, -0.5, num_top=0).read([2]) == [TokenLogprobs(2, -0.5, (), 3)]
    for wrong in ([12], [12, 13, 14]):
        with pytest.raises(ValueError):
            part.read(wrong)


def test_parts_are_cut_and_joined_by_position() -> None:
    first, second = records(1, -1.0, -2.0), records(3, -3.0)
    whole = first.then(second)
    assert whole == records(1, -1.0, -2.0, -3.0)
    assert whole.since(3) == second and whole.since(0) is whole and whole.since(4) is None
    assert joined(None, first) is first and joined(first, None) is first and joined(first, second) == whole
    with pytest.raises(ValueError, match="do not continue"):
        first.then(records(4, -4.0))
    with pytest.raises(ValueError, match="do not continue"):
        first.then(records(3, -3.0, num_top=2))


def test_the_wire_carries_them_and_refuses_half_a_record() -> None:
    part = records(5, -0.5, -0.75)
    data = msgspec.msgpack.encode(part)
    assert msgspec.msgpack.decode(data, type=PackedLogprobs) == part
    for wrong in ([1, 1, b"x" * 15], [0, 1, b""], [1, -1, b""]):
        with pytest.raises(msgspec.ValidationError):
            msgspec.msgpack.decode(msgspec.msgpack.encode(wrong), type=PackedLogprobs)


# --- computing it ---------------------------------------------------------------------------------------------


class Head:
    """A language-model head that counts the rows of each call."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.weight = torch.randn(VOCAB, HIDDEN)
        self.most_rows = 0

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        self.most_rows = max(self.most_rows, len(hidden))
        return hidden @ self.weight.T


@pytest.mark.parametrize("rows_at_once", [1, 3, 7, 1000])
def test_scores_are_the_log_softmax_in_slices_of_any_size(rows_at_once: int) -> None:
    head = Head()
    hidden = torch.randn(23, HIDDEN)
    expected = torch.log_softmax(hidden @ head.weight.T, dim=-1)
    wanted = [
        PromptSpan("a", row=2, targets=[5, 1, 9, 49], start=1, num_top=3),
        PromptSpan("b", row=10, targets=[0], start=40, num_top=0),
        PromptSpan("c", row=11, targets=list(range(12)), start=7, num_top=5),
    ]
    parts = score(head, hidden, wanted, VOCAB, slice_bytes=4 * VOCAB * rows_at_once)
    assert head.most_rows == min(rows_at_once, 17)
    for want in wanted:
        part = parts[want.request_id]
        assert (part.start, part.num_top) == (want.start, want.num_top)
        for offset, at in enumerate(part.read(want.targets)):
            row = expected[want.row + offset]
            assert at.token_id == want.targets[offset]
            assert at.logprob == pytest.approx(row[at.token_id].item(), abs=1e-5)
            assert at.rank == 1 + int((row > row[at.token_id]).sum())
            best = row.topk(want.num_top)
            assert [token for token, _ in at.top] == best.indices.tolist()
            assert [logprob for _, logprob in at.top] == pytest.approx(best.values.tolist(), abs=1e-5)


def test_a_top_token_has_the_same_number_in_both_places() -> None:
    """Evaluation harnesses compare the two to see whether greedy decoding would have chosen the same."""
    head, hidden = Head(), torch.randn(9, HIDDEN)
    targets = (hidden @ head.weight.T).argmax(-1).tolist()
    part = score(head, hidden, [PromptSpan("a", 0, targets, 1, 1)], VOCAB, 2**20)["a"]
    for at in part.read(targets):
        assert at.rank == 1 and at.top == ((at.token_id, at.logprob),)


def test_a_slice_is_a_row_at_least_and_alternatives_no_more_than_the_vocabulary() -> None:
    head = Head()
    wanted = [PromptSpan("a", 0, [1, 2, 3], 1, VOCAB + 9)]
    part = score(head, torch.randn(3, HIDDEN), wanted, VOCAB, slice_bytes=1)["a"]
    assert head.most_rows == 1
    assert part.num_top == VOCAB
    assert [sum(math.exp(p) for _, p in at.top) for at in part.read([1, 2, 3])] == pytest.approx([1.0] * 3)
