"""Input files, and an API that answers them in a random order."""

from __future__ import annotations

import asyncio
import json
import random
from pathlib import Path
from typing import Any

from deployments.batch.runner import Reply

URL = "/v1/completions"


def request_line(custom_id: str, **body: Any) -> str:
    return json.dumps(
        {"custom_id": custom_id, "method": "POST", "url": URL, "body": {"prompt": custom_id, **body}}
    )


def write_input(path: Path, *lines: str) -> Path:
    path.write_text("".join(f"{line}\n" for line in lines))
    return path


def read_output(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


class Shuffling:
    """Answers with the request's prompt, later ones often first; those in `failing` get a 400. `x` is left out."""

    def __init__(self, seed: int = 0, failing: frozenset[str] = frozenset()) -> None:
        self._random, self.failing = random.Random(seed), failing
        self.bodies: list[dict[str, Any]] = []

    @property
    def prompts(self) -> list[str]:
        return [body["prompt"] for body in self.bodies]

    async def post(self, url: str, body: bytes) -> Reply:
        asked = json.loads(body)
        self.bodies.append(asked)
        for _ in range(self._random.randrange(20)):
            await asyncio.sleep(0)
        if asked["prompt"] in self.failing:
            return Reply(400, json.dumps({"error": {"message": "bad"}}).encode(), "req-bad")
        text = json.dumps({"text": asked["prompt"]}).encode()
        return Reply(200, text, f"req-{asked['prompt']}", ignored_fields="x" if "x" in asked else "")
