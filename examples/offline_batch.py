"""Answer a file of prompts with a model in this process, without a server.

    python examples/offline_batch.py prompts.jsonl answers.jsonl [--model demo]

Each line of the input is an object with a prompt: {"id": 7, "prompt": "What does itertools.chain do?"}. The output
has these objects in the same order, each with `answer`, `finish_reason` and `cached_tokens`.
"""

from __future__ import annotations

import argparse
import json
from itertools import islice
from pathlib import Path

from engine import LLM, SamplingParams

SYSTEM = "You answer questions about Python's standard library in one sentence."
"""All prompts begin with it, so its KV is computed once and then found in the cache."""
PARAMS = SamplingParams(temperature=0, max_tokens=128)
BATCH = 1024
"""Answers are written after so many prompts, so that a long run can be followed and continued."""


def main() -> None:
    """Read the options and answer the file."""
    parser = argparse.ArgumentParser()
    parser.add_argument("prompts", type=Path)
    parser.add_argument("answers", type=Path)
    parser.add_argument("--model", default="demo", help="a directory, a Hugging Face hub id, or demo")
    options = parser.parse_args()

    llm = LLM(options.model)
    with options.prompts.open() as source, options.answers.open("w") as target:
        tasks = (json.loads(line) for line in source if line.strip())
        while batch := list(islice(tasks, BATCH)):
            target.writelines(json.dumps(answered) + "\n" for answered in answer(llm, batch))
            target.flush()
    llm.close()


def answer(llm: LLM, tasks: list[dict[str, object]]) -> list[dict[str, object]]:
    """Answer the tasks together: the engine decides how many of them run at a time."""
    conversations = [
        [{"role": "system", "content": SYSTEM}, {"role": "user", "content": str(task["prompt"])}] for task in tasks
    ]
    outputs = llm.chat(conversations, PARAMS, progress=True)
    return [
        {**task, "answer": out.text, "finish_reason": out.finish_reason, "cached_tokens": out.cached_tokens}
        for task, out in zip(tasks, outputs, strict=True)
    ]


if __name__ == "__main__":
    main()
