"""The comparison's own parts; none of the peers is needed."""

import asyncio
import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from benchmarks.compare import parse_args
from benchmarks.peers import chart, http_load, models, process, summary
from benchmarks.peers.ceilings import Ceilings, decode_share, prefill_share
from benchmarks.peers.process import Peer, PeerFailed
from benchmarks.peers.protocol import Job, Settings
from benchmarks.peers.summary import Sample, Speed
from benchmarks.peers.workloads import FULL, QUICK, make_jobs, make_warm_up
from tests.support.fake_openai import fake_openai

IDS = range(300, 1000)
SETTINGS = Settings("nowhere", "bfloat16", 2, 4, 64, 1024)
ADAPTER = """
from benchmarks.peers.protocol import serve

class Echo:
    version = "1"
    def generate(self, job):
        print("engines print what they like")
        return [prompt[:count] for prompt, count in zip(job.prompts, job.max_tokens)]

serve(lambda settings: Echo())
"""


def test_jobs_are_the_same_for_all_and_new_in_every_round() -> None:
    jobs = make_jobs(FULL, IDS, 0)
    assert jobs == make_jobs(FULL, IDS, 0)
    assert all(job != make_jobs(FULL, IDS, 1)[name] for name, job in jobs.items())
    assert all(token in IDS for job in jobs.values() for prompt in job.prompts for token in prompt)
    assert (jobs["offline"].num_prompt, jobs["offline"].num_output) == (32 * 256, 32 * 64)


def test_warm_prompts_begin_as_the_cold_ones_and_end_otherwise() -> None:
    jobs = make_jobs(FULL, IDS, 3)
    prompts = jobs["shared prefix cold"].prompts + jobs["shared prefix warm"].prompts
    assert {len(prompt) for prompt in prompts} == {1024 + 32}
    assert len({tuple(prompt[:1024]) for prompt in prompts}) == 1
    assert len({tuple(prompt[1024:]) for prompt in prompts}) == 64


@pytest.mark.parametrize("sizes", [FULL, QUICK])
def test_every_job_fits_into_the_room_that_engines_are_given(sizes: object) -> None:
    assert isinstance(sizes, type(FULL))
    for job in [*make_jobs(sizes, IDS, 0).values(), *make_warm_up(sizes, IDS)]:
        lengths = [len(prompt) + count for prompt, count in zip(job.prompts, job.max_tokens, strict=True)]
        assert max(lengths) <= sizes.max_len and sum(lengths) <= sizes.kv_tokens
        assert len(lengths) <= sizes.requests
    low, high = sizes.mixed_prompt
    assert all(low <= len(prompt) <= high for prompt in make_jobs(sizes, IDS, 0)["mixed"].prompts)


def test_bests_ratio_and_spread() -> None:
    speeds = {"raydix": [90.0, 120.0], "vllm": [100.0, 80.0], "transformers": [20.0, 99.0]}
    samples = [
        Sample(engine, "offline", number, 1.0, speed)
        for engine, found in speeds.items()
        for number, speed in enumerate(found)
    ]
    assert summary.speeds(samples)["offline"]["vllm"] == Speed(best=100.0, worst=80.0)
    against = summary.ratio(samples, "offline")
    assert against is not None and against.peer == "vllm"
    assert (against.value, against.low, against.high) == (1.2, 0.9, 1.5)
    assert summary.ratio([one for one in samples if one.engine == "raydix"], "offline") is None
    report = summary.as_json([replace(one, workload="first token") for one in samples])["first token"]
    assert report["unit"] == "ms" and report["engines"]["vllm"] == {"best": 10.0, "worst": 12.5}


def test_decoding_time_starts_after_the_first_token() -> None:
    """128 tokens in 2 s, the first of them after 0.73 s."""
    rate = summary.decode_rate(Speed(64.0, 64.0), Speed(1 / 0.73, 1 / 0.73), 128)
    assert rate == pytest.approx(100.0)


def test_agreement_counts_first_tokens() -> None:
    tokens = {"raydix": [[1, 2], [3, 4]], "vllm": [[1, 9], [5, 4]]}
    assert summary.agreement(tokens) == {"vllm": 0.5}


def test_shares_of_the_ceilings() -> None:
    config, top = models.CONFIGS["qwen3-0.6b"], Ceilings(read=20e9, gemm=1e12)
    assert models.matrix_parameters(config) == pytest.approx(596e6, rel=0.01)
    assert decode_share(config, 2, 10.0, top) == pytest.approx(0.596, rel=0.01)
    layers = 596e6 - 151_936 * 1024
    attention = 2 * 28 * 16 * 128 * 1024**2
    share = prefill_share(config, Job([[1] * 1024], [1]), 1.0, top)
    assert share == pytest.approx((2 * layers * 1024 + 2 * 151_936 * 1024 + attention) / 1e12, rel=0.01)


def make_small(family: str, monkeypatch: pytest.MonkeyPatch, root: Path) -> Path:
    shape = {"vocab_size": 1200, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 8}
    config = models.CONFIGS[family] | shape
    if "layer_types" in config:
        config["layer_types"] = config["layer_types"][:2]
    monkeypatch.setitem(models.CONFIGS, "small", config)
    return models.make_model("small", root)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    return make_small("llama-15m", monkeypatch, tmp_path)


@pytest.mark.parametrize("family", [*models.CONFIGS])
def test_any_engine_can_read_a_model(family: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    made = make_small(family, monkeypatch, tmp_path)
    model, told = AutoModelForCausalLM.from_pretrained(made, output_loading_info=True)
    assert not told["missing_keys"] and not told["unexpected_keys"] and not told["mismatched_keys"]
    assert model.dtype is torch.bfloat16
    in_file = sum(map(torch.numel, load_file(made / "model.safetensors").values()))
    assert sum(one.numel() for one in model.parameters()) == in_file
    assert models.all_parameters(models.CONFIGS["small"]) == in_file


def test_a_model_is_made_once_and_its_tokenizer_reads_any_text(small: Path, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(small)
    assert len(tokenizer) == 1200 and tokenizer.eos_token_id == 1199
    assert tokenizer.decode(tokenizer.encode("it reads ünicode")) == "it reads ünicode"
    assert all(tokenizer.decode([token]).strip() for token in range(models.FIRST_WORD, 1199))
    before = (small / "model.safetensors").stat().st_mtime_ns
    assert models.make_model("small", tmp_path) == small
    assert (small / "model.safetensors").stat().st_mtime_ns == before


@pytest.fixture
def home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A peer "echo" whose interpreter runs `ADAPTER` whatever it is told to run."""
    binary = tmp_path / "echo" / "bin" / "python"
    binary.parent.mkdir(parents=True)
    (tmp_path / "adapter.py").write_text(ADAPTER)
    binary.write_text(
        f'#!/bin/sh\nPYTHONPATH="{process.REPOSITORY}" exec "{sys.executable}" "{tmp_path}/adapter.py"\n'
    )
    binary.chmod(0o755)
    monkeypatch.setattr("importlib.import_module", lambda name: None)
    return tmp_path


def test_a_peer_answers_jobs_and_its_chatter_goes_to_the_log(home: Path) -> None:
    log = home / "log"
    peer = Peer("echo", home, SETTINGS, log, timeout_s=60)
    try:
        assert peer.version == "1"
        answer = peer.run(Job([[7, 8, 9], [1, 2]], [2, 1]))
        assert answer.tokens == [[7, 8], [1]] and answer.seconds > 0
        assert "engines print what they like" in log.read_text()
        with pytest.raises(PeerFailed, match="echo answered with 1 tokens where 5 were asked for"):
            peer.run(Job([[1]], [5]))
    finally:
        peer.stop()


def test_a_peer_that_cannot_start_gives_the_reason(home: Path) -> None:
    with pytest.raises(PeerFailed, match=r"absent is not installed in .*: see benchmarks/peers/install\.sh"):
        Peer("absent", home, SETTINGS, home / "log", timeout_s=60)
    (home / "adapter.py").write_text("raise SystemExit('ImportError: no such engine')")
    with pytest.raises(PeerFailed, match="echo ended: ImportError: no such engine"):
        Peer("echo", home, SETTINGS, home / "log", timeout_s=60)


def test_streams_are_read_as_they_came() -> None:
    """Events may be cut anywhere; a token's time is that of the bytes that completed it."""
    usage = {"prompt_tokens": 5, "completion_tokens": 2}
    text = [{"choices": [{"text": "a"}]}, {"choices": [{"text": "b"}]}, {"choices": [], "usage": usage}]
    stream = b"".join(b"data: " + json.dumps(one).encode() + b"\r\n\r\n" for one in text) + b"data: [DONE]\n\n"
    chunks = [(1.5, stream[:10]), (2.0, stream[10:60]), (2.5, stream[60:])]
    sample = http_load.read(1.0, 0.0, chunks, asked=2)
    assert (sample.first, sample.gaps, sample.duration, sample.error) == (1.0, [0.5], 1.5, None)
    assert http_load.read(1.0, 0.0, chunks, asked=3).error == "2 tokens instead of 3"


def test_http_load_measures_a_server() -> None:
    sizes = replace(QUICK, requests=3, answer=4, own=4, single=4)
    with fake_openai() as server:
        found = asyncio.run(http_load.measure(server.url, sizes, IDS))
    assert list(found) == ["single", "offline", "shared prefix cold", "shared prefix warm"]
    assert found["single"]["requests"] == http_load.SINGLES and found["offline"]["requests"] == 3
    assert all(not row["errors"] and row["output_tokens_per_second"] > 0 for row in found.values())


def test_the_chart_is_drawn_from_the_available_samples(tmp_path: Path) -> None:
    samples = [Sample(name, "offline", 0, 1.0, 10.0) for name in ("raydix", "vllm")]
    report = {
        "versions": {"raydix": "1", "vllm": "2"},
        "workloads": summary.as_json(samples),
        "settings": {"precision": "bfloat16", "threads": 2},
    }
    chart.draw({"small": report}, tmp_path / "chart.png")
    assert (tmp_path / "chart.png").read_bytes().startswith(b"\x89PNG")


def test_bad_options_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_args(["--rounds", "0"])
    assert "--threads and --rounds must be at least 1" in capsys.readouterr().err
