"""Whether a request can ever be served by an engine, however long it waits."""

from __future__ import annotations

from cache import KVCacheManager
from engine.base.errors import NeverFits
from engine.scheduling.extensions import beam_group
from engine.values.request import Request


def check_fits(request: Request, max_model_len: int, cache: KVCacheManager, max_running: int) -> None:
    """Raise NeverFits if the request can never be served. `max_model_len` bounds its prompt and output tokens."""
    if request.num_prompt == 0:
        raise NeverFits("the prompt is empty: at least one token is needed")
    if request.pooling is not None:
        return _check_pooled(request, max_model_len)
    longest = request.num_prompt + request.sampling.max_tokens
    if longest > max_model_len and not (_is_scored_only(request) and request.num_prompt <= max_model_len):
        raise NeverFits(
            f"{request.num_prompt} prompt tokens + max_tokens {request.sampling.max_tokens} = {longest}, "
            f"but this engine holds at most {max_model_len} per request "
            "(engine.max_model_len, engine.kv_pages)"
        )
    if request.sampling.beams is not None:
        beam_group.check(request, request.sampling.beams.width, cache, max_running)
    return None


def _is_scored_only(request: Request) -> bool:
    """Whether its prompt may fill the context: the token sampled after its scores needs no room."""
    return request.sampling.prompt_logprobs is not None and request.sampling.max_tokens == 1


def _check_pooled(request: Request, max_model_len: int) -> None:
    """Check a pooled request, whose prompt may fill the context because it has no output."""
    if request.num_prompt > max_model_len:
        raise NeverFits(
            f"{request.num_prompt} prompt tokens, but this engine holds at most {max_model_len} per request "
            "(engine.max_model_len, engine.kv_pages)"
        )
    if request.num_resumed:
        raise NeverFits("a pooled request has no output to resume from; send only its prompt")
