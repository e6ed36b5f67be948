"""Compare Raydix with llama.cpp on the same GGUF file, in one run: same token ids, same threads.

    benchmarks/peers/install.sh llamacpp
    python -m benchmarks.compare_gguf FILE [--precision float32] [--rounds 3]

Both keep the file's blocks in memory. llama.cpp rounds activations to eight bits where it multiplies with blocks;
Raydix does not: they have the type that --precision names, as KV has. Engines alternate job by job;
`benchmarks.compare` says how they are driven, and what the ratio and its range are.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import tempfile
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.peers import summary
from benchmarks.peers.process import RAYDIX, REPOSITORY, Peer
from benchmarks.peers.protocol import Job, Settings
from benchmarks.peers.summary import Sample
from engine.model_config.config import ModelConfig

PROMPTS, PROMPT = 4, 1024
STREAMS, ANSWER, BEGIN = 8, 96, 32
ENGINES = RAYDIX, "llamacpp"


def jobs(vocabulary: int, seed: int) -> dict[str, Job]:
    """Return the workloads by name. Each seed gives other prompts, so that no cache holds them."""
    draw = random.Random(seed)

    def prompts(count: int, length: int) -> list[list[int]]:
        return [[draw.randrange(1000, vocabulary) for _ in range(length)] for _ in range(count)]

    return {
        "prefill": Job(prompts(PROMPTS, PROMPT), [1] * PROMPTS),
        "streams": Job(prompts(STREAMS, BEGIN), [ANSWER] * STREAMS),
        "single": Job(prompts(1, BEGIN), [ANSWER]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, help="a model in GGUF")
    parser.add_argument("--precision", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--home", type=Path, default=REPOSITORY / ".peers", help="where llama.cpp is installed")
    parser.add_argument("--out", type=Path, default=REPOSITORY / "benchmarks" / "results" / "compare_gguf.json")
    options = parser.parse_args()
    vocabulary = ModelConfig.from_directory(options.file).vocab_size
    room = 2 * (PROMPTS * PROMPT + STREAMS * (BEGIN + ANSWER))
    settings = Settings(
        str(options.file.resolve()), options.precision, options.threads, STREAMS, PROMPT + ANSWER, room
    )
    logs = Path(tempfile.mkdtemp(prefix="raydix-compare-gguf-"))
    samples: list[Sample] = []
    tokens: list[dict[str, float]] = []
    with ExitStack() as stack:
        peers = []
        for name in ENGINES:
            peers.append(Peer(name, options.home, settings, logs / f"{name}.log", 600.0))
            stack.callback(peers[-1].stop)
        for number in range(-1, options.rounds):  # the first warms up
            for workload, job in jobs(vocabulary, number + 1).items():
                found = {}
                for peer in peers if number % 2 else peers[::-1]:
                    answer = peer.run(job)
                    found[peer.name] = answer.tokens
                    if number >= 0:
                        speed = summary.speed(workload, job, answer.seconds)
                        samples.append(Sample(peer.name, workload, number, answer.seconds, speed))
                        print(f"round {number + 1}: {workload:8s} {peer.name:8s} {speed:9.1f}", flush=True)
                tokens.append(summary.agreement(found))
    result: dict[str, Any] = {
        "machine": {"machine": platform.machine(), "cpus": os.cpu_count(), "python": platform.python_version()},
        "file": options.file.name,
        "sizes": {"prompts": PROMPTS, "prompt": PROMPT, "streams": STREAMS, "answer": ANSWER, "begin": BEGIN},
        "versions": {peer.name: peer.version for peer in peers},
        "settings": {**asdict(settings), "model": options.file.name},
        "workloads": summary.as_json(samples),
        "first_token_agreement": sum(each["llamacpp"] for each in tokens) / len(tokens),
    }
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    for workload, row in result["workloads"].items():
        print(workload, row["engines"], row["ratio"])


if __name__ == "__main__":
    main()
