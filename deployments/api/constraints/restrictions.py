"""`bad_words` and `allowed_token_ids`: which words or tokens an answer may have.

They are grammars of any text, so they cannot be combined with another one.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from deployments.api.base.errors import invalid
from deployments.api.base.field_checks import at_most, in_vocabulary
from deployments.api.constraints.structured import check_grammar
from deployments.api.fields.protocol import ChatRequest, CompletionRequest
from deployments.api.served.served_model import GrammarChecker, ModelCard, ServedModel
from deployments.config.limits import Limits
from engine.grammar.spec import Grammar


async def restricted(
    limits: Limits, served: ServedModel, request: ChatRequest | CompletionRequest, grammar: Grammar | None
) -> Grammar | None:
    """Return the grammar of an answer that must match `grammar`, if any, and the request's restrictions.

    Raises `ApiError` 400 that names the field.
    """
    if not request.bad_words and request.allowed_token_ids is None:
        return grammar
    asked = [("bad_words", bool(request.bad_words)), ("allowed_token_ids", request.allowed_token_ids is not None)]
    param = next(name for name, is_given in asked if is_given)
    if grammar is not None or all(is_given for _, is_given in asked):
        raise invalid(f"{param} cannot be combined with another constraint on the answer; leave one out.", param)
    if request.bad_words:
        return await _without_words(limits, served.grammars, request.bad_words, served.special_ids)
    return _of_tokens(limits, served.card, request)


async def _without_words(
    limits: Limits, checker: GrammarChecker | None, words: list[str], special_ids: Iterable[int]
) -> Grammar:
    at_most(limits, "max_grammar_choices", "bad_words", len(words), "words")
    if not all(word.strip() for word in words):
        raise invalid("bad_words must hold words that are not empty.", "bad_words")
    pattern = "|".join("".join(map(_character, word.strip())) for word in words)
    at_most(limits, "max_grammar_bytes", "bad_words", len(pattern), "bytes")
    specials = _ranges(special_ids)
    # No text may follow another directly, because a word could then be divided between them.
    more = f" (special+ TEXT)* special*\nspecial: <[{specials}]>" if specials else ""
    source = f"start: TEXT?{more}\nTEXT: /(?s:.)+/ & ~/(?s:.*)({pattern})(?s:.*)/"
    return await check_grammar(checker, Grammar("lark", source), "bad_words")


def _of_tokens(limits: Limits, card: ModelCard, request: ChatRequest | CompletionRequest) -> Grammar:
    ids = request.allowed_token_ids or []
    if not ids:
        raise invalid("allowed_token_ids is empty; it needs at least one token.", "allowed_token_ids")
    in_vocabulary("allowed_token_ids", ids, card.vocab_size)
    if card.eos_token_ids.isdisjoint(ids) and (request.stop or request.stop_token_ids):
        # If the model has no end token, only `max_tokens` may end the answer: see `never_ends`.
        raise invalid(
            "allowed_token_ids has no token with which the model ends its answer, so it cannot be combined with "
            "stop or stop_token_ids; add one.",
            "allowed_token_ids",
        )
    allowed = _ranges(set(ids) - card.eos_token_ids)
    source = f"start: <[{allowed}]>*" if allowed else 'start: ""'
    at_most(limits, "max_grammar_bytes", "allowed_token_ids", len(source), "bytes")
    return Grammar("lark", source)


def never_ends(card: ModelCard, request: ChatRequest | CompletionRequest) -> bool:
    """Whether the allowed tokens have none with which the model ends its answer."""
    return request.allowed_token_ids is not None and card.eos_token_ids.isdisjoint(request.allowed_token_ids)


def _ranges(ids: Collection[int] | Iterable[int]) -> str:
    """Return token ids as llguidance's ranges: 1-3,7."""
    parts: list[list[int]] = []
    for token in sorted(set(ids)):
        if parts and token == parts[-1][1] + 1:
            parts[-1][1] = token
        else:
            parts.append([token, token])
    return ",".join(str(low) if low == high else f"{low}-{high}" for low, high in parts)


def _character(char: str) -> str:
    return char if char.isascii() and char.isalnum() else f"\\x{{{ord(char):x}}}"
