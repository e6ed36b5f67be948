"""The runs that are prepared for a GPU: each part tells its results, keeps its limit, and costs no other part."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F

from benchmarks import gpu
from benchmarks.gpu import PLANS, SECTIONS, Job, parse_args
from benchmarks.gpu_sections import child, foreign_kernels, kernel_speed, proofs, server_run
from benchmarks.gpu_sections.anatomy import anatomy
from benchmarks.gpu_sections.attention_cases import make_case
from benchmarks.gpu_sections.drive import drive
from benchmarks.gpu_sections.engine_runs import Runs
from benchmarks.gpu_sections.kernel_speed import KernelSpeed
from benchmarks.gpu_sections.limits import Bytes, Limits, Rates
from benchmarks.gpu_sections.machine import sheet_of
from benchmarks.gpu_sections.messages import Inapplicable, Measurement
from benchmarks.gpu_sections.random_model import load_engine
from benchmarks.gpu_sections.report import Report
from benchmarks.gpu_sections.server_run import Burst, Load, server
from benchmarks.gpu_sections.several_gpus import links, on_ranks
from benchmarks.gpu_sections.shapes import MIXTURES, MODELS, SMALL, Size
from benchmarks.gpu_sections.workload import TINY
from benchmarks.peers import servers
from engine.attention.base import AttentionShape
from engine.attention.kv_pages import FP8
from engine.attention.reference import ReferenceAttention
from engine.model_parts.parts import DeltaNetConfig
from engine.models.torch_delta_net import TorchDeltaHeads, advance, advance_by_many
from tests.engine.support.recorded_graphs import record_as_on_gpus

CPU = torch.device("cpu")


def program(*sections: str, told: str = "", then: str = "") -> str:
    """A program that begins and ends sections, with something to tell in each."""
    lines = [line for name in sections for line in (json.dumps({"begin": name}), told, json.dumps({"end": name}))]
    return (
        f"import os, time\nfor line in {[line for line in lines if line]!r}:\n    print(line, flush=True)\n{then}"
    )


@pytest.fixture
def run_plan(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Report]:
    """Run a plan in which each process is a program, made from the sections that it was asked for."""

    def run(name: str, programs: Callable[..., str]) -> Report:
        popen = subprocess.Popen

        def start(command: list[str], **options: Any) -> Any:
            asked = [part.partition(":")[0] for part in command[command.index("--begun") + 4 :] if ":" in part]
            sections = [section for section in asked if section in SECTIONS]
            return popen([sys.executable, "-c", programs(*sections)], **options)

        monkeypatch.setattr(subprocess, "Popen", start)
        report = Report(tmp_path / "gpu_x", {})
        gpu.Run(report, parse_args(["--plan", name])).all([])
        return report

    return run


@pytest.mark.parametrize("name", PLANS)
def test_a_plan_consists_of_known_parts_that_fit_into_its_limit(name: str) -> None:
    plan = PLANS[name]
    for job in plan.jobs:
        assert all(hasattr(child.Child, f"_{section}") for section in job.sections)
        assert job.model in {"", *MODELS, *MIXTURES}
    least = sum(SECTIONS[section].least for job in plan.jobs for section in job.sections)
    assert least <= plan.seconds
    with pytest.raises(SystemExit):
        parse_args(["--plan", name, "--only", "decode"])


@pytest.mark.parametrize("name", PLANS)
def test_a_part_that_fails_or_hangs_is_named_and_all_others_tell_their_results(
    name: str, run_plan: Callable[..., Report], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Results are in the file after each part."""
    fails, hangs = (job.sections[0] for job in PLANS[name].jobs[:2])
    monkeypatch.setitem(SECTIONS, hangs, gpu.Share(1, 1))
    monkeypatch.setattr(gpu, "find_spec", lambda name: True)
    written: list[int] = []

    def programs(*sections: str) -> str:
        if (tmp_path / "gpu_x.json").exists():
            written.append(len(json.loads((tmp_path / "gpu_x.json").read_text())["measurements"]))
        if sections[0] == hangs:
            return program(then=f'print(\'{{"begin": "{hangs}"}}\', flush=True)\ntime.sleep(600)')
        told = json.dumps({"measured": {"what": f"found by {sections[0]}"}})
        if sections[0] == fails:
            return program(then=f'print(\'{{"begin": "{fails}"}}\', flush=True)\nos._exit(3)')
        return program(*sections, told=told)

    report = run_plan(name, programs)
    jobs = PLANS[name].jobs
    assert list(report.failed) == [jobs[0].name(fails), jobs[1].name(hangs)]
    assert not report.left_out
    found = {line.what for line in report.measurements}
    assert found == {f"found by {job.sections[0]}" for job in (Job(("machine",)), *jobs[2:])}
    assert written == sorted(written) and written[-1] == len(report.measurements) - len(jobs[-1].sections)


def test_the_limit_of_a_plan_ends_everything(
    run_plan: Callable[..., Report], monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = PLANS["first"]
    monkeypatch.setitem(PLANS, "first", plan._replace(seconds=3))

    def programs(*sections: str) -> str:
        begin = f'print(\'{{"begin": "{sections[0]}"}}\', flush=True)\ntime.sleep(600)'
        return program(*sections) if sections[0] == "machine" else program(then=begin)

    began = time.monotonic()
    report = run_plan("first", programs)
    assert time.monotonic() - began < 30
    assert len(report.left_out) == sum(len(job.sections) for job in plan.jobs) and not report.failed
    assert set(report.left_out.values()) == {"the time was over"}


def test_what_a_section_has_started_ends_with_it(
    run_plan: Callable[..., Report], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A test run or a server would still use the GPU. Here it is a process in a session of its own."""
    monkeypatch.setitem(SECTIONS, "check", gpu.Share(1, 2))
    monkeypatch.setitem(PLANS, "first", gpu.Plan(60, (Job(("check",)),)))
    note = tmp_path / "pid"
    start = (
        'import subprocess, sys\nprint(\'{"begin": "check"}\', flush=True)\n'
        "it = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'], start_new_session=True)\n"
        f"open({str(note)!r}, 'w').write(str(it.pid))\ntime.sleep(600)"
    )
    report = run_plan("first", lambda *some: program(*some) if some[0] == "machine" else program(then=start))
    assert "took longer than 2 s" in report.failed["check"]
    pid, deadline = int(note.read_text()), time.monotonic() + 20
    while _is_running(pid):
        assert time.monotonic() < deadline, "it still runs"
        time.sleep(0.05)


def _is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


# --- what is compared with what -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "sheet"),
    [
        ("NVIDIA H100 80GB HBM3", (3.35e12, 989e12)),
        ("NVIDIA H200", (4.8e12, 989e12)),
        ("NVIDIA A100-SXM4-80GB", (2.039e12, 312e12)),
        ("NVIDIA A100-SXM4-40GB", (1.555e12, 312e12)),
        ("NVIDIA L40S", (0.864e12, 362e12)),
        ("NVIDIA H100 PCIe", (None, None)),
        ("NVIDIA H100 NVL", (None, None)),
        ("NVIDIA GeForce RTX 5090", (None, None)),
    ],
)
def test_a_share_is_of_the_data_sheet_of_this_card(name: str, sheet: tuple[float | None, float | None]) -> None:
    assert sheet_of(name) == sheet


def test_each_share_is_told_by_the_data_sheet_and_as_measured() -> None:
    rates = Rates(3.1e12, 750e12, 3.35e12, 989e12)
    limits = Limits(Size.of(MODELS["llama-3.1-8b"]), rates, Bytes())
    shares = limits.shares(lambda some: some.decode(1, 1024), 6.08e-3)
    assert shares["limit_share"] / shares["sheet_share"] == pytest.approx(3.35 / 3.1)
    assert shares["sheet_share"] == pytest.approx(0.74, abs=0.005)
    report = Report(
        None,
        {},
        {"name": "NVIDIA H100", "commit": "abc"},
        {"bandwidth": 3.1e12, "matmul": 750e12, "sheet_bandwidth": 3.35e12, "sheet_matmul": 989e12},
    )
    report.measurements.append(Measurement("decode, 1 row", "m", ms=6.08, **shares))
    assert "commit abc" in report.table()
    assert "reads 3.100 TB/s, products 750.0 TFLOP/s measured; reads 3.350 TB/s" in report.table()
    assert "74.3% of the sheet, 80.3% of the measured limit" in report.summary()
    assert Rates(1.0, 1.0).shares(lambda some: 1.0, 2.0) == {"limit_share": 0.5, "sheet_share": None}


def test_a_step_is_taken_apart_by_replays_of_its_own_graphs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    record_as_on_gpus(monkeypatch)
    sizes: dict[str, Any] = {"kv_pages": 64, "max_model_len": 128, "max_running": 4, "max_step_tokens": 64}
    engine = load_engine(SMALL["tiny"], tmp_path, device="cpu", cuda_graphs="lazy", **sizes)
    limits = Limits(Size.of(SMALL["tiny"]), Rates(1e9, 1e9), Bytes(4, 4, 4))
    lines = list(anatomy("tiny", Runs("tiny", engine, limits, TINY), limits, TINY, CPU))
    names = [line.what.removeprefix("anatomy, 3 rows: ") for line in lines if "3 rows" in line.what]
    assert names == ["step", "replay", "sampler", "gap", "products", "products by the library", "attention"]
    step, replay, sampler, gap = [line.ms or 0.0 for line in lines if "3 rows" in line.what][:4]
    assert replay > 0 and gap == pytest.approx(step - replay - sampler)


def test_prompts_can_come_while_others_decode(tmp_path: Path) -> None:
    sizes: dict[str, Any] = {"kv_pages": 64, "max_model_len": 128, "max_running": 64, "max_step_tokens": 64}
    engine = load_engine(SMALL["tiny"], tmp_path, device="cpu", **sizes)
    prompts = [TINY.prompt(row, 10) for row in range(3)]
    trace = drive(engine, prompts, [12, 12, 2], arrivals=[0, 0, 5])
    assert trace.arrived[2] >= trace.steps[4][0] > trace.arrived[1]
    assert trace.first[2] > trace.arrived[2]
    assert trace.tokens == drive(engine, prompts, [12, 12, 2]).tokens


@pytest.mark.parametrize("sizes", [{"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}], ids=str)
def test_ranks_of_random_weights_decode_and_compute_prompts(sizes: dict[str, int], tmp_path: Path) -> None:
    """In a pipeline, each step has some of the rows."""
    settings = {"device": "cpu", "kv_pages": 64, "max_model_len": 256, "max_running": 64, "max_step_tokens": 64}
    beyond_any_cpu = Rates(1e15, 1e15)
    given = settings | {"threads": 1}, sizes, beyond_any_cpu, Bytes(4, 4, 4), TINY, tmp_path
    lines = {line.what: line for line in on_ranks("tiny", SMALL["tiny"], *given)}
    [(name, size)] = sizes.items()
    for what in ("decode, 1 row", "decode, 3 rows", "prefill, 96"):
        line = lines[f"{what}, {name} {size}"]
        assert line.tokens_per_s and line.limit_share and 0 < line.limit_share < 1, line


def test_sums_over_processes_are_timed_for_each_size() -> None:
    lines = list(links(CPU))
    assert [(line.what, line.by) for line in lines] == [
        ("sum of 8 KiB over 2 ranks", "gloo"),
        ("sum of 64 KiB over 2 ranks", "gloo"),
    ]
    assert all(line.ms for line in lines)


def test_tests_are_told_one_by_one_with_their_ends(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "test_some.py"
    file.write_text(
        "import pytest\ndef test_right(): pass\ndef test_wrong(): assert False\ndef test_rank(): pass\n"
        "@pytest.mark.skip\ndef test_elsewhere(): pass\n"
    )
    monkeypatch.setattr(proofs, "FILE", str(file))
    lines = {line.what: line.passed for line in proofs.proofs("not rank")}
    assert lines == {"proof: test_right": True, "proof: test_wrong": False, "proof: test_elsewhere": None}
    file.write_text("import nothing_of_this_name")
    with pytest.raises(RuntimeError, match="pytest ended with status 2"):
        list(proofs.proofs("not rank"))
    monkeypatch.setattr(proofs, "find_spec", lambda name: None)
    with pytest.raises(Inapplicable, match="pytest and hypothesis not installed"):
        list(proofs.proofs("rank"))


# --- kernels of others, as doubles with their interfaces --------------------------------------------------------


def attend(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    begins: torch.Tensor,
    ends: torch.Tensor,
    longest_query: int,
    longest: int,
    *,
    softmax_scale: float,
    causal: bool,
) -> torch.Tensor:
    """FlashAttention-3's: the last query of a row sees all of its keys."""
    assert causal and begins.dtype == ends.dtype == torch.int32
    assert longest_query == int(begins.diff().max()) and longest == int(ends.diff().max())
    out = []
    for row in range(len(begins) - 1):
        own, mine = slice(begins[row], begins[row + 1]), slice(ends[row], ends[row + 1])
        group = query.shape[1] // keys.shape[1]
        pair = (part[mine].repeat_interleave(group, 1).transpose(0, 1) for part in (keys, values))
        key, value = pair
        scores = query[own].transpose(0, 1) @ key.transpose(1, 2) * softmax_scale
        hidden = torch.ones_like(scores[0]).tril(scores.shape[2] - scores.shape[1]) == 0
        out.append((scores.masked_fill(hidden, -torch.inf).softmax(-1) @ value).transpose(0, 1))
    return torch.cat(out)


def test_flash_attention_3_gets_the_keys_of_each_row(monkeypatch: pytest.MonkeyPatch) -> None:
    double = SimpleNamespace(flash_attn_varlen_func=attend)
    monkeypatch.setattr(foreign_kernels, "import_module", lambda name: {"fa3_fwd_interface": double}[name])
    case = make_case([(30, 5), (0, 20)], AttentionShape(4, 2, 32, 16, frozenset({None})), None, torch.float32, CPU)
    assert torch.allclose(foreign_kernels.flash_attention_3(case)(), case.expected(), atol=1e-5)


@pytest.mark.parametrize("kv_dtype", [None, FP8])
def test_cases_of_latent_kv_expect_what_plain_torch_computes(kv_dtype: torch.dtype | None) -> None:
    shape = AttentionShape(4, 1, 48, 16, frozenset({None}), kv_dtype, latent=32)
    case = make_case([(30, 1), (7, 20)], shape, None, torch.float32, CPU)
    found = ReferenceAttention(shape).prepare(case.batch, case.null_page).attend(*case[2:])
    torch.testing.assert_close(found, case.expected(), atol=1e-5, rtol=0)


def test_attention_over_latent_kv_is_timed_in_each_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU, by plain torch, and as a prompt whose KV is expanded; of 32 + 16 numbers a position."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    speed = KernelSpeed(CPU, Rates(1e12, 1e12), kernel_speed.TINY)
    shape = AttentionShape(4, 1, 48, 64, frozenset({None}), latent=32)
    decodes, triton = speed.latent_attention()
    assert decodes.by == "reference" and decodes.ms and decodes.limit_share
    assert triton.by == "triton" and "it runs on GPUs" in triton.note
    assert speed._work(shape, 2, 30, 1) == (2 * 31 * 48 * 2, 2 * 2 * 31 * 4 * (48 + 32))
    assert speed._expanded_work(shape, 2, 30, 1)[1] == 2 * 2 * 31 * 4 * (24 + 16 + 24) + 2 * 2 * 31 * 4 * 48 * 32
    values = speed._expanded(ReferenceAttention(shape), shape, 1, 0, 520)()
    assert isinstance(values, torch.Tensor) and values.shape == (520, 4, 24) and values.isfinite().all()


@pytest.mark.parametrize("is_fp8", [False, True])
def test_deep_gemm_gets_rows_by_expert_and_scales_by_block(is_fp8: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def wide(pair: Any) -> torch.Tensor:
        if not isinstance(pair, tuple):
            return cast(torch.Tensor, pair).float()
        values, scales = pair
        assert values.dtype == torch.float8_e4m3fn and scales.dtype == torch.float32
        if values.ndim == 3:
            scales = scales.repeat_interleave(128, 1)
        return cast(torch.Tensor, values.float() * scales.repeat_interleave(128, -1))

    def multiply(left: Any, right: Any, out: torch.Tensor, groups: torch.Tensor) -> None:
        assert len(groups) % 128 == 0 and groups.dtype == torch.int32
        for start in range(0, len(groups), 128):
            experts = {int(group) for group in groups[start : start + 128] if group >= 0}
            assert len(experts) == 1, "a block has rows of one expert"
            some = slice(start, start + 128)
            out[some] = (wide(left)[some] @ wide(right)[experts.pop()].T).to(out.dtype)

    double = SimpleNamespace(
        get_mk_alignment_for_contiguous_layout=lambda: 128,
        m_grouped_bf16_gemm_nt_contiguous=multiply,
        m_grouped_fp8_gemm_nt_contiguous=multiply,
    )
    monkeypatch.setattr(foreign_kernels, "import_module", lambda name: {"deep_gemm": double}[name])
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(9, 128, generator=generator).to(torch.bfloat16)
    chosen = torch.tensor([[at % 3, 3] for at in range(9)])
    gate_up = (torch.randn(4, 256, 128, generator=generator) / 128**0.5).to(torch.bfloat16)
    down = (torch.randn(4, 128, 128, generator=generator) / 128**0.5).to(torch.bfloat16)
    grouped = foreign_kernels.deep_gemm(x, chosen, gate_up, down, is_fp8=is_fp8)
    found = grouped.call()[grouped.is_real].float()
    assert len(found) == 18 and len(grouped.is_real) == 4 * 128
    assert (found - grouped.expected.float()).abs().mean() < (0.05 if is_fp8 else 0.005)


def test_fla_gets_the_heads_and_the_state_of_a_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    """The double does what the package's documentation says, token by token."""
    shape = DeltaNetConfig(2, 4, 8, 6, 4)

    def chunk_gated_delta_rule(
        query: torch.Tensor, key: torch.Tensor, *rest: torch.Tensor, initial_state: torch.Tensor, **options: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        assert options == {"output_final_state": True, "use_qk_l2norm_in_kernel": True}
        each = rest[0].shape[2] // key.shape[2]
        query, key = (F.normalize(part, dim=-1).repeat_interleave(each, 2) for part in (query, key))
        tokens = zip(*(part.unbind(1) for part in (query / query.shape[-1] ** 0.5, key, *rest)), strict=True)
        state = initial_state.clone()
        return torch.stack([advance(state, *token) for token in tokens], 1), state

    double = SimpleNamespace(chunk_gated_delta_rule=chunk_gated_delta_rule)
    monkeypatch.setattr(foreign_kernels, "import_module", lambda name: {"fla.ops.gated_delta_rule": double}[name])
    generator = torch.Generator().manual_seed(0)
    convolved, state = (torch.randn(*size, generator=generator) for size in ((9, 56), (4, 8, 6)))
    decay, strength = -torch.rand(9, 4, generator=generator), torch.rand(9, 4, generator=generator)
    found = foreign_kernels.gated_delta_rule(convolved, decay, strength, shape, state)()

    heads = TorchDeltaHeads(shape, convolved, state, 0.0)._split(convolved)
    query, key, value = (part.transpose(0, 1) for part in heads)
    expected, _ = advance_by_many(state, query, key, value, decay.t(), strength.t())
    torch.testing.assert_close(found.transpose(0, 1), expected, atol=1e-4, rtol=1e-4)


# --- a server, as its client sees it ----------------------------------------------------------------------------


@contextmanager
def streaming() -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """A server that answers each completion with two events; yields its address and what it was asked."""
    asked: list[dict[str, Any]] = []
    loop = asyncio.new_event_loop()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        length = int(head.lower().partition("content-length: ")[2].split()[0])
        asked.append(json.loads(await reader.readexactly(length)))
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        for reason in ("null", '"length"'):
            event = f'data: {{"choices":[{{"text":"a","finish_reason":{reason}}}]}}\n\n'.encode()
            writer.write(f"{len(event):x}\r\n".encode() + event + b"\r\n")
            await writer.drain()
            await asyncio.sleep(0.01)
        writer.write(b"0\r\n\r\n")
        await writer.drain()

    server = loop.run_until_complete(asyncio.start_server(answer, "127.0.0.1", 0))
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", asked
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


def test_a_server_is_measured_by_its_own_client(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    started: list[tuple[str, int]] = []
    with streaming() as (url, asked):

        @contextmanager
        def serving(name: str, settings: Any, home: Path, ingresses: int) -> Iterator[Any]:
            assert settings.max_requests == 4 and settings.kv_tokens >= 4 * (12 + 6)
            assert Path(settings.model).is_dir()
            started.append((name, ingresses))
            yield servers.Running(name, url, "m", ())

        monkeypatch.setattr(servers, "serving", serving)
        load = Load("llama-15m", (Burst(4, 12, 6, 2),), (("direct", 1), ("unbounded", 4)))
        lines = list(server(load, "tiny", CPU, tmp_path))
    assert started == [("direct", 1), ("unbounded", 4)]
    assert [line.what for line in lines] == [
        "server, direct, 1 ingress: 4 x 12 to 6",
        "server, unbounded, 4 ingresses: 4 x 12 to 6",
    ]
    assert all(line.tokens_per_s and "2 rounds" in line.note for line in lines)
    assert len(asked) == 2 * 3 * 4, "a round that warms up, and two"
    assert {len(body["prompt"]) for body in asked} == {12} and {body["max_tokens"] for body in asked} == {6}
    assert len({tuple(body["prompt"]) for body in asked[:12]}) == 12, "no prompt is cached"
    monkeypatch.setattr(server_run, "find_spec", lambda name: None)
    with pytest.raises(Inapplicable, match="ray"):
        next(server(load, "tiny", CPU, tmp_path))
