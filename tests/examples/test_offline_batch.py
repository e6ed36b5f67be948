"""`examples/offline_batch.py`, run as its first lines say."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_a_file_of_prompts_is_answered_line_by_line(tmp_path: Path) -> None:
    tasks = [{"id": 7, "prompt": "What does math.sqrt do?"}, {"prompt": "What does itertools.chain do?", "id": 8}]
    (tmp_path / "prompts.jsonl").write_text("\n\n".join(json.dumps(task) for task in tasks))
    files = [str(tmp_path / name) for name in ("prompts.jsonl", "answers.jsonl")]
    command = [sys.executable, "examples/offline_batch.py", *files]
    subprocess.run(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, check=True, timeout=300)
    answers = [json.loads(line) for line in (tmp_path / "answers.jsonl").read_text().splitlines()]
    assert [answer | task for answer, task in zip(answers, tasks, strict=True)] == answers
    assert [answer["finish_reason"] for answer in answers] == ["stop", "stop"]
    assert answers[0]["answer"] == "Return the square root of x."
    assert answers[1]["cached_tokens"] > 0, "both prompts begin with the same system message"
