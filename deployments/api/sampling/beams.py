"""`use_beam_search`: search with `best_of` (or `n`) beams and return the `n` likeliest outputs.

The fields are vLLM's: `length_penalty`, and `early_stopping` with the values of transformers.
"""

from __future__ import annotations

from dataclasses import replace

from deployments.api.base.errors import ApiError, invalid
from deployments.api.base.field_checks import in_range
from deployments.api.fields.protocol import ChatRequest, CompletionRequest
from deployments.config.limits import Limits
from engine.values.beam_search import BeamParams
from engine.values.sampling_params import InvalidSamplingParams, SamplingParams


def with_beams(
    sampling: SamplingParams, request: ChatRequest | CompletionRequest, limits: Limits, width: int
) -> SamplingParams:
    """Add beam search with `width` beams if the request asks for it.

    Raises `ApiError` 400 that names the field that is out of range or excludes beam search.
    """
    if not request.use_beam_search:
        for name, asked in (
            ("length_penalty", request.length_penalty),
            ("early_stopping", request.early_stopping),
        ):
            if asked not in (None, _NEUTRAL[name]):
                raise invalid(f"{name} is only allowed with use_beam_search.", name)
        return sampling
    if request.stream:
        raise invalid(
            "stream cannot be combined with use_beam_search, whose outputs are known at its end.", "stream"
        )
    param = "n" if request.best_of is None else "best_of"
    in_range(param, width, 1, limits.max_beam_width, "limits.max_beam_width")
    beams = BeamParams(
        width,
        request.n or 1,
        1.0 if request.length_penalty is None else request.length_penalty,
        request.early_stopping or False,
    )
    try:
        return replace(sampling, beams=beams)
    except InvalidSamplingParams as error:
        param = _asked_grammar(request) if error.param == "grammar" else error.param
        raise _excluded(error, param) from None


_NEUTRAL = {"length_penalty": 1.0, "early_stopping": False}


def _excluded(error: InvalidSamplingParams, param: str) -> ApiError:
    message = str(error) if param == error.param else f"{param} cannot be combined with use_beam_search"
    return invalid(f"{message}.", param)


def _asked_grammar(request: ChatRequest | CompletionRequest) -> str:
    """Return the field that asks for a grammar."""
    if request.structured_outputs is not None:
        return "structured_outputs"
    chosen = request.tool_choice if isinstance(request, ChatRequest) else None
    return "response_format" if chosen in (None, "auto", "none") else "tool_choice"
