"""One process's share of the run: a model and its sections. What it finds goes out as it is found.

Each model has a process of its own: a kernel that fails leaves CUDA unusable, and one that hangs must be ended.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_sections.limits import Bytes, Limits, Rates
from benchmarks.gpu_sections.messages import PEERS, Inapplicable, Measurement, Teller
from benchmarks.gpu_sections.shapes import MIXTURES, MODELS, SMALL, Size
from benchmarks.gpu_sections.workload import EIGHT_BITS, FULL, MIXTURE, SEVERAL, TINY
from engine.settings.config import GPU_DEFAULTS, EngineConfig

_UNKNOWN = Rates(1.0, 1.0)
"""Stands for a machine's rates when measuring them failed: then no share is told."""
_ROOM = 1.15
"""Times its weights is what a model needs at least: KV, and the tensors of a step."""


class Child:
    """The sections that a process was asked for."""

    def __init__(self, asked: argparse.Namespace, directory: Path, teller: Teller) -> None:
        self._is_tiny: bool = asked.tiny
        self._device = torch.device("cpu" if asked.tiny else "cuda")
        self._work = TINY if asked.tiny else MIXTURE if asked.model in MIXTURES else FULL
        self._model: str = asked.model
        self._asked_settings: dict[str, Any] = json.loads(asked.settings)
        self._deadline: float = asked.deadline
        self._begun: float = asked.begun
        self._rates = Rates(**json.loads(asked.rates)) if asked.rates else None
        self._teller = teller
        self._directory = directory
        self._runs: Any = None

    def run(self, section: str) -> None:
        """Tell all that a section measures; shares of the machine's limits only where these are known."""
        for measurement in getattr(self, f"_{section}")():
            if self._rates is None:
                measurement = replace(measurement, limit_share=None, sheet_share=None)
            self._teller.measured(measurement)

    def _machine(self) -> Iterator[Measurement]:
        from benchmarks.gpu_sections.machine import facts, measured_rates

        if not self._is_tiny and not torch.cuda.is_available():
            raise RuntimeError("torch finds no CUDA device; --tiny tries this script on the CPU")
        self._teller.say("facts", facts(self._device))
        rates, lines = measured_rates(self._device, torch.float32 if self._is_tiny else torch.bfloat16)
        self._teller.say("rates", asdict(rates))
        yield from lines

    def _attention(self) -> Iterator[Measurement]:
        yield from self._kernel_checks().attention()

    def _operations(self) -> Iterator[Measurement]:
        yield from self._kernel_checks().operations()

    def _sampler(self) -> Iterator[Measurement]:
        yield from self._kernel_checks().sampler()

    def _experts(self) -> Iterator[Measurement]:
        from benchmarks.gpu_sections.experts import experts

        yield from experts(self._device, self._require_rates(), self._is_tiny)

    def _kernel_checks(self) -> Any:
        from benchmarks.gpu_sections.kernel_checks import KernelChecks

        return KernelChecks(self._device, self._is_tiny)

    def _prompts(self) -> Iterator[Measurement]:
        from benchmarks.gpu_sections import kernel_speed, prompt_speed

        sizes, prompts = (
            (kernel_speed.TINY, prompt_speed.TINY) if self._is_tiny else (kernel_speed.FULL, prompt_speed.FULL)
        )
        yield from prompt_speed.PromptSpeed(self._device, self._require_rates(), sizes).prompts(prompts)

    def _recurrent(self) -> Iterator[Measurement]:
        from benchmarks.gpu_sections.recurrent import Recurrent

        yield from Recurrent(self._device, self._require_rates(), is_tiny=self._is_tiny).all()

    def _proofs(self) -> Iterator[Measurement]:
        from benchmarks.gpu_sections.proofs import proofs

        yield from proofs("not rank")

    def _ranks(self) -> Iterator[Measurement]:
        from benchmarks.gpu_sections.proofs import proofs

        yield from proofs("rank")

    def _speed(self) -> Iterator[Measurement]:
        from benchmarks.gpu_sections.kernel_speed import FULL, TINY, KernelSpeed

        speed = KernelSpeed(self._device, self._require_rates(), TINY if self._is_tiny else FULL)
        for part in (speed.attention, speed.latent_attention, speed.operations, speed.sampler):
            yield from part()

    def _check(self) -> Iterator[Measurement]:
        yield from self._checked(SMALL["tiny" if self._is_tiny else "check"])

    def _check_mixture(self) -> Iterator[Measurement]:
        # In float32, because rounding may decide between two experts, which changes all that follows.
        raw = SMALL["tiny mixture" if self._is_tiny else "check mixture"]
        for line in self._checked(raw, kv_dtypes=["auto"], dtype="float32"):
            yield replace(line, what=f"{line.what}, mixture of experts")

    def _checked(self, raw: Mapping[str, Any], **more: Any) -> Iterator[Measurement]:
        from benchmarks.gpu_sections.engine_check import check_engine

        settings = self._settings() | {"kv_pages": 2048, "max_running": 16} | more
        yield from check_engine(raw, self._work, self._directory, **settings)

    def _transformers(self) -> Iterator[Measurement]:
        from benchmarks.gpu_sections.transformers_run import transformers_offline

        self._require_room()
        patience = max(10.0, self._deadline - time.time() - 10.0)
        yield from transformers_offline(
            self._model, self._raw, self._limits(), self._work, self._device, min(patience, 90.0)
        )

    def _vllm(self) -> Iterator[Measurement]:
        yield from self._peer("vllm")

    def _sglang(self) -> Iterator[Measurement]:
        yield from self._peer("sglang")

    def _peer(self, peer: str) -> Iterator[Measurement]:
        from benchmarks.gpu_sections.peers_run import peer_offline

        self._require_room()
        yield from peer_offline(peer, self._model, self._raw, self._limits(), self._work, self._directory)

    def _compiled(self) -> Iterator[Measurement]:
        from benchmarks.gpu_sections.compiled_run import compiled_decode

        self._require_room()
        yield from compiled_decode(self._model, self._raw, self._limits(), self._work, self._device)

    def _server(self) -> Iterator[Measurement]:
        from benchmarks.gpu_sections.server_run import FULL as ALL
        from benchmarks.gpu_sections.server_run import TINY as FEW
        from benchmarks.gpu_sections.server_run import server

        yield from server(FEW if self._is_tiny else ALL, self._model, self._device, self._directory)

    def _anatomy(self) -> Iterator[Measurement]:
        from benchmarks.gpu_sections.anatomy import anatomy

        yield from anatomy(self._model, self._engine_runs(), self._limits(), self._work, self._device)

    def _mixed(self) -> Iterator[Measurement]:
        for tokens in self._work.step_tokens:
            for line in self._new_runs(max_step_tokens=tokens).mixed():
                yield replace(line, what=f"{line.what}, steps of {tokens}")

    def _long(self) -> Iterator[Measurement]:
        work = self._work
        room = work.long + work.long_decoded + 64
        # All rows have the same context, whose KV cascade attention would read once for all of them.
        yield from self._new_runs(max_model_len=room, cascade_attention="off").long()

    def _host(self) -> Iterator[Measurement]:
        """In an engine whose KV pages hold one long prompt, and its host pages another."""
        length = self._work.long + 64
        size = Size.of(self._raw).kv_per_token * self._bytes().kv * length
        settings = {"kv_pages": -(-length // self._page_size), "host_kv_gib": size / 2**30, "host_kv_min_uses": 1}
        runs = self._new_runs(max_model_len=length, **settings)
        yield from runs.copies()
        yield from runs.host()

    def _decode(self) -> Iterator[Measurement]:
        yield from self._engine_runs().decode()

    def _prefill(self) -> Iterator[Measurement]:
        yield from self._engine_runs().prefill()

    def _offline(self) -> Iterator[Measurement]:
        yield from self._engine_runs().offline()

    def _prefix(self) -> Iterator[Measurement]:
        yield from self._engine_runs().prefix()

    def _start(self) -> Iterator[Measurement]:
        """A process's start until its engine is ready, with kernels that earlier ones compiled. A job alone."""
        from benchmarks.gpu_sections.random_model import load_engine

        self._require_room()
        load_engine(self._raw, self._directory, **self._settings())
        milliseconds = 1000 * (time.time() - self._begun)
        note = "from the process's start; weights are drawn, not read; at most 20 s on an H200"
        yield Measurement("start", self._model, ms=milliseconds, note=note)

    def _engine_runs(self) -> Any:
        if self._runs is None:
            self._runs = self._new_runs()
        return self._runs

    def _new_runs(self, **settings: Any) -> Any:
        from benchmarks.gpu_sections.engine_runs import Runs
        from benchmarks.gpu_sections.random_model import attention_of, load_engine

        self._require_room()
        engine = load_engine(self._raw, self._directory, **(self._settings() | settings))
        facts = {"attention": attention_of(engine)}
        self._teller.say("facts", facts if settings else facts | {"settings": self._described()})
        return Runs(self._model, engine, self._limits(), self._work)

    def _fp8_kv(self) -> Iterator[Measurement]:
        yield from self._decodes("KV fp8", self._bytes()._replace(kv=1), kv_dtype="fp8")

    def _fp8_weights(self) -> Iterator[Measurement]:
        yield from self._decodes("weights fp8", self._bytes()._replace(matrices=1), quantization="fp8")

    def _decodes(self, name: str, num_bytes: Bytes, **settings: str) -> Iterator[Measurement]:
        """Those of an engine with other numbers, and a prompt."""
        from benchmarks.gpu_sections.engine_runs import Runs
        from benchmarks.gpu_sections.random_model import load_engine

        self._require_room()
        engine = load_engine(self._raw, self._directory, **(self._settings() | settings))
        limits = Limits(Size.of(self._raw), self._require_rates(), num_bytes)
        runs = Runs(self._model, engine, limits, self._work if self._is_tiny else EIGHT_BITS)
        for part in (runs.decode, runs.prefill):
            for line in part():
                yield replace(line, what=f"{line.what}, {name}", aim=None)

    def _links(self) -> Iterator[Measurement]:
        from benchmarks.gpu_sections.several_gpus import links

        yield from links(self._device)

    def _second_gpu(self) -> Iterator[Measurement]:
        """The checks of an engine on another GPU than the first, which kernels must not take for granted."""
        from benchmarks.gpu_sections.several_gpus import require_several

        require_several(self._device)
        device = "cpu" if self._is_tiny else "cuda:1"
        for line in self._checked(SMALL["tiny" if self._is_tiny else "check"], device=device):
            yield replace(line, what=f"{line.what}, on {device}")

    def _tensor_ranks(self) -> Iterator[Measurement]:
        yield from self._on_ranks(self._raw, tensor_parallel_size=2)

    def _stages(self) -> Iterator[Measurement]:
        yield from self._on_ranks(self._raw, pipeline_parallel_size=2)

    def _context_ranks(self) -> Iterator[Measurement]:
        """With one KV head, which both ranks need, so that they divide its positions."""
        one_head = {**self._raw, "num_key_value_heads": 1}
        yield from self._on_ranks(one_head, tensor_parallel_size=2, context_parallel_size=2)

    def _expert_ranks(self) -> Iterator[Measurement]:
        raw = SMALL["tiny mixture"] if self._is_tiny else self._raw
        yield from self._on_ranks(raw, tensor_parallel_size=2, expert_parallel=True)

    def _on_ranks(self, raw: Mapping[str, Any], **sizes: Any) -> Iterator[Measurement]:
        from benchmarks.gpu_sections.several_gpus import on_ranks, require_several

        require_several(self._device)
        work = self._work if self._is_tiny else SEVERAL
        settings = self._settings() | {"threads": 1 if self._is_tiny else None}
        given = self._require_rates(), self._bytes(), work, self._directory
        yield from on_ranks(self._model, raw, settings, sizes, *given)

    def _settings(self) -> dict[str, Any]:
        """The defaults of servers on GPUs, but for the asked ones, and smaller ones where all is tiny."""
        settings = {"device": str(self._device), "max_model_len": self._work.max_model_len, **GPU_DEFAULTS}
        if self._is_tiny:
            settings |= {"max_running": 64, "max_step_tokens": self._work.max_step_tokens, "kv_pages": 1024}
        return settings | self._asked_settings

    @property
    def _page_size(self) -> int:
        return EngineConfig(model="", **self._asked_settings).page_size

    def _described(self) -> str:
        """The settings, in words."""
        given = "".join(f", {name} {value}" for name, value in self._asked_settings.items())
        return f"{'tiny' if self._is_tiny else 'defaults'}, max_step_stretch null{given}"

    @property
    def _raw(self) -> Mapping[str, Any]:
        return SMALL["tiny"] if self._is_tiny else {**MODELS, **MIXTURES}[self._model]

    def _require_room(self) -> None:
        """Raise Inapplicable when the model is too large, before anything of it is there."""
        if self._device.type == "cuda":
            weights, free = 2 * Size.of(self._raw).weights, torch.cuda.mem_get_info(self._device)[0]
            if weights * _ROOM > free:
                raise Inapplicable(f"its weights take {weights / 1e9:.1f} GB, {free / 1e9:.1f} GB are free")

    def _limits(self) -> Limits:
        return Limits(Size.of(self._raw), self._require_rates(), self._bytes())

    def _bytes(self) -> Bytes:
        return Bytes(4, 4, 4) if self._is_tiny else Bytes()

    def _require_rates(self) -> Rates:
        return self._rates or _UNKNOWN


def main() -> int:
    """Sections, one after the other, while there is time. The first that fails ends the process."""
    asked, teller = _asked(), Teller()
    logging.basicConfig(level=logging.WARNING)
    logging.getLogger("engine").setLevel(logging.INFO)  # what was chosen, and why
    with tempfile.TemporaryDirectory(prefix="raydix-gpu-") as directory:
        child = Child(asked, Path(directory), teller)
        for section, least in (part.split(":") for part in asked.sections):
            left = asked.deadline - time.time()
            if left < float(least):
                reason = f"it should have {least} s, {max(left, 0):.0f} s are left"
                teller.say("skipped", {"section": section, "reason": reason})
            elif not _is_done(child, section, teller):
                return 1
    return 0


def _is_done(child: Child, section: str, teller: Teller) -> bool:
    """Run a section; whether the process can go on."""
    teller.say("begin", section)
    try:
        child.run(section)
    except Inapplicable as error:
        teller.say("skipped", {"section": section, "reason": str(error)})
    except Exception as error:
        traceback.print_exc()
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:500]
        teller.say("skipped" if section in PEERS else "failed", {"section": section, "reason": reason})
        return False
    else:
        teller.say("end", section)
    return True


def _asked() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("sections", nargs="+")
    parser.add_argument("--model", default="")
    parser.add_argument("--settings", default="{}")
    parser.add_argument("--deadline", type=float, required=True)
    parser.add_argument("--begun", type=float, required=True, help="when this process was begun")
    parser.add_argument("--rates", default="")
    parser.add_argument("--tiny", action="store_true")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
