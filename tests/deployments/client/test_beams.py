"""The single delta of a beam search: over the wire, from a second replica after a loss, and in answers."""

from __future__ import annotations

from deployments.client.protocol import GenerateRequest
from deployments.wire import messages
from deployments.wire.outbox import Outbox
from engine.values.beam_search import BeamParams, Hypothesis
from engine.values.sampling_params import SamplingParams
from engine.values.stream_delta import StreamDelta
from tests.deployments.support.api_over_engines import PROMPT, api_over
from tests.deployments.support.in_process_engines import SILENCE, ClientAndEngines, until
from tests.deployments.support.time_limit import run_scenario


def request(request_id: str) -> GenerateRequest:
    sampling = SamplingParams(max_tokens=12, seed=1, beams=BeamParams(4, 3, 0.7))
    return GenerateRequest(request_id, "m", list(range(10)), sampling)


def test_hypotheses_survive_the_wire_and_are_sent_again_whole() -> None:
    logs = Outbox()
    logs.open("a", "ingress")
    found = [Hypothesis((5, 6), -0.25, "stop"), Hypothesis((7,), -1.5, "length")]
    event = StreamDelta("a", [5, 6], num_cached=3, finish_reason="stop", alternatives=found)
    logs.record(event, 0.0)
    for _ in range(2):
        message = messages.encode(messages.Tokens(1, 2, logs.unsent("ingress")))
        read = messages.decode_to_ingress(message)
        assert isinstance(read, messages.Tokens) and read.deltas[0] == event
        logs.mark_sent("ingress", logs.unsent("ingress"))
        logs.resume("ingress", {"a": 0})


def test_a_lost_replica_s_search_starts_over_elsewhere_with_the_same_result() -> None:
    async def scenario() -> None:
        async with ClientAndEngines(2, health=SILENCE) as (client, engines):
            alone = [event async for event in await client.generate(request("alone"))]
            engines.runners[0].step_s = 0.05
            stream = await client.generate(request("a"))
            await until(lambda: engines.replicas[0].engine.scheduler.load(0).num_steps > 16)
            engines.replicas[0].close()
            found = [event async for event in stream]
            assert stream.replica == "r1"
            assert len(alone) == len(found) == 1
            assert found[0].alternatives is not None and len(found[0].alternatives) == 3
            assert found[0].alternatives == alone[0].alternatives
            assert found[0].token_ids == alone[0].token_ids == list(found[0].alternatives[0].token_ids)

    run_scenario(scenario())


def test_an_answer_has_the_hypotheses_that_the_engine_found() -> None:
    async def scenario() -> None:
        async with api_over(1) as api:
            response = await api.complete(
                use_beam_search=True, n=2, best_of=3, max_tokens=6, return_token_ids=True
            )
            assert response.status_code == 200, response.text
            first, second = response.json()["choices"]
            sampling = SamplingParams(max_tokens=6, seed=1, beams=BeamParams(3, 2))
            stream = await api.client.generate(GenerateRequest("b", "m", PROMPT, sampling))
            (event,) = [event async for event in stream]
            assert [first["token_ids"], second["token_ids"]] == [
                list(h.token_ids) for h in event.alternatives or ()
            ]
            assert len(first["token_ids"]) == 6 and response.json()["usage"]["completion_tokens"] == 12

    run_scenario(scenario())


def test_a_search_too_wide_for_the_engine_is_refused_with_a_reason() -> None:
    async def scenario() -> None:
        async with api_over(1, max_running=2) as api:
            refused = await api.complete(use_beam_search=True, n=3)
            assert refused.status_code == 400
            assert "3 beams, but this engine runs at most 2" in refused.json()["error"]["message"]

    run_scenario(scenario())
