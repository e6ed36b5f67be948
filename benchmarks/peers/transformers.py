"""transformers' continuous batching (`generate_batch`'s manager), in this process."""

from __future__ import annotations

import math
from importlib.metadata import version
from typing import Any

from benchmarks.peers.protocol import Engine, Job, Settings, serve

_PAGE = 256  # as it ships


class Transformers:
    """One manager for all jobs: paged SDPA attention, blocks shared between prompts that begin alike."""

    def __init__(self, settings: Settings) -> None:
        import torch
        from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig

        torch.set_num_threads(settings.threads)
        self.version = version("transformers")
        model = AutoModelForCausalLM.from_pretrained(
            settings.model, dtype=getattr(torch, settings.precision), attn_implementation="sdpa"
        )
        # No end of text, so that every answer has its full length.
        greedy = GenerationConfig(
            do_sample=False, eos_token_id=-1, pad_token_id=0, max_new_tokens=settings.max_len
        )
        batching = ContinuousBatchingConfig(
            page_size=_PAGE,
            num_blocks=math.ceil(settings.kv_tokens / _PAGE) + settings.max_requests,
            max_batch_tokens=2048,
        )
        self._manager: Any = model.init_continuous_batching(
            generation_config=greedy, continuous_batching_config=batching
        )
        self._manager.start()

    def generate(self, job: Job) -> list[list[int]]:
        ids = [
            self._manager.add_request(prompt, max_new_tokens=count)
            for prompt, count in zip(job.prompts, job.max_tokens, strict=True)
        ]
        answers: dict[str, list[int]] = {}
        while len(answers) < len(ids):
            result = self._manager.get_result(timeout=1)
            if result is None and not self._manager.is_running():
                raise RuntimeError("transformers' generation thread ended")
            if result is not None and result.is_finished():
                answers[result.request_id] = list(result.generated_tokens)
        return [answers[request_id] for request_id in ids]


def load(settings: Settings) -> Engine:
    return Transformers(settings)


if __name__ == "__main__":
    serve(load)
