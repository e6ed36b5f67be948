"""What a replica does with a request that comes twice, as while its grammar was compiled."""

from __future__ import annotations

from typing import Any

import pytest

from deployments.wire.messages import Generate, pack_tokens
from deployments.wire.server import WireTimings
from engine.sampling_params import SamplingParams
from tests.deployments.support.in_process_engines import InProcessEngines


@pytest.mark.parametrize(
    ("second", "refused"), [("an ingress", []), ("another", [("another", "a", "never_fits")])]
)
def test_a_request_that_its_ingress_sends_again_is_neither_run_twice_nor_refused(
    second: str, refused: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the wire's look and the engine's lies the time in which a grammar is compiled."""
    engines, told = InProcessEngines(1, WireTimings(absent_ingress_s=60)), list[Any]()
    try:
        replica = engines.replicas[0]
        monkeypatch.setattr(replica._wire, "refuse", lambda *refusal: told.append(refusal[:3]))
        asked = Generate(1, "a", pack_tokens([1, 2, 3]), SamplingParams(max_tokens=40))
        replica._intake.on_generate("an ingress", asked)
        replica._intake.on_generate(second, asked)
        assert told == refused
    finally:
        engines.close()
