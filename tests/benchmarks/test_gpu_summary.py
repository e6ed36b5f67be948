"""What the GPU script prints, how it times kernels, and what it asks of those that others have made."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.gpu_sections import peers_run, timing
from benchmarks.gpu_sections.limits import Bytes, Limits, Rates
from benchmarks.gpu_sections.messages import Measurement
from benchmarks.gpu_sections.report import Report
from benchmarks.gpu_sections.shapes import SMALL, Size
from benchmarks.gpu_sections.workload import TINY, Offline

GPU = torch.device("cuda", 0)


def test_a_summary_fits_and_lists_what_is_wrong_first() -> None:
    report = Report(Path("somewhere/gpu_x"), {}, {"name": "NVIDIA H200"}, {"bandwidth": 4.3e12, "matmul": 7.9e14})
    for model in "abc":
        for rows in range(30):
            report.measurements.append(
                Measurement(f"decode, {rows} rows", model, tokens_per_s=9.0, ms=1.0, aim=0.7)
            )
            report.measurements.append(Measurement(f"anatomy, {rows} rows", model, ms=0.5, note="z" * 300))
    for kernel in range(200):
        report.measurements.append(Measurement(f"attention {kernel}", by="triton", ms=1.0, note="n" * 100))
    report.measurements.append(Measurement("attention, decode", by="triton", passed=False, note="error 7"))
    report.failed["a offline"] = "it broke"
    text = report.summary()
    assert len(report.table()) > 20_000 and len(text) <= 10_000
    lines = text.splitlines()
    assert lines[2:5] == [
        "NOT all that ran is right",
        "FAILED a offline: it broke",
        "WRONG attention, decode by triton: error 7",
    ]
    assert lines[-1].endswith("lines more and everything: somewhere/gpu_x.txt, somewhere/gpu_x.json")


def test_a_kernel_is_shown_next_to_the_best_of_others() -> None:
    report = Report(Path("gpu_x"), {})
    for by, ms in (("triton", 2.0), ("flash_attn", 1.5), ("reference", 9.0)):
        report.measurements.append(Measurement("attention, 1 x 1", by=by, ms=ms, limit_share=0.5))
    assert (
        "attention, 1 x 1 (triton), 2.0000 ms, 50.0% of the measured limit; flash_attn 1.5000 ms"
        in report.summary()
    )
    assert "bounds: not measured" in report.summary()


def test_calls_are_recorded_in_turn_and_only_replays_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time is counted by what the device would do: a replay takes one second for each recorded call."""
    did: list[str] = []
    clock = 0.0

    class Graph:
        def replay(self) -> None:
            nonlocal clock
            clock += did.count("recorded")

    class Event:
        def __init__(self, *, enable_timing: bool) -> None:
            self.at = 0.0

        def record(self) -> None:
            self.at = clock

        def synchronize(self) -> None:
            pass

        def elapsed_time(self, later: Event) -> float:
            return 1000 * (later.at - self.at)

    class Recording:
        def __init__(self, graph: Graph) -> None:
            pass

        def __enter__(self) -> None:
            did.append("record")

        def __exit__(self, *_: object) -> None:
            did[:] = [("recorded" if at > did.index("record") else what) for at, what in enumerate(did)]

    for name, double in (("CUDAGraph", Graph), ("Event", Event), ("graph", Recording)):
        monkeypatch.setattr(torch.cuda, name, double)
    monkeypatch.setattr(torch.cuda, "device", nullcontext)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: did.append("ready"))
    works = [lambda name=name: did.append(name) for name in "abc"]
    assert timing.recorded_seconds_of(works, GPU) == pytest.approx(1.0)
    assert did[:5] == ["a", "b", "c", "ready", "record"] and len(did) == 5 + 20


def test_buffers_are_more_than_the_cache_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(L2_cache_size=50e6))
    assert timing.num_copies(4e6, GPU) * 4e6 > 2 * 50e6
    assert timing.num_copies(1e9, GPU) == 1
    assert timing.num_copies(10, GPU) == 64
    assert timing.num_copies(10, torch.device("cpu")) == 1


class VllmDouble:
    """vLLM's offline interface, as its documentation describes it."""

    __version__ = "0.0"

    def __init__(self, *, is_short: bool = False) -> None:
        self.is_short = is_short
        self.runs: list[Offline] = []
        self.LLM = self._make

    def SamplingParams(self, **asked: Any) -> SimpleNamespace:
        assert asked["ignore_eos"] is True
        return SimpleNamespace(**asked)

    def _make(self, *, model: str, load_format: str, skip_tokenizer_init: bool, **sizes: int) -> VllmDouble:
        assert (Path(model) / "config.json").exists() and load_format == "dummy" and skip_tokenizer_init
        return self

    def generate(self, prompts: list[dict[str, list[int]]], asked: list[Any], *, use_tqdm: bool) -> list[Any]:
        lengths = [one.max_tokens - self.is_short for one in asked]
        self.runs.append(Offline([prompt["prompt_token_ids"] for prompt in prompts], lengths))
        return [SimpleNamespace(outputs=[SimpleNamespace(token_ids=[0] * length)]) for length in lengths]


def measured(peer: str, double: Any, monkeypatch: pytest.MonkeyPatch, directory: Path) -> Measurement:
    monkeypatch.setattr(peers_run, "import_module", lambda name: double)
    limits = Limits(Size.of(SMALL["tiny"]), Rates(1e9, 1e9), Bytes())
    (line,) = peers_run.peer_offline(peer, "tiny", SMALL["tiny"], limits, TINY, directory)
    return line


def test_vllm_gets_the_same_requests_after_a_short_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    double = VllmDouble()
    line = measured("vllm", double, monkeypatch, tmp_path)
    assert (line.by, line.what) == ("vllm", "offline, 5 requests")
    warm, run = double.runs
    assert run == TINY.offline() and warm.prompts == run.prompts and warm.outputs == [4] * 5
    with pytest.raises(RuntimeError, match="5 of its 5 answers have another length"):
        measured("vllm", VllmDouble(is_short=True), monkeypatch, tmp_path)


def test_sglang_gets_the_same_requests(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    runs: list[Offline] = []

    def generate(*, input_ids: list[list[int]], sampling_params: list[dict[str, Any]]) -> list[dict[str, Any]]:
        runs.append(Offline(input_ids, [asked["max_new_tokens"] for asked in sampling_params]))
        return [{"meta_info": {"completion_tokens": length}} for length in runs[-1].outputs]

    engine = SimpleNamespace(generate=generate)
    double = SimpleNamespace(__version__="0.0", Engine=lambda **settings: engine)
    line = measured("sglang", double, monkeypatch, tmp_path)
    assert line.by == "sglang" and line.tokens_per_s is not None
    assert runs[1] == TINY.offline()
