"""Raydix through `LLM`, in this process."""

from __future__ import annotations

import math
from importlib.metadata import version

from benchmarks.peers.protocol import Engine, Job, Settings, serve


class Raydix:
    """Everything as it ships but precision, threads and room for KV."""

    def __init__(self, settings: Settings) -> None:
        from engine import LLM
        from engine.settings.config import EngineConfig

        self.version = version("raydix")
        pages = (
            math.ceil(settings.kv_tokens / EngineConfig(model=settings.model).page_size) + settings.max_requests
        )
        self._llm = LLM(
            settings.model,
            device=settings.device,
            dtype=settings.precision,
            threads=settings.threads,
            kv_pages=pages,
        )

    def generate(self, job: Job) -> list[list[int]]:
        from engine import SamplingParams

        params = [SamplingParams(temperature=0, max_tokens=count, ignore_eos=True) for count in job.max_tokens]
        return [output.token_ids for output in self._llm.generate(job.prompts, params, progress=False)]


def load(settings: Settings) -> Engine:
    return Raydix(settings)


if __name__ == "__main__":
    serve(load)
