"""Whether a prompt and its answer fit a model's context."""

from __future__ import annotations

from deployments.api.base.errors import ApiError, invalid
from deployments.api.served.served_model import ModelCard


def room(prompt_tokens: int, max_model_len: int, param: str) -> int:
    """Return how many tokens can follow a prompt. Raises `ApiError` when there is no room for even one."""
    if prompt_tokens >= max_model_len:
        raise context_exceeded(
            f"{context(max_model_len)}, but the prompt has {prompt_tokens} and needs room "
            "for at least one generated token. Shorten the prompt.",
            param,
        )
    return max_model_len - prompt_tokens


def check_in_context(num_tokens: int, model: ModelCard, param: str) -> None:
    """Raise `ApiError` 400 when there are more tokens than the context has."""
    if num_tokens > model.max_model_len:
        raise context_exceeded(f"{context(model.max_model_len)}, but {param} has {num_tokens}.", param)


def check_room(prompt_tokens: int, max_tokens: int, model: ModelCard, param: str) -> None:
    """Raise `ApiError` when a prompt and the tokens to generate exceed the context."""
    if max_tokens > room(prompt_tokens, model.max_model_len, param):
        shown = max_tokens if max_tokens < 10**20 else "too many"
        raise context_exceeded(
            f"{context(model.max_model_len)}, but the prompt has {prompt_tokens} and "
            f"{shown} are to be generated. Shorten the prompt or ask for fewer tokens.",
            param,
        )


def context(max_model_len: int) -> str:
    """Begin an error message about a model's context."""
    # LiteLLM and LangChain know this beginning, and shorten the conversation.
    own = "its own, or less by engine.max_model_len"
    return f"This model's maximum context length is {max_model_len} tokens ({own})"


def context_exceeded(message: str, param: str) -> ApiError:
    """Create a 400 with OpenAI's code for a prompt that does not fit."""
    return invalid(message, param, "context_length_exceeded")
