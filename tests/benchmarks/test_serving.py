"""The serving benchmark against a server whose behaviour is known."""

import asyncio
import json
import statistics
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from benchmarks.serving import (
    Load,
    Sample,
    benchmark,
    make_prompts,
    parse_args,
    percentiles,
    send_times,
    summarize,
)
from tests.support.fake_openai import TOKEN_SECONDS, Server


def run(fake_server: Server, tmp_path: Path, *arguments: str) -> tuple[int, dict[str, Any]]:
    out = tmp_path / "out.json"
    code = asyncio.run(benchmark(parse_args(["--url", fake_server.url, "--json", str(out), *arguments])))
    return code, json.loads(out.read_text())


def test_prompts_share_prefixes_as_asked_and_repeat_with_the_seed() -> None:
    load = Load(requests=400, prefixes=3, prefix_words=20, prefix_share=0.75, prompt_words=5)
    prompts = make_prompts(load)
    assert prompts == make_prompts(load) != make_prompts(Load(requests=400, seed=1))
    begins = [" ".join(prompt.split()[:20]) for prompt in prompts]
    counts = sorted((begins.count(begin) for begin in set(begins)), reverse=True)
    assert 0.68 < sum(counts[:3]) / 400 < 0.82 and counts[3] == 1
    assert all(len(prompt.split()) == 25 for prompt in prompts)
    assert len(set(prompts)) == 400


def test_poisson_times_have_the_asked_rate() -> None:
    times = send_times(Load(requests=4000, rate=50.0))
    gaps = [b - a for a, b in pairwise(times)]
    assert times[0] == 0 and min(gaps) >= 0
    assert statistics.mean(gaps) == pytest.approx(0.02, rel=0.1)
    assert statistics.stdev(gaps) == pytest.approx(0.02, rel=0.1)
    assert set(send_times(Load(rate=None))) == {0.0}


def test_percentiles_interpolate() -> None:
    assert percentiles([]) == {}
    assert percentiles([3.0])["p99"] == 3.0
    result = percentiles([float(i) for i in range(101)])
    assert (result["mean"], result["p50"], result["p95"]) == (50, 50, 95)
    assert percentiles([1.0, 2.0])["p90"] == pytest.approx(1.9)


def test_failed_requests_count_as_errors_only() -> None:
    good = Sample(sent=0, first=0.1, gaps=[0.2], duration=0.3, prompt_tokens=10, cached_tokens=4, output_tokens=2)
    bad = Sample(sent=0, duration=99.0, prompt_tokens=1000, error="HTTP 500")
    summary = summarize([good, bad], seconds=2.0)
    assert summary["errors"] == {"HTTP 500": 1}
    assert summary["requests_per_second"] == 0.5 and summary["output_tokens_per_second"] == 1.0
    assert summary["cached_share"] == 0.4 and summary["latency"]["e2e"]["p99"] == 0.3


def test_a_closed_loop_measures_what_the_server_does(
    fake_server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--requests", "20", "--concurrency", "4", "--prefix-tokens", "30", "--prefixes", "2"]
    code, result = run(fake_server, tmp_path, *arguments, "--prompt-tokens", "10", "--max-tokens", "8")
    summary = result["summary"]
    assert code == 0 and result["model"] == "fake" and summary["errors"] == {}
    assert len(fake_server.bodies) == 20 and 2 <= fake_server.most_open <= 4
    assert (summary["output_tokens"], summary["prompt_tokens"]) == (20 * 8, 20 * 40)
    assert summary["cached_share"] > 0.3
    # The server takes at least this long; tokens that a busy machine delivers late come close upon each other.
    assert all(sample["duration"] >= 8 * TOKEN_SECONDS for sample in result["samples"])
    assert summary["latency"]["ttft"]["p50"] < summary["latency"]["e2e"]["p50"]
    assert all(len(sample["gaps"]) == 7 for sample in result["samples"])
    assert "ignore_eos" not in fake_server.bodies[0], "servers refuse fields they do not know"
    shown = capsys.readouterr().out
    assert "TTFT" in shown and "output tokens/s" in shown


def test_an_open_loop_does_not_wait_for_the_server(fake_server: Server, tmp_path: Path) -> None:
    arguments = ["--requests", "30", "--rate", "300", "--prefixes", "0", "--prefix-tokens", "0"]
    options = ["--max-tokens", "40", "--prompt-tokens", "40", "--ignore-eos"]
    code, result = run(fake_server, tmp_path, *arguments, *options)
    assert all(body["ignore_eos"] for body in fake_server.bodies)
    assert code == 0 and fake_server.most_open > 8
    sent = [sample["sent"] for sample in result["samples"]]
    due = send_times(Load(requests=30, rate=300.0))
    assert all(at >= time for at, time in zip(sent, due, strict=True))


def test_an_unreachable_server_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert asyncio.run(benchmark(parse_args(["--url", "http://127.0.0.1:9"]))) == 1
    assert "does not list its models" in capsys.readouterr().err


@pytest.mark.parametrize("wrong", [["--requests", "0"], ["--rate", "-1"], ["--rate", "1", "--concurrency", "2"]])
def test_wrong_options_end_with_a_usage_message(wrong: list[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        parse_args(wrong)
