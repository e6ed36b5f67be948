"""The functions that the answer to a request calls, for tests in which each of them fails."""

from __future__ import annotations

from deployments.admission.admission import Admission
from deployments.admission.fair_queue import FairQueue
from deployments.admission.rate_limits import Ticket
from deployments.api.anthropic.encoder import MessagesEncoder
from deployments.api.generation.answer_events import AnswerEvents
from deployments.api.generation.chat_answer import ChatResponseEncoder
from deployments.api.generation.completion_answer import CompletionResponseEncoder
from deployments.api.generation.exchange import Exchange
from deployments.api.http.pacing import Pace, Turns
from deployments.api.output.choice import Choice
from deployments.api.output.choices import Choices
from deployments.api.record.request_metrics import RequestMetrics
from deployments.api.record.request_record import RequestRecord
from deployments.api.responses.encoder import ResponsesEncoder
from deployments.client.model_client import ModelClient
from tests.deployments.support.scripted_api import ScriptedEngine, ScriptedGeneration
from tests.deployments.support.watched_api import Busy

CALLED = [
    (RequestRecord, "accepted received finished disconnected"),
    (Ticket, "admit generated headers"),
    (Turns, "wait"),
    (Choice, "take"),
    (Choices, "open"),
    (Exchange, "_headers _extras"),
    (AnswerEvents, "encode"),
    (ChatResponseEncoder, "opening delta whole end"),
    (CompletionResponseEncoder, "opening delta whole end"),
    (MessagesEncoder, "opening delta whole end"),
    (ResponsesEncoder, "opening delta whole end"),
    (Busy, "queue_seconds uncached_tokens"),
    (ScriptedEngine, "prepared"),
    (ScriptedGeneration, "__anext__"),
    (RequestMetrics, "accepted prompt tokens first_token next_tokens ended"),
]
"""What an answer calls."""
OPENING = [
    (Pace, "open"),
    (ModelClient, "generate"),
    (ScriptedEngine, "generate"),
    (Admission, "admit"),
    (FairQueue, "push pop"),
]
"""What opens something, which is nowhere if the function fails afterwards."""
