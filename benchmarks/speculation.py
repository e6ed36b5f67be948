"""Measure speculation: tokens per step and time, compared with plain decoding of the same requests in one run.

    python -m benchmarks.speculation [--requests 1 8] [--json benchmarks/results/speculation.json]

The embedded model on a CPU, one thread. Three workloads, N requests at a time:

    repeated   a question of an earlier turn is asked again, greedily: the conversation contains the answer
    sampled    the same at temperature 0.7, seeded
    fresh      the question for the first time: nothing to look up

Settings: "plain"; "ngram" as it ships; "ngram always", without measuring whether it pays; "itself always", the
model as its own draft model, which shows the gain of a perfect draft model but not its cost. Every setting must
give the tokens of "plain". Engines take turns, several rounds; times are the best round's, since other work on the
machine only adds: to processor time, which is given too, much less than to the clock's.

Tokens per step are those that a request gets in a step in which it decodes: 1 without speculation.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import time
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from engine import LLM, SamplingParams, Speculation
from engine.program.llm import ChatTurn, RequestOutput
from engine.scheduling.stats import StepStats
from training.corpus import load_facts

SETTINGS: dict[str, Speculation | None] = {
    "plain": None,
    "ngram": Speculation("ngram"),
    "ngram always": Speculation("ngram", adaptive=False),
    "itself always": Speculation("draft_model", model="demo", adaptive=False),
}
GREEDY = SamplingParams(temperature=0, max_tokens=160)
SAMPLED = SamplingParams(temperature=0.7, seed=5, max_tokens=160)
NUM_QUESTIONS = 8
ROUNDS = 3


@dataclass(slots=True)
class Measured:
    """One setting on one workload."""

    seconds: float = math.inf
    """Seconds of wall-clock time."""
    cpu_seconds: float = math.inf
    """Seconds of this process's processor time."""
    tokens: int = 0
    decode_rows: int = 0
    drafts: int = 0
    accepted: int = 0

    def report(self, plain: Measured) -> dict[str, float]:
        return {
            "tokens_per_step": round(1 + self.accepted / self.decode_rows, 2),
            "acceptance": round(self.accepted / self.drafts, 3) if self.drafts else 0.0,
            "tokens_per_s": round(self.tokens / self.seconds, 1),
            "speedup": round(plain.seconds / self.seconds, 2),
            "cpu_ms_per_token": round(1e3 * self.cpu_seconds / self.tokens, 2),
            "cpu_speedup": round(plain.cpu_seconds / self.cpu_seconds, 2),
        }


def questions() -> list[ChatTurn]:
    """Return the questions with the longest answers."""
    facts = sorted(load_facts(), key=lambda fact: -len(fact.sentence))
    names = [f"{fact.module}.{fact.name}" for fact in facts if fact.module != "builtins"]
    return [{"role": "user", "content": f"What does {name} do?"} for name in names[:NUM_QUESTIONS]]


def conversations(llm: LLM) -> dict[str, tuple[list[list[ChatTurn]], SamplingParams]]:
    """Return the workloads: conversations, and how their answers are sampled."""
    asked = [[question] for question in questions()]
    answers = llm.chat(asked, GREEDY)
    again = [
        [*turn, {"role": "assistant", "content": answer.text}, *turn]
        for turn, answer in zip(asked, answers, strict=True)
    ]
    return {"repeated": (again, GREEDY), "sampled": (again, SAMPLED), "fresh": (asked, GREEDY)}


def run(
    llm: LLM, chats: list[list[ChatTurn]], params: SamplingParams, num_requests: int, measured: Measured
) -> list[list[int]]:
    """Answer all, `num_requests` at a time, with an empty cache; returns the tokens."""
    steps: list[StepStats] = []
    llm.engine.loop.on_step = steps.append
    llm.engine.cache.reset()
    outputs: list[RequestOutput] = []
    started, cpu_started = time.perf_counter(), time.process_time()
    for first in range(0, len(chats), num_requests):
        outputs += llm.chat(chats[first : first + num_requests], params)
    measured.seconds = min(measured.seconds, time.perf_counter() - started)
    measured.cpu_seconds = min(measured.cpu_seconds, time.process_time() - cpu_started)
    measured.tokens += sum(len(output.token_ids) for output in outputs)
    measured.decode_rows += sum(step.num_decode_tokens for step in steps)
    measured.drafts += sum(step.num_draft_tokens for step in steps)
    measured.accepted += sum(step.num_accepted_tokens for step in steps)
    return [output.token_ids for output in outputs]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 8], help="requests at a time")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    llms = {
        name: LLM("demo", kv_pages=2000, threads=1, speculation=settings) for name, settings in SETTINGS.items()
    }
    workloads = conversations(llms["plain"])
    report: dict[str, dict[str, dict[str, float]]] = {}
    for workload, (chats, params) in workloads.items():
        for num_requests in options.requests:
            found = {name: Measured() for name in llms}
            for _ in range(options.rounds):
                tokens = {name: run(llm, chats, params, num_requests, found[name]) for name, llm in llms.items()}
                assert all(one == tokens["plain"] for one in tokens.values()), "speculation changed tokens"
            for measured in found.values():
                measured.tokens //= options.rounds
            report[f"{workload}, {num_requests} at a time"] = {
                name: measured.report(found["plain"]) for name, measured in found.items()
            }
    _show(report)
    if options.json:
        machine = {"machine": platform.machine(), "cpus": os.cpu_count(), "python": platform.python_version()}
        options.json.write_text(json.dumps({"machine": machine, "results": report}, indent=2) + "\n")


def _show(report: dict[str, dict[str, dict[str, float]]]) -> None:
    table = Table(
        "workload", "setting", "tokens per step", "acceptance", "tokens/s", "speed-up", "CPU ms/token", "by CPU"
    )
    for workload, settings in report.items():
        for name, row in settings.items():
            table.add_row(workload, name, *(f"{value:g}" for value in row.values()))
        table.add_section()
    Console().print(table)


if __name__ == "__main__":
    main()
