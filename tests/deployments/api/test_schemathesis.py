"""Requests that schemathesis makes from /openapi.json, right and wrong: every answer is as the document says."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import Case, CheckContext, GenerationMode, Response
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    allow_header_conformance,
    content_type_conformance,
    negative_data_rejection,
    positive_data_acceptance,
    response_schema_conformance,
    status_code_conformance,
)

from deployments.api import TextCodec, create_app
from deployments.api.document.operations import OPERATIONS
from deployments.batch.spool import Spool
from deployments.config.files import FileSettings
from monitoring.metrics import Metrics
from tests.deployments.support.scripted_api import MODEL, ScriptedEngine, service_around
from tests.support.examples import examples


def described_requests_are_accepted(ctx: CheckContext, response: Response, case: Case[Any]) -> bool | None:
    """Unless its prompt is longer than the model's context, of which a document can say nothing."""
    if response.status_code == 400 and b"context_length_exceeded" in response.content:
        return None
    return positive_data_acceptance(ctx, response, case)


CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
    negative_data_rejection,
    described_requests_are_accepted,
    allow_header_conformance,
]
NUM_EXAMPLES = examples(2)
_CLUSTER = {name for name in OPERATIONS if "/v1/cluster/" in name}
"""Routes that a service without a cluster does not have."""


@pytest.fixture(scope="module")
def document(codec: TextCodec, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The document of one service, which is asked all there is: reading it takes longer than most answers."""
    service = service_around(ScriptedEngine(codec, says="Yes."), codec, Metrics(MODEL, "ingress-1"))
    spool = Spool(FileSettings(directory=str(tmp_path_factory.mktemp("files"))))
    whole = replace(service, admin_key_hash=hashlib.sha256(b"root").hexdigest(), spool=spool)
    return schemathesis.openapi.from_asgi("/openapi.json", create_app(whole))


@pytest.mark.parametrize("operation", sorted(OPERATIONS.keys() - _CLUSTER))
def test_every_answer_matches_the_document(document: Any, operation: str) -> None:
    method, path = operation.split(" ")
    modes = [GenerationMode.POSITIVE]
    if OPERATIONS[operation].query or "requestBody" in document.raw_schema["paths"][path][method.lower()]:
        modes.append(GenerationMode.NEGATIVE)  # else there is nothing to get wrong
    for mode in modes:

        @given(case=document[path][method].as_strategy(generation_mode=mode))
        @settings(
            max_examples=NUM_EXAMPLES,
            phases=[Phase.explicit, Phase.generate],
            derandomize=True,
            database=None,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        )
        def check(case: Case[Any]) -> None:
            case.call_and_validate(checks=CHECKS, headers={"authorization": "Bearer root"})

        check()
