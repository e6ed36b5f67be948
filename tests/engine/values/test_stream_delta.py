"""Parts of a stream: cut into pieces, they say what the whole says."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from engine.values.logprobs import TokenLogprobs
from engine.values.stream_delta import StreamDelta, Timings


@given(st.integers(1, 40), st.integers(1, 50), st.booleans(), st.booleans())
def test_pieces_add_up_to_the_delta(num_tokens: int, size: int, is_end: bool, has_logprobs: bool) -> None:
    delta = StreamDelta(
        "r",
        list(range(num_tokens)),
        7,
        3,
        "error" if is_end else None,
        Timings(0.1, 0.2, 0.3),
        [TokenLogprobs(token, -0.5, ()) for token in range(num_tokens)] if has_logprobs else None,
        "why" if is_end else None,
    )
    pieces = list(delta.pieces(size))
    assert all(0 < len(piece.token_ids) <= size for piece in pieces)
    assert [piece.end for piece in pieces[:-1]] == [piece.start for piece in pieces[1:]]
    assert [piece.finish_reason for piece in pieces[:-1]] == [None] * (len(pieces) - 1)
    whole = pieces[0]
    for piece in pieces[1:]:
        whole.add(piece)
    assert whole == delta
