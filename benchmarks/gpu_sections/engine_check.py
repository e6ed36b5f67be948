"""The whole engine against a model of its own weights in float32 on the CPU, with attention in plain torch.

What the engine chose is handed to that model as one text, so one token rounded otherwise changes nothing after it:
each choice is judged by how much less likely it was than the best one there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_sections.drive import drive
from benchmarks.gpu_sections.messages import Measurement
from benchmarks.gpu_sections.random_model import attention_of, load_engine, random_decoder
from benchmarks.gpu_sections.workload import Workload
from cache import Namespace
from engine.attention.base import AttentionShape
from engine.attention.batch import AttentionBatch
from engine.attention.kv_pages import KVPages
from engine.attention.reference import ReferenceAttention
from engine.models.decoder import Decoder
from engine.program.engine import Engine
from engine.values.plan import Chunk
from engine.values.request import Request
from engine.values.sampling_params import SamplingParams

_CPU = torch.device("cpu")
_MOST_REGRET: Mapping[str, float] = {"auto": 0.3, "fp8": 0.6}
"""By how much the logit of a choice may be below the best one, where logits deviate by 1; by the type of KV."""
_NUM_REQUESTS, _NUM_TOKENS = 12, 24


def check_engine(
    raw: Mapping[str, Any],
    work: Workload,
    directory: Path,
    kv_dtypes: Sequence[str] = tuple(_MOST_REGRET),
    **settings: Any,
) -> Iterator[Measurement]:
    """Greedy answers to prompts of several lengths: computed, and again with the prompts cached."""
    for kv_dtype in kv_dtypes:
        engine = load_engine(raw, directory, **(settings | {"kv_dtype": kv_dtype}))
        yield from _check(engine, work)


def _check(engine: Engine, work: Workload) -> Iterator[Measurement]:
    lengths = [1 + at * (work.context // 2) // _NUM_REQUESTS for at in range(_NUM_REQUESTS)]
    prompts = [work.prompt(-at - 1, length) for at, length in enumerate(lengths)]
    oracle, most = Oracle(engine), _MOST_REGRET[engine.config.kv_dtype]
    kv = ", KV fp8" if engine.config.kv_dtype == "fp8" else ""
    for name in ("prompts computed", "prompts cached"):
        trace = drive(engine, prompts, [_NUM_TOKENS] * len(prompts))
        regret = max(oracle.regret(*pair) for pair in zip(prompts, trace.tokens, strict=True))
        yield Measurement(
            f"engine, {name}{kv}",
            by=attention_of(engine),
            passed=regret <= most,
            error=regret,
            note=f"worst choice {regret:.3f} below the best logit, at most {most}; "
            f"{sum(trace.cached)} prompt tokens cached",
        )


class Oracle:
    """The engine's model, its weights widened, on the CPU."""

    def __init__(self, engine: Any) -> None:
        config, device = engine.model, engine.runner.device
        is_wide = device.type == "cpu" or engine.config.dtype == "float32"
        dtype = torch.float32 if is_wide else torch.bfloat16
        source = random_decoder(Path(), config, dtype, device)
        self._decoder = Decoder(config).float().eval()
        self._decoder.load_state_dict({name: weight.float().cpu() for name, weight in source.state_dict().items()})
        self._config = config
        windows = config.windows
        self._shape = AttentionShape(config.num_heads, config.num_kv_heads, config.head_dim, 16, windows)

    @torch.inference_mode()
    def regret(self, prompt: list[int], answer: list[int]) -> float:
        """By how much the answer's worst token is below the best one at its place."""
        tokens = prompt + answer[:-1]
        num_pages, size = -(-len(tokens) // 16), (16, self._config.num_kv_heads, self._config.head_dim)
        pages = KVPages(self._config.num_layers, num_pages, *size, torch.float32, _CPU)
        sampling = SamplingParams(max_tokens=1)
        request = Request.make("r", tokens, sampling, arrival=0.0, seed=0, namespace=Namespace("check"))
        chunk = Chunk(request, 0, len(tokens), tokens, range(num_pages), samples=True)
        batch = AttentionBatch.from_chunks([chunk], 16, pages.null_page)
        step = ReferenceAttention(self._shape).prepare(batch, pages.null_page)
        logits = self._decoder.logits(self._decoder(torch.tensor(tokens), step, pages)[len(prompt) - 1 :])
        chosen = logits.gather(1, torch.tensor(answer)[:, None])[:, 0]
        return float((logits.amax(-1) - chosen).max())
