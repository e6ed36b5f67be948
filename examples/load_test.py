"""Load a server with streamed chats and draw how long their readers wait.

    python examples/load_test.py load.png [--url http://127.0.0.1:8000] [--users 8] [--requests 64]

Needs `pip install openai matplotlib` and a server: `raydix serve`. Each user asks, reads the answer to its end and
asks again. TTFT is the time from asking to the first token, ITL the time per token after it.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from pathlib import Path

import numpy as np
import openai
from matplotlib.figure import Figure

LIMIT_S = 600
"""The test fails when it takes longer."""
SUBJECTS = ("itertools.chain", "math.sqrt", "os.path.join", "functools.reduce", "shutil.copy")


def main() -> None:
    """Read the options, put the load on the server, print percentiles and draw both distributions."""
    parser = argparse.ArgumentParser()
    parser.add_argument("plot", type=Path)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--users", type=int, default=8, help="how many requests run at a time")
    parser.add_argument("--requests", type=int, default=64, help="how many requests there are in all")
    options = parser.parse_args()

    answers = asyncio.run(load(options.url, options.users, options.requests))
    figure = Figure(figsize=(9, 4), layout="constrained")
    for axes, name, seconds in zip(
        figure.subplots(1, 2), ("TTFT", "ITL"), zip(*answers, strict=True), strict=True
    ):
        milliseconds = 1000 * np.array(seconds)
        p50, p90, p99 = np.percentile(milliseconds, (50, 90, 99))
        print(f"{name} of {len(answers)} answers: p50 {p50:.1f} ms, p90 {p90:.1f} ms, p99 {p99:.1f} ms")
        axes.ecdf(milliseconds)
        axes.set(xlabel=f"{name} in ms", ylabel="share of answers", xlim=(0, None))
    figure.savefig(options.plot)


async def load(url: str, users: int, requests: int) -> list[tuple[float, float]]:
    """Return TTFT and ITL, in seconds, of each answer. Raises an ExceptionGroup when a request fails."""
    subjects = iter([SUBJECTS[number % len(SUBJECTS)] for number in range(requests)])
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        model = (await client.models.list()).data[0].id

        async def ask_again_and_again() -> list[tuple[float, float]]:
            return [await ask(client, model, f"What does {subject} do?") for subject in subjects]

        async with asyncio.timeout(LIMIT_S), asyncio.TaskGroup() as group:
            tasks = [group.create_task(ask_again_and_again()) for _ in range(users)]
    return [answer for task in tasks for answer in task.result()]


async def ask(client: openai.AsyncOpenAI, model: str, question: str) -> tuple[float, float]:
    """Read one answer and return its TTFT and ITL."""
    started, arrived, num_tokens = time.perf_counter(), [], 0
    stream = await client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": question}],
        max_completion_tokens=64,
        stream=True,
        stream_options={"include_usage": True},  # A chunk may hold several tokens, so the server's count is used.
    )
    async for chunk in stream:
        if any(choice.delta.content or choice.finish_reason for choice in chunk.choices):
            arrived.append(time.perf_counter())
        num_tokens = chunk.usage.completion_tokens if chunk.usage else num_tokens
    return arrived[0] - started, (arrived[-1] - arrived[0]) / max(1, num_tokens - 1)


if __name__ == "__main__":
    main()
