"""The model of scripted scenarios: a token is a hash of all tokens before it, so any mistake in them shows."""

from __future__ import annotations

import struct
from collections.abc import Sequence

from engine.values.beam_search import BeamSearch, Hypothesis
from engine.values.logprobs import PackedLogprobs
from engine.values.sampling_params import SamplingParams

VOCABULARY = 1000
EOS = 0
SEED = 7
"""Of requests that come without one."""
# Few enough that searches meet their stop tokens; no multiple of 7.
_BEAM_VOCABULARY = 60


def next_token(context: Sequence[int], seed: int) -> int:
    """The next token is a hash of all tokens before it and the seed; never EOS."""
    return _token(_hash(context, _begin(seed)))


def scores(context: Sequence[int], start: int, num_top: int) -> PackedLogprobs:
    """The log-probabilities of the tokens of `context` from `start` on: hashes, too, of all up to each."""
    records = b""
    code = _hash(context[:start], _begin(0))
    for token in context[start:]:
        code = _hash((token,), code)
        best = [number for rank in range(num_top) for number in (code % VOCABULARY, -float(rank))]
        records += struct.pack("<fI" + "If" * num_top, -float(code % 100), code % 50, *best)
    return PackedLogprobs(start, num_top, records)


def alone(
    prompt: Sequence[int], seed: int, params: SamplingParams, eos_after: int | None = None
) -> tuple[list[int], str]:
    """Return the output that a request would get from an engine of its own with room for it, and why it ends.

    `eos_after` its output tokens comes EOS.
    """
    stop_ids = _stop_ids(params)
    tokens: list[int] = []
    state = _hash(prompt, _begin(seed))
    for count in range(params.max_tokens):
        tokens.append(EOS if count == eos_after else _token(state))
        state = _hash(tokens[-1:], state)
        if tokens[-1] in stop_ids and count >= params.min_tokens:
            return tokens, "stop"
    return tokens, "length"


def says(prompt: Sequence[int], max_tokens: int, stop: int | None = None, min_tokens: int = 0) -> list[int]:
    """Return the output for a prompt with the scripts' seed, the token that stops it included."""
    stops = () if stop is None else (stop,)
    params = SamplingParams(max_tokens=max_tokens, stop_token_ids=stops, min_tokens=min_tokens, ignore_eos=True)
    return alone(prompt, SEED, params)[0]


def continuations(context: Sequence[int], seed: int, count: int) -> list[tuple[int, float]]:
    """The `count` likeliest next tokens and their log-probabilities, best first; EOS may be among them."""
    code = _hash(context, _begin(seed))
    assert count <= _BEAM_VOCABULARY
    return [((code + 7 * rank) % _BEAM_VOCABULARY, -0.01 * (rank + code % 37)) for rank in range(count)]


def search_alone(prompt: Sequence[int], seed: int, params: SamplingParams) -> list[Hypothesis]:
    """Return what a beam search finds in an engine of its own."""
    assert params.beams is not None
    stop_ids = _stop_ids(params)
    search = BeamSearch(params.beams, stop_ids, params.max_tokens)
    count, outputs = params.beams.num_candidates(len(stop_ids)), [list[int]()]
    while outputs:
        found = [continuations([*prompt, *output], seed, count) for output in outputs]
        outputs = [[*outputs[beam], token] for _, beam, token in search.advance(outputs, found)]
    return search.finished[: params.beams.num_returned]


def _stop_ids(params: SamplingParams) -> set[int]:
    return {*params.stop_token_ids} | (set() if params.ignore_eos else {EOS})


def _begin(seed: int) -> int:
    return seed & 0xFFFFFFFF


def _hash(tokens: Sequence[int], state: int) -> int:
    """Go on from `state`."""
    for token in tokens:
        state = (state * 1000003 + token + 1) & 0xFFFFFFFF
    return state


def _token(state: int) -> int:
    return 1 + state % (VOCABULARY - 1)
