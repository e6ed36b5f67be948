"""The offline workload in vLLM and SGLang, where they are installed: the same shape, with dummy weights."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from benchmarks.gpu_sections.limits import Limits
from benchmarks.gpu_sections.messages import Measurement
from benchmarks.gpu_sections.workload import Offline, Workload

_TEMPERATURE = 0.6
Generate = Callable[[Offline], Sequence[int]]
"""Generates all answers, and returns their numbers of tokens."""


def peer_offline(
    peer: str, model: str, raw: Mapping[str, Any], limits: Limits, work: Workload, directory: Path
) -> Iterator[Measurement]:
    """Output tokens over all the time it takes, after a first run of the same requests, each of a few tokens.

    Raises ImportError where the peer does not import, and whatever it raises.
    """
    (directory / "config.json").write_text(json.dumps(dict(raw)))
    generate = _STARTS[peer](import_module(peer), directory, work)
    offline = work.offline()
    generate(Offline(offline.prompts, [4] * len(offline.prompts)))
    began = time.perf_counter()
    counts = generate(offline)
    seconds = time.perf_counter() - began
    if list(counts) != offline.outputs:
        short = sum(count != wanted for count, wanted in zip(counts, offline.outputs, strict=False))
        raise RuntimeError(f"{short} of its {len(counts)} answers have another length than was asked for")
    total, lengths = sum(counts), [len(prompt) for prompt in offline.prompts]
    shares = limits.shares(partial(Limits.offline, prompts=lengths, outputs=offline.outputs), seconds)
    what = f"offline, {len(offline.outputs)} requests"
    note = f"{total} output tokens, version {import_module(peer).__version__}"
    yield Measurement(what, model, peer, total / seconds, 1000 * seconds, **shares, note=note)


def _start_vllm(vllm: Any, directory: Path, work: Workload) -> Generate:
    engine = vllm.LLM(
        model=str(directory),
        load_format="dummy",
        skip_tokenizer_init=True,
        max_model_len=work.max_model_len,
        max_num_seqs=work.requests,
    )

    def generate(offline: Offline) -> Sequence[int]:
        asked = [
            vllm.SamplingParams(temperature=_TEMPERATURE, max_tokens=length, ignore_eos=True, detokenize=False)
            for length in offline.outputs
        ]
        prompts = [{"prompt_token_ids": prompt} for prompt in offline.prompts]
        answers = engine.generate(prompts, asked, use_tqdm=False)
        return [len(answer.outputs[0].token_ids) for answer in answers]

    return generate


def _start_sglang(sglang: Any, directory: Path, work: Workload) -> Generate:
    engine = sglang.Engine(
        model_path=str(directory),
        load_format="dummy",
        skip_tokenizer_init=True,
        context_length=work.max_model_len,
        max_running_requests=work.requests,
        random_seed=0,
    )

    def generate(offline: Offline) -> Sequence[int]:
        asked = [
            {"temperature": _TEMPERATURE, "max_new_tokens": length, "ignore_eos": True}
            for length in offline.outputs
        ]
        answers = engine.generate(input_ids=offline.prompts, sampling_params=asked)
        return [int(answer["meta_info"]["completion_tokens"]) for answer in answers]

    return generate


_STARTS: Mapping[str, Callable[[Any, Path, Workload], Generate]] = {"vllm": _start_vllm, "sglang": _start_sglang}
