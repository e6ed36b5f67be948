"""A beam search in the scheduler: one request, whose beams are requests with forks of its lease.

    request ── its prompt is computed ──▶ beam (with the request's lease) ─┬▶ continues with its lease
                                          beam (with a fork of it)         └▶ and with a fork of it
                                          beam (with a fork of it) ── is dropped: its pages are free

Either all beams are in a step or none is. The request waits, runs and has deltas; its beams only have chunks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from cache import KVCacheManager, Lease
from engine.base.errors import NeverFits
from engine.values.beam_search import BeamCandidate, BeamSearch
from engine.values.logprobs import TokenLogprobs
from engine.values.request import Request, Status


def check(request: Request, width: int, cache: KVCacheManager, max_running: int) -> None:
    """Raise NeverFits if there can never be room for all beams. Has no side effects."""
    if width > max_running:
        raise NeverFits(
            f"{width} beams, but this engine runs at most {max_running} sequences at a time (engine.max_running)"
        )
    if cache.snapshots is not None:
        raise NeverFits(
            "beam search is not available for models with recurrent layers, whose states it does not copy; sample "
            "several answers instead (n)"
        )
    if cache.tails is not None:
        raise NeverFits(
            "beam search is not available where layers with a window have their own pages, which it does not "
            "copy; sample several answers instead (n), or set engine.windowed_kv to off"
        )
    if request.num_resumed:
        raise NeverFits("a beam search cannot resume from generated tokens; send only its prompt again")
    size, longest = cache.page_size, request.num_prompt + request.sampling.max_tokens
    shared = request.num_prompt // size
    most = shared + width * (-(-longest // size) - shared)
    room = cache.num_pages - cache.num_shared_pages
    if most > room:
        raise NeverFits(
            f"{width} beams of {longest} tokens may need {most} KV pages of {size} tokens, "
            f"but this engine has {room} for them (engine.kv_pages); ask for fewer beams or tokens"
        )


def begin(request: Request) -> None:
    """Start the search of `request` after its prompt, on arrival and again after each preemption."""
    params = request.sampling.beams
    assert params is not None
    request.search = BeamSearch(params, request.stop_ids, request.longest - request.num_prompt)
    request.needs_previous_result = True  # The beams are known when the previous step is done.


def advance(cache: KVCacheManager, request: Request, rows: Sequence[TokenLogprobs], now: float) -> bool:
    """Continue with the candidates that a step found for each beam; returns whether the search continues.

    Beams that are not continued free their pages. The KV of a finished output stays in the tree, where the next
    turn of a conversation may find it.
    """
    search = request.search
    assert search is not None
    if not request.beams:
        assert request.lease is not None
        del request.tokens[request.num_computed :]
        request.beams = [_beam(request, request.tokens, request.lease, request.num_computed)]
        request.lease = None
    beams = request.beams
    chosen = search.advance(
        [beam.tokens[request.num_prompt : beam.num_computed] for beam in beams], [row.top for row in rows]
    )
    for index in search.ended:
        cache.insert(_lease(beams[index]), beams[index].tokens[: beams[index].num_computed], now)
    if chosen:
        request.beams = _branch(cache, request, chosen, now)
    return bool(chosen)


def end(cache: KVCacheManager, request: Request, now: float) -> None:
    """Free the pages of the beams, because the search is over or restarts later."""
    for beam in request.beams:
        _drop(cache, beam, now)
    request.beams = []


def _branch(cache: KVCacheManager, request: Request, chosen: Sequence[BeamCandidate], now: float) -> list[Request]:
    """Return the next beams. The first candidate that follows a beam reuses it, the others get forks of it."""
    beams, followed = request.beams, set()
    following = []
    for _, index, token in chosen:
        beam = beams[index]
        if index in followed:
            computed = beam.tokens[: beam.num_computed]
            lease = cache.fork(_lease(beam), computed, now)
            following.append(_beam(request, [*computed, token], lease, lease.num_cached))
        else:
            followed.add(index)
            following.append(beam)
            beam.tokens[beam.num_computed :] = [token]
    for index, beam in enumerate(beams):
        if index not in followed:
            _drop(cache, beam, now)
    return following


def _beam(request: Request, tokens: Sequence[int], lease: Lease, num_computed: int) -> Request:
    request.num_beams += 1
    return replace(
        request,
        request_id=f"{request.request_id}#{request.num_beams}",
        tokens=list(tokens),
        lease=lease,
        num_computed=num_computed,
        num_planned=num_computed,
        beams=[],
        leader=request,
    )


def _drop(cache: KVCacheManager, beam: Request, now: float) -> None:
    cache.finish(_lease(beam), [], now)
    beam.lease, beam.status = None, Status.FINISHED


def _lease(beam: Request) -> Lease:
    assert beam.lease is not None
    return beam.lease


def leases(request: Request) -> list[Lease]:
    """Return the leases that a request and its beams hold."""
    return [part.lease for part in (request, *request.beams) if part.lease is not None]
