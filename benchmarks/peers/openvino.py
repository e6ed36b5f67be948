"""OpenVINO GenAI's ContinuousBatchingPipeline, in this process."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

from benchmarks.peers.protocol import Engine, Job, Settings, serve


def converted(model: str) -> Path:
    """The checkpoint in OpenVINO's format, beside it; made on the first call by the export of optimum-intel."""
    made = Path(f"{model}.openvino")
    if not made.is_dir():
        tool = Path(sys.executable).with_name("optimum-cli")
        task = ["--task", "text-generation-with-past", "--weight-format", "fp16"]
        unfinished = made.with_suffix(".unfinished")
        subprocess.run([tool, "export", "openvino", "--model", model, *task, unfinished], check=True)
        unfinished.rename(made)
    return made


class OpenVINO:
    """As it ships, with prefix caching and a batch as large as is asked; KV as precise as the rest, not 8 bits."""

    def __init__(self, settings: Settings) -> None:
        import openvino_genai as genai

        directory = converted(settings.model)
        short = {"bfloat16": "bf16", "float32": "f32"}[settings.precision]
        scheduler = genai.SchedulerConfig()
        scheduler.enable_prefix_caching = True
        scheduler.max_num_seqs = settings.max_requests
        scheduler.max_num_batched_tokens = 2048
        scheduler.num_kv_blocks = (
            settings.kv_tokens // 32 + settings.max_requests
        )  # its blocks on CPUs have 32 tokens
        hints = {"INFERENCE_PRECISION_HINT": short, "KV_CACHE_PRECISION": short}
        hints |= {"INFERENCE_NUM_THREADS": str(settings.threads)}
        self.version = version("openvino-genai")
        self._pipeline = genai.ContinuousBatchingPipeline(directory, scheduler, "CPU", hints)

    def generate(self, job: Job) -> list[list[int]]:
        import numpy as np
        import openvino as ov
        import openvino_genai as genai

        handles = []
        for number, (prompt, count) in enumerate(zip(job.prompts, job.max_tokens, strict=True)):
            greedy = genai.GenerationConfig(max_new_tokens=count, ignore_eos=True, do_sample=False)
            ids = ov.Tensor(np.array([prompt], dtype=np.int64))
            handles.append(self._pipeline.add_request(number, ids, greedy))
        while self._pipeline.has_non_finished_requests():
            self._pipeline.step()
        return [list(handle.read_all()[0].generated_ids) for handle in handles]


def load(settings: Settings) -> Engine:
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    return OpenVINO(settings)


if __name__ == "__main__":
    serve(load)
