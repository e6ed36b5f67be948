"""The endpoints of /openapi.json: a new one needs an entry here and a route, or a test fails. Its summary is the
docstring of its function, and `body_of` derives its body from the body's type.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from deployments.api.document import answers, pooled_answers, reports

JSON, EVENTS, TEXT = "application/json", "text/event-stream", "text/plain"


@dataclass(frozen=True, slots=True)
class AnswerType:
    """An answer with a status: of which type its JSON is, or None for other media."""

    type: Any = None
    media: tuple[str, ...] = (JSON,)


@dataclass(frozen=True, slots=True)
class EndpointAnswers:
    """The answers of an endpoint besides errors, which are the same for all endpoints of its kind."""

    answers: Mapping[int, AnswerType]
    query: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Schemas of the parameters in the query, by name; none is required."""
    errors: tuple[int, ...] = ()
    """Statuses of further errors."""
    is_admins: bool = False
    """Whether it needs the admin key."""


def _of(kind: Any, **options: Any) -> EndpointAnswers:
    return EndpointAnswers({200: AnswerType(kind)}, **options)


def _keeps(kind: Any, *errors: int) -> EndpointAnswers:
    """Describe an endpoint that stores an object, or changes a stored one."""
    return EndpointAnswers({200: AnswerType(kind)}, errors=(*errors, 507))


def _generates(kind: Any, *errors: int) -> EndpointAnswers:
    return EndpointAnswers({200: AnswerType(kind, (JSON, EVENTS))}, errors=(409, 504, *errors))


_TEXT, _NAME, _ORDER = {"type": "string"}, {"model": {"type": "string"}}, {"enum": ["asc", "desc"]}


def _page(most: int) -> dict[str, Mapping[str, Any]]:
    return {"limit": {"type": "integer", "minimum": 1, "maximum": most}, "after": _TEXT}


OPERATIONS: Mapping[str, EndpointAnswers] = {
    "POST /v1/chat/completions": _generates(answers.ChatCompletion),
    "POST /v1/completions": _generates(answers.TextCompletion),
    "POST /v1/messages": _generates(answers.MessageAnswer),
    "POST /v1/messages/count_tokens": _of(answers.TokenCount),
    "POST /v1/responses": _generates(answers.ResponseAnswer, 507),
    "POST /v1/responses/input_tokens": _of(answers.InputTokenCount),
    "GET /v1/responses/{response_id}": EndpointAnswers(
        {200: AnswerType(answers.ResponseAnswer, (JSON, EVENTS))},
        query={
            "stream": {"type": "boolean"},
            "starting_after": {"type": "integer", "minimum": -1, "maximum": 10**18 - 1},
        },
        errors=(429,),
    ),
    "DELETE /v1/responses/{response_id}": _keeps(answers.DeletedResponse, 429),
    "POST /v1/responses/{response_id}/cancel": _keeps(answers.ResponseAnswer, 429),
    "GET /v1/responses/{response_id}/input_items": _of(
        answers.InputItems, query=_page(100) | {"order": _ORDER}, errors=(429,)
    ),
    "GET /v1/streams/{name}": EndpointAnswers({200: AnswerType(media=(EVENTS,))}, errors=(409, 504)),
    "DELETE /v1/streams/{name}": _of(answers.EndedStream),
    "POST /tokenize": _of(answers.TokensAnswer),
    "POST /detokenize": _of(answers.TextAnswer),
    "GET /tokenizer_info": _of(dict[str, Any], query=_NAME),
    "POST /v1/conversations": _keeps(answers.ConversationAnswer),
    "GET /v1/conversations/{conversation_id}": _of(answers.ConversationAnswer, errors=(429,)),
    "POST /v1/conversations/{conversation_id}": _keeps(answers.ConversationAnswer),
    "DELETE /v1/conversations/{conversation_id}": _keeps(answers.DeletedConversation, 429),
    "POST /v1/conversations/{conversation_id}/items": _keeps(answers.InputItems),
    "GET /v1/conversations/{conversation_id}/items": _of(
        answers.InputItems, query=_page(100) | {"order": _ORDER}, errors=(429,)
    ),
    "GET /v1/conversations/{conversation_id}/items/{item_id}": _of(dict[str, Any], errors=(429,)),
    "DELETE /v1/conversations/{conversation_id}/items/{item_id}": _keeps(answers.ConversationAnswer, 429),
    "POST /v1/files": _keeps(reports.StoredFile),
    "GET /v1/files": _of(reports.FilePage, query=_page(10_000) | {"order": _ORDER, "purpose": _TEXT}),
    "GET /v1/files/{file_id}": _of(reports.StoredFile),
    "DELETE /v1/files/{file_id}": _keeps(reports.DeletedFile),
    "GET /v1/files/{file_id}/content": EndpointAnswers({200: AnswerType(media=("application/octet-stream",))}),
    "POST /v1/batches": _keeps(reports.Batch),
    "GET /v1/batches": _of(reports.BatchPage, query=_page(100)),
    "GET /v1/batches/{batch_id}": _of(reports.Batch),
    "POST /v1/batches/{batch_id}/cancel": _keeps(reports.Batch, 429),
    "POST /v1/embeddings": _of(pooled_answers.Embeddings, errors=(504,)),
    "POST /v1/rerank": _of(pooled_answers.Ranking, errors=(504,)),
    "POST /rerank": _of(pooled_answers.Ranking, errors=(504,)),
    "POST /v2/rerank": _of(pooled_answers.Ranking, errors=(504,)),
    "POST /v1/score": _of(pooled_answers.PairScores, errors=(504,)),
    "POST /score": _of(pooled_answers.PairScores, errors=(504,)),
    "GET /v1/models": _of(reports.Models),
    "GET /v1/models/{model_id}": _of(reports.Model),
    "DELETE /v1/models/{model_id}": EndpointAnswers(
        {202: AnswerType(reports.Model)}, errors=(409,), is_admins=True
    ),
    "POST /v1/models/{model_id}/load": EndpointAnswers(
        {202: AnswerType(reports.Model)}, errors=(409, 429), is_admins=True
    ),
    "GET /v1/router/decisions": _of(
        reports.ListOfObjects,
        query={"limit": {"type": "integer", "minimum": 1, "maximum": 10_000}, **_NAME},
        is_admins=True,
    ),
    "GET /v1/cluster/status": _of(dict[str, Any]),
    "GET /v1/cluster/nodes": _of(reports.ListOfObjects),
    "GET /v1/cluster/rollouts": _of(reports.RolloutList),
    **{
        f"POST /v1/cluster/rollouts/{{model_id}}/{action}": _of(
            reports.VersionedModel, errors=(409, 429), is_admins=True
        )
        for action in ("pause", "resume", "abort")
    },
    "GET /health": EndpointAnswers({200: AnswerType(reports.Health), 503: AnswerType(reports.Health)}),
    "GET /ready": EndpointAnswers({200: AnswerType(reports.Ready), 503: AnswerType(reports.Ready)}),
    "GET /ping": EndpointAnswers({200: AnswerType(media=()), 503: AnswerType(media=())}),
    "POST /ping": EndpointAnswers({200: AnswerType(media=()), 503: AnswerType(media=())}),
    "GET /load": _of(reports.Load),
    "GET /version": _of(reports.Version),
    "GET /server_info": _of(reports.ServerInfo),
    "POST /reset_prefix_cache": _of(reports.EmptiedCaches, query=_NAME, errors=(429,), is_admins=True),
    "GET /metrics": EndpointAnswers({200: AnswerType(media=(TEXT,)), 503: AnswerType(media=(TEXT,))}),
}
