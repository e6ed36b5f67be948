"""Reading traces: both formats, and the errors for wrong lines."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from deployments.simulator.fleet.arrivals import arrivals, tick_of
from deployments.simulator.fleet.trace import Trace, TraceError, TraceRequest, read_trace
from tests.router.support.traffic import conversations, write_mooncake

GOOD = {"timestamp": 3000, "input_length": 1000, "output_length": 5, "hash_ids": [10**15, 77]}


def write(path: Path, *lines: object) -> Path:
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
    return path


def test_mooncake_lines_become_requests_with_small_block_numbers(tmp_path: Path) -> None:
    later = GOOD | {"timestamp": 9000, "hash_ids": [10**15, 99]}
    trace = read_trace(write(tmp_path / "t.jsonl", later, "", GOOD))
    assert trace.has_prefixes
    first, second = trace.requests
    assert (first.time, second.time) == (0.0, 6.0)
    assert (first.num_tokens, first.num_output) == (1000, 5)
    assert first.blocks[0] == second.blocks[0]
    assert first.blocks[1] != second.blocks[1]
    assert max(first.blocks + second.blocks) == 2


def test_a_trace_reads_the_same_plain_and_gzipped(tmp_path: Path) -> None:
    made = conversations(50)
    plain = write_mooncake(tmp_path / "t.jsonl", made)
    packed = tmp_path / "t.jsonl.gz"
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    assert read_trace(packed).requests == read_trace(plain).requests
    assert read_trace(plain).num_prompt_tokens == made.num_prompt_tokens


def test_azure_rows_share_no_prefix(tmp_path: Path) -> None:
    rows = ["2023-11-16 18:15:46.6805900,374,44", "2023-11-16 18:15:50.9951690,1396,109"]
    trace = read_trace(write(tmp_path / "t.csv", "TIMESTAMP,ContextTokens,GeneratedTokens", *rows))
    assert not trace.has_prefixes
    first, second = trace.requests
    assert second.time == pytest.approx(4.314579)
    assert (second.num_tokens, second.num_output) == (1396, 109)
    assert len(second.blocks) == 3
    assert not set(first.blocks) & set(second.blocks)


def without(name: str) -> dict[str, object]:
    return {key: value for key, value in GOOD.items() if key != name}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (without("hash_ids"), 'line 2: the field "hash_ids" is missing'),
        (without("timestamp"), 'line 2: the field "timestamp" is missing'),
        (without("output_length"), 'line 2: the field "output_length" is missing'),
        (GOOD | {"input_length": 0}, 'line 2: "input_length" must be tokens, at least 1, got 0'),
        (GOOD | {"input_length": True}, 'line 2: "input_length" must be tokens'),
        (GOOD | {"timestamp": "noon"}, "line 2: \"timestamp\" must be milliseconds, at least 0, got 'noon'"),
        (GOOD | {"timestamp": -1}, 'line 2: "timestamp" must be milliseconds'),
        (GOOD | {"hash_ids": [1]}, r'line 2: expected 2 "hash_ids" for 1000 tokens in blocks of 512, got 1'),
        (GOOD | {"hash_ids": [1, "2"]}, 'line 2: "hash_ids" must be a list of integers'),
        ("{", "line 2: expected a JSON object"),
        ("[1]", "line 2: expected a JSON object, got list"),
    ],
)
def test_a_bad_line_is_named_with_the_expected_form(tmp_path: Path, line: object, message: str) -> None:
    path = write(tmp_path / "t.jsonl", GOOD, line)
    with pytest.raises(TraceError, match=message) as caught:
        read_trace(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("2023-11-16 18:15:46,x,44", "line 2: ContextTokens must be tokens, at least 1, got 'x'"),
        ("2023-11-16 18:15:46,12", "line 2: GeneratedTokens must be tokens, at least 0, got None"),
        ("yesterday,12,3", "line 2: TIMESTAMP must be like"),
    ],
)
def test_a_bad_row_is_named_with_the_expected_form(tmp_path: Path, row: str, message: str) -> None:
    with pytest.raises(TraceError, match=message):
        read_trace(write(tmp_path / "t.csv", "TIMESTAMP,ContextTokens,GeneratedTokens", row))


def test_other_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"line 1: .* header with ContextTokens, GeneratedTokens\. Expected"):
        read_trace(write(tmp_path / "t.csv", "TIMESTAMP,Tokens", "1,2"))
    with pytest.raises(TraceError, match=r"line 1: this is neither a JSON object nor .* Expected a JSON"):
        read_trace(write(tmp_path / "t.txt", "hello"))
    with pytest.raises(TraceError, match=r"missing\.jsonl cannot be read: no such file"):
        read_trace(tmp_path / "missing.jsonl")
    (tmp_path / "cut.gz").write_bytes(gzip.compress(b"x" * 1000)[:-10])
    with pytest.raises(TraceError, match="cannot be read"):
        read_trace(tmp_path / "cut.gz")


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "it is empty"),
        (b" \n\n", "it is empty"),
        (gzip.compress(b"", mtime=0), "it is empty"),
        (b"TIMESTAMP,ContextTokens,GeneratedTokens\n", "nothing follows its header"),
    ],
)
def test_a_file_without_requests_is_refused_with_the_reason(tmp_path: Path, content: bytes, why: str) -> None:
    (tmp_path / "t").write_bytes(content)
    with pytest.raises(TraceError, match=rf"t holds no requests: {why}\. Expected a JSON object .* CSV"):
        read_trace(tmp_path / "t")


def trace_of(*times: float) -> Trace:
    return Trace("t", tuple(TraceRequest(time, 100, 1, (0,)) for time in times), 512, True)


def test_ticks_are_found_and_spread() -> None:
    ticked = trace_of(*(3.0 * (number // 10) for number in range(100)))
    assert tick_of(ticked) == 3.0
    assert tick_of(trace_of(0.0, 1.5, 2.0, 7.0)) == 0.0
    offered = arrivals(ticked, load=0.5, fleet_rate=1000.0, seed=1)
    assert len(set(offered.times)) == 100
    assert list(offered.times) == sorted(offered.times)
    for time, request in zip(offered.times, offered.requests, strict=True):
        spread = time * offered.compression + (offered.compression * 0.0)
        assert abs(spread - request.time) <= 3.0


def test_arrivals_offer_the_load_that_was_asked_for() -> None:
    trace = conversations(400)
    for load in (0.3, 1.2):
        offered = arrivals(trace, load, fleet_rate=50_000.0, seed=3)
        rate = trace.num_prompt_tokens / offered.times[-1]
        assert rate == pytest.approx(load * 50_000.0, rel=0.02)


def test_a_seed_decides_the_arrivals() -> None:
    trace = trace_of(*(3.0 * (number // 10) for number in range(100)))
    same = [arrivals(trace, 0.5, 1e5, seed).times for seed in (1, 1, 2)]
    assert same[0] == same[1] != same[2]
