"""Measure what host memory, files and other replicas do for prefixes that the device has no room for.

    python -m benchmarks.host_tier [--rounds 3] [--json benchmarks/results/host_tier.json]

Two measurements, each with the tokens of both sides compared:

- The time to the first token of a prompt of 4,096 cached tokens and one more, with random weights of the shape of
  Qwen3-0.6B: with an empty cache, with the prefix on the device, with the prefix in host memory, and in engines
  that have just started, with the prefix in files that the system has dropped from its memory, and on the device
  of an engine in another process, from which it is fetched as replicas do, over ZeroMQ and by NIXL.
- Answers per second of the embedded model to questions about one of many texts, drawn at random, which together
  take four times the device's KV pages: with and without host memory, in turns.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks import this_machine
from benchmarks.lending_engine import Transport, exchange_of, lending
from benchmarks.peers.models import make_model
from engine.program.engine import Engine
from engine.settings.config import EngineConfig
from engine.settings.kv_tier import KVTier
from engine.values.request import KVSource
from engine.values.sampling_params import SamplingParams

PREFIX_TOKENS = 4096
PAGE_SIZE = 16
NUM_TEXTS, TEXT_TOKENS = 32, 480
QUESTION_TOKENS, ANSWER_TOKENS = 24, 8
OVERCOMMITTED = 4
AT_ONCE = 4
HOST_GIB = 1.0


def config_for(model: str, kv_pages: int, host_gib: float, **options: Any) -> EngineConfig:
    """Return the settings of an engine on this machine's processors."""
    return EngineConfig(
        model=model,
        device="cpu",
        page_size=PAGE_SIZE,
        kv_pages=kv_pages,
        host_kv_gib=host_gib,
        host_kv_min_uses=1,
        **options,
    )


def engine_for(model: str, kv_pages: int, host_gib: float, **options: Any) -> Engine:
    """Return an engine on this machine's processors."""
    return Engine.from_config(config_for(model, kv_pages, host_gib, **options))


# --- one prefix --------------------------------------------------------------------------------------------


def first_token(engine: Engine, prompt: list[int], source: KVSource | None = None) -> tuple[float, int, int]:
    """Return the seconds to a prompt's first token, the tokens that were not computed for it, and the token."""
    sampling = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
    request = engine.new_request("asked", prompt, sampling, source=source)
    began = time.perf_counter()
    engine.loop.submit(request)
    token, cached = -1, 0
    while engine.loop.has_work:
        for event in engine.loop.step():
            token, cached = (event.token_ids or [token])[-1], event.num_cached or cached
    return time.perf_counter() - began, cached, token


def one_prefix(rounds: int) -> dict[str, Any]:
    """Return median seconds to the first token, by where the prefix was."""
    num_pages = PREFIX_TOKENS // PAGE_SIZE + 1  # none is left of one prompt when another has been computed
    with tempfile.TemporaryDirectory() as directory:
        model = str(make_model("qwen3-0.6b", Path(directory)))
        files = Path(directory) / "kv"
        files.mkdir()
        options: dict[str, Any] = {
            "dtype": "bfloat16",
            "max_model_len": PREFIX_TOKENS + 64,
            "kv_tier": KVTier(str(files)),
        }
        engine = engine_for(model, num_pages, HOST_GIB, **options)
        draw = random.Random(1)
        seconds: dict[str, list[float]] = {
            "computed": [],
            "device": [],
            "host": [],
            "file": [],
            "peer": [],
            "peer_nixl": [],
        }
        expected: list[tuple[list[int], int]] = []
        for _ in range(rounds):
            prompt, other = (draw.choices(range(300, 100_000), k=PREFIX_TOKENS + 1) for _ in range(2))
            found: set[int] = set()
            for where in ("computed", "device"):
                elapsed, cached, token = first_token(engine, prompt)
                assert cached == (0 if where == "computed" else PREFIX_TOKENS)
                seconds[where].append(elapsed)
                found.add(token)
            first_token(engine, other)
            elapsed, cached, token = first_token(engine, prompt)
            assert cached == PREFIX_TOKENS, f"{cached} tokens came from host memory"
            seconds["host"].append(elapsed)
            assert found == {token}, "the tokens differ"
            expected.append((prompt, token))
        finish_writing(engine)
        engine.close()
        engine = engine_for(model, num_pages, HOST_GIB, **options)
        drop_from_memory(files)
        for prompt, token in expected:
            elapsed, cached, again = first_token(engine, prompt)
            assert cached == PREFIX_TOKENS, f"{cached} tokens came from files"
            assert again == token, "the tokens differ"
            seconds["file"].append(elapsed)
        engine.close()
        del options["kv_tier"]
        fetched(model, num_pages, options, expected, "zmq", seconds["peer"])
        fetched(model, num_pages, options, expected, "nixl", seconds["peer_nixl"])
    return {"tokens": PREFIX_TOKENS, "seconds": {name: statistics.median(each) for name, each in seconds.items()}}


def fetched(
    model: str,
    num_pages: int,
    options: dict[str, Any],
    expected: list[tuple[list[int], int]],
    transport: Transport,
    seconds: list[float],
) -> None:
    """Measure prompts whose KV lies in another process, in an engine that is warm and has none of it."""
    prompts = [prompt for prompt, _ in expected]
    source = config_for(model, num_pages * len(prompts), HOST_GIB, **options)
    with lending(source, prompts, transport) as address:
        engine = engine_for(model, num_pages, HOST_GIB, **options)
        exchange = exchange_of(engine, transport)
        first_token(engine, prompts[0][::-1])
        for prompt, token in expected:
            elapsed, cached, again = first_token(engine, prompt, KVSource(address, PREFIX_TOKENS))
            assert cached == PREFIX_TOKENS, f"{cached} tokens came from the other engine"
            assert again == token, "the tokens differ"
            seconds.append(elapsed)
        engine.close()
        exchange.close()


def finish_writing(engine: Engine) -> None:
    """Wait until all that waits to be written is in files."""
    saved, num_quiet = -1, 0
    while num_quiet < 20:
        time.sleep(0.1)
        engine.scheduler.take_in_transfers()
        now = engine.runner.lower_tier.totals().saved
        saved, num_quiet = now, num_quiet + 1 if now == saved else 0


def drop_from_memory(directory: Path) -> None:
    """Have the system write files to the disk and forget them, so that they are read from there."""
    for path in directory.glob("*/*.kv"):
        with open(path, "rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


# --- more texts than the device has pages for --------------------------------------------------------------


def questions(count: int, vocab_size: int, seed: int) -> list[list[int]]:
    """Return prompts, each one of the texts and a question of its own."""
    draw = random.Random(0)
    texts = [draw.choices(range(vocab_size), k=TEXT_TOKENS) for _ in range(NUM_TEXTS)]
    draw = random.Random(seed)
    return [[*draw.choice(texts), *draw.choices(range(vocab_size), k=QUESTION_TOKENS)] for _ in range(count)]


def answer(engine: Engine, prompts: list[list[int]]) -> tuple[float, list[list[int]]]:
    """Answer the prompts, some at once; return the seconds and the tokens of each."""
    sampling = SamplingParams(max_tokens=ANSWER_TOKENS, temperature=0.0, ignore_eos=True)
    answers: list[list[int]] = [[] for _ in prompts]
    waiting, num_open = list(enumerate(prompts))[::-1], 0
    began = time.perf_counter()
    while waiting or num_open:
        while waiting and num_open < AT_ONCE:
            number, prompt = waiting.pop()
            engine.loop.submit(engine.new_request(str(number), prompt, sampling))
            num_open += 1
        for event in engine.loop.step():
            answers[int(event.request_id)] += event.token_ids
            num_open -= event.finish_reason is not None
    return time.perf_counter() - began, answers


def many_texts(rounds: int, count: int) -> dict[str, Any]:
    """Return median answers per second, and what was found where, without and with host memory."""
    num_pages = NUM_TEXTS * TEXT_TOKENS // PAGE_SIZE // OVERCOMMITTED
    engines = {name: engine_for("demo", num_pages, gib) for name, gib in (("without", 0.0), ("with", HOST_GIB))}
    rates: dict[str, list[float]] = {name: [] for name in engines}
    for seed in range(rounds + 1):
        found = []
        for name, engine in engines.items():
            seconds, answers = answer(engine, questions(count, engine.model.vocab_size, seed))
            found.append(answers)
            if seed:  # the first round warms up
                rates[name].append(count / seconds)
        assert found[0] == found[1], "the tokens differ"
    stats = {name: engine.loop.load().cache for name, engine in engines.items()}
    for engine in engines.values():
        engine.close()
    return {
        "texts": NUM_TEXTS,
        "text_tokens": TEXT_TOKENS,
        "kv_pages": num_pages,
        "overcommitted": OVERCOMMITTED,
        "requests_per_s": {name: statistics.median(each) for name, each in rates.items()},
        "device_hit_rate": {name: each.hit_tokens / each.query_tokens for name, each in stats.items()},
        "host_hit_rate": {name: each.host_hit_tokens / each.query_tokens for name, each in stats.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=300, help="questions in each round (%(default)s)")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    result = {"machine": this_machine.described(), "one_prefix": one_prefix(options.rounds)}
    result["many_texts"] = many_texts(options.rounds, options.requests)
    text = json.dumps(result, indent=1)
    print(text)
    if options.json:
        options.json.write_text(text + "\n")


if __name__ == "__main__":
    main()
