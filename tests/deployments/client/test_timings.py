"""`timings` agrees with what really happened to its request."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from deployments.client.protocol import GenerateRequest, Turn
from deployments.client.remote_engines import RemoteEngines
from deployments.client.stream import Stream
from tests.deployments.support.api_over_engines import PROMPT, api_over, events
from tests.deployments.support.in_process_engines import until
from tests.deployments.support.time_limit import run_scenario

FIELDS = {
    *("total_s", "time_to_first_token_s", "admission_s", "queue_s", "prefill_s", "decode_s", "prompt_tokens"),
    *("cached_tokens", "recomputed_tokens", "output_tokens", "preemptions", "kv_pages_peak", "migrations"),
    "replica",
}


def check(timings: dict[str, Any]) -> None:
    """Assert that the phases of a request that ended follow each other, before and after a migration."""
    assert all(timings[name] >= 0 for name in FIELDS if name.endswith("_s"))
    phases = timings["queue_s"] + timings["prefill_s"] + timings["decode_s"]
    assert phases <= timings["total_s"] + 1e-5
    if not timings["migrations"]:
        assert timings["queue_s"] + timings["prefill_s"] <= timings["time_to_first_token_s"] + 1e-5
    assert timings["admission_s"] <= timings["queue_s"]


def test_a_whole_answer_reports_the_time_of_its_phases() -> None:
    async def scenario() -> None:
        async with api_over() as api:
            api.engines.runners[0].step_s = 0.01
            answer = await api.complete()
            timings = answer.json()["timings"]
            assert set(timings) == FIELDS
            check(timings)
            assert timings["prefill_s"] >= 0.01 and timings["decode_s"] >= 0.06  # one step, and seven
            assert (timings["prompt_tokens"], timings["cached_tokens"], timings["output_tokens"]) == (20, 0, 8)
            assert (timings["recomputed_tokens"], timings["preemptions"], timings["migrations"]) == (0, 0, 0)
            assert timings["kv_pages_peak"] == 7  # 20 + 8 - 1 tokens in pages of 4
            assert timings["replica"] == answer.headers["x-raydix-replica"] == "r0"
            assert (await api.complete()).json()["timings"]["cached_tokens"] == 19
            assert "timings" not in (await api.complete(include_timings=False)).json()

    run_scenario(scenario())


@pytest.mark.parametrize("with_usage", [True, False])
def test_a_stream_has_timings_in_its_last_event(with_usage: bool) -> None:
    async def scenario() -> None:
        async with api_over() as api:
            options: dict[str, Any] = {"stream_options": {"include_usage": True}} if with_usage else {}
            *others, last = events(await api.complete(stream=True, **options))
            assert last["choices"] == [] and set(last["timings"]) == FIELDS
            assert ("usage" in last) == with_usage
            assert others[-1]["choices"][0]["finish_reason"] == "length"
            assert not any("timings" in event for event in others)
            check(last["timings"])

    run_scenario(scenario())


def test_several_choices_have_timings_together_and_each() -> None:
    async def scenario() -> None:
        async with api_over() as api:
            answer = (await api.complete(n=3, prompt=[PROMPT, PROMPT[:7]])).json()
            timings, usage = answer["timings"], answer["usage"]
            assert set(timings) == FIELDS | {"choices"} and len(timings["choices"]) == 6
            for each in timings["choices"]:
                check(each)
            assert [each["prompt_tokens"] for each in timings["choices"]] == [20] * 3 + [7] * 3
            assert timings["output_tokens"] == usage["completion_tokens"] == 48
            assert timings["prompt_tokens"] == usage["prompt_tokens"] == 27
            assert timings["cached_tokens"] == usage["prompt_tokens_details"]["cached_tokens"]
            assert timings["total_s"] >= max(each["total_s"] for each in timings["choices"])
            assert timings["time_to_first_token_s"] == min(
                each["time_to_first_token_s"] for each in timings["choices"]
            )

    run_scenario(scenario())


def test_a_stream_that_moved_sums_its_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    streams: list[Stream] = []
    generate = RemoteEngines.generate

    async def noted(self: RemoteEngines, request: GenerateRequest, turn: Turn | None = None) -> Stream:
        streams.append(await generate(self, request, turn))
        return streams[-1]

    monkeypatch.setattr(RemoteEngines, "generate", noted)

    async def scenario() -> None:
        async with api_over(2, health={"lost_after_s": 3.0}) as api:
            api.engines.runners[0].step_s = 0.02
            asked = asyncio.create_task(api.complete(stream=True, max_tokens=200))
            await until(lambda: bool(streams) and streams[0].journal.num_tokens >= 20)
            [stream] = streams
            api.engines.fall_silent(0)
            *_, last = events(await asked)
            first, second = stream.timeline.spans
            timings = last["timings"]
            check(timings)
            assert (timings["replica"], timings["migrations"], timings["output_tokens"]) == ("r1", 1, 200)
            assert timings["cached_tokens"] == timings["preemptions"] == 0
            # r1's cache was empty: it computed the prompt and all but the last of r0's tokens once more.
            assert second.timings is not None and first.timings is not None
            moved = timings["recomputed_tokens"] - (20 - 1)
            assert 20 <= moved < 200
            assert timings["prefill_s"] == pytest.approx(first.timings.prefill + second.timings.prefill, abs=1e-5)
            assert timings["decode_s"] == pytest.approx(first.decode_s + second.timings.decode, abs=1e-5)
            assert first.decode_s > 0.3 and not first.has_ended
            # The silence in between belongs to no phase.
            assert timings["total_s"] > timings["queue_s"] + timings["prefill_s"] + timings["decode_s"] + 0.5

    run_scenario(scenario())


def test_a_preempted_request_reports_its_preemption() -> None:
    """There are two requests, and memory for one and a half."""

    async def scenario() -> None:
        async with api_over(kv_pages=24, page_size=4) as api:
            api.engines.runners[0].gate.clear()
            prompts = [list(range(1, 33)), list(range(100, 132))]
            asked = [asyncio.create_task(api.complete(prompt=prompt, max_tokens=30)) for prompt in prompts]
            await until(lambda: len(api.engines.calls) == 2)
            await asyncio.sleep(0.05)  # both have reached the engine, neither has been computed
            api.engines.runners[0].step_s = 0.005
            api.engines.runners[0].gate.set()
            both = [(await one).json()["timings"] for one in asked]
            for timings in both:
                check(timings)
                assert (timings["preemptions"] > 0) == (timings["recomputed_tokens"] > 0)
            assert sum(timings["preemptions"] for timings in both) > 0

    run_scenario(scenario())


def test_a_stop_string_ends_a_stream_before_the_engine_reports_its_end() -> None:
    async def scenario() -> None:
        async with api_over() as api:
            api.engines.runners[0].step_s = 0.01
            stop = api.codec.decode([40])
            assert stop.strip()
            timings = (await api.complete(max_tokens=200, stop=stop)).json()["timings"]
            check(timings)
            assert timings["output_tokens"] < 200 and timings["prefill_s"] >= 0.01
            assert timings["decode_s"] >= 0.01 * (timings["output_tokens"] - 2)
            assert timings["preemptions"] == timings["recomputed_tokens"] == 0

    run_scenario(scenario())


def test_an_answer_without_generated_tokens_has_no_phases() -> None:
    async def scenario() -> None:
        async with api_over() as api:
            timings = (await api.complete(max_tokens=0, echo=True)).json()["timings"]
            assert timings.pop("total_s") > 0
            counts = {"prompt_tokens": 20, "output_tokens": 0, "cached_tokens": 0, "migrations": 0}
            assert timings == dict.fromkeys(FIELDS - {"total_s"}) | counts

    run_scenario(scenario())


@pytest.mark.parametrize("value", ["yes", 1, [True]])
def test_include_timings_must_be_a_boolean(value: object) -> None:
    async def scenario() -> None:
        async with api_over() as api:
            refused = await api.complete(include_timings=value)
            assert refused.status_code == 400 and refused.json()["error"]["param"] == "include_timings"

    run_scenario(scenario())
