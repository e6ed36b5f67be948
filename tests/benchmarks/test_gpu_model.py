"""The model of decode steps on GPUs: kernels are counted on the engine's code, times follow from the formula."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

if find_spec("triton") is None:  # not imported here, as other tests set first that it interprets
    pytest.skip("Triton is not installed here", allow_module_level=True)


def test_steps_are_modelled_by_the_kernels_that_the_engine_launches() -> None:
    """A layer is nine kernels; in fp8 it is one more, which rounds what attention returns. Twelve lie beside. With
    several rows a layer is one more, for what rows share, and a step two, which find that.
    """
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu_model", "--gpu", "h200", "--context", "1000"],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    steps, _, aims = done.stdout.partition("\naims")
    rows = [line.split() for line in steps.splitlines()[2:]]
    kernels = {(model, weights, at): int(count) for model, weights, at, count, *_ in rows}
    assert kernels["llama-3.1-8b", "bfloat16", "1"] == 32 * 9 + 12
    assert kernels["llama-3.1-8b", "fp8", "1"] == 32 * 10 + 12
    assert kernels["qwen3-0.6b", "bfloat16", "1"] == 28 * 9 + 12
    assert kernels["llama-3.1-8b", "bfloat16", "32"] == 32 * 10 + 14
    for _, _, _, count, early, ms, least, share, alone in rows:
        beside = (int(count) - int(early)) * 0.0012 + int(early) * 0.0007
        assert float(ms) == pytest.approx(float(least) / 0.9 + beside, abs=0.01)
        assert alone == ms, "nothing is shared"
        assert float(share.rstrip("%")) == pytest.approx(100 * float(least) / float(ms), abs=3)
    assert kernels["qwen3-30b-a3b", "blocks", "1"] - kernels["qwen3-30b-a3b", "bfloat16", "1"] == 48 * 3
    experts, rest = 3 * 48 * 128 * 2048 * 768, 48 * 2048 * (2 * 4096 + 2 * 512)
    for at, used in (("1", 8 / 128), ("128", 1 - (120 / 128) ** 128)):
        [mixture] = [row for row in rows if row[:3] == ["qwen3-30b-a3b", "blocks", at]]
        weight_bytes = (experts * used + rest) * (1 + 1 / 1024) + 2 * 151_936 * 2048
        kv_bytes = int(at) * 1000 * 48 * 2 * 4 * 128 * 2
        assert float(mixture[6]) == pytest.approx((weight_bytes + kv_bytes) / 4.8e9, rel=0.01)
    modelled = {tuple(line.split("%")[0].split(maxsplit=1)) for line in aims.splitlines()[2:]}
    told = {(model, what.rpartition(" ")[0].strip()): float(what.rpartition(" ")[2]) for model, what in modelled}
    for at, name in (("1", "1 row"), ("32", "32 rows"), ("128", "128 rows")):
        [step] = [row for row in rows if row[:3] == ["llama-3.1-8b", "bfloat16", at]]
        assert told["llama-3.1-8b", f"decode, {name}"] == pytest.approx(float(step[7].rstrip("%")), abs=0.5)
    prefill = {
        (length, by): told["llama-3.1-8b", f"prefill, {length} by {by}"]
        for length in (1024, 8192, 32768)
        for by in ("flash_attn", "cudnn", "triton")
    }
    assert prefill[32768, "flash_attn"] < prefill[8192, "flash_attn"] < prefill[1024, "flash_attn"] < 90
    for length in (1024, 8192, 32768):
        assert prefill[length, "triton"] <= prefill[length, "cudnn"] < prefill[length, "flash_attn"]
    spent = r"prefill, 32768 by triton +([\d.]+)% .*\(products (\d+)%, attention (\d+)%, gaps (\d+)%\)"
    found = re.search(spent, aims)
    assert found is not None
    reached, *parts = map(float, found.groups())
    assert sum(parts) == pytest.approx(100, abs=1.5)
    # Of 8B at 32,768 tokens, 38 operations of a hundred are attention's; of its pairs, a fourth lie in one step.
    assert reached == pytest.approx(100 / (62 / 90 + 0.38 / (477 / 989) * (3 / 4 + 1 / 4 / 0.85)), abs=0.7)
    assert 60 < told["qwen3-0.6b", "offline, 256 requests"] < 90
    assert 0 < told["llama-3.1-8b", "top-p, 1 rows"] < told["llama-3.1-8b", "top-p, 128 rows"] < 5
    eight_b = [row for row in rows if row[:3] == ["llama-3.1-8b", "bfloat16", "1"]]
    weight_bytes, kv_bytes = 2 * 7.504e9, 1000 * 32 * 2 * 8 * 128 * 2
    assert float(eight_b[0][6]) == pytest.approx((weight_bytes + kv_bytes) / 4.8e9, rel=0.01)


def test_shared_tokens_are_read_once_for_as_many_rows_as_a_program_takes() -> None:
    from benchmarks.gpu_model import tokens_read

    assert tokens_read(1, 5000, 4096, 4) == 5000
    assert tokens_read(32, 5000, 4096, 4) == 32 * 904 + 2 * 4096
    assert tokens_read(33, 5000, 4096, 4) == 33 * 904 + 3 * 4096
    assert tokens_read(32, 5000, 511, 4) == 32 * 5000, "too little to be worth it"
    assert tokens_read(32, 5000, 4096, 64) == 32 * 5000, "too many queries a KV head"
