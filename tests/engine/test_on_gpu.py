"""Proofs of what only a GPU can show: steps that are late, graphs, streams and ranks change no token.

    python -m pytest -q tests/engine/test_on_gpu.py           # about 75 s on one GPU, ranks included
    python -m pytest -q tests/engine/test_on_gpu.py -k rank   # with several GPUs, each rank has its own

Without a GPU, most of them run with doubles on a CPU, where ranks are threads that use gloo, so that a GPU tests
only what is new there.
"""

from __future__ import annotations

import dataclasses
import json
import os
import random
import signal
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

import pytest
import torch

from benchmarks.gpu_sections.drive import Trace, drive
from engine.attention.copy_streams import StreamName
from engine.grammar.spec import Grammar
from engine.graphs.chain_graphs import ChainSize
from engine.loading import load_model as loading
from engine.parallel.one_shot import OneShotSum, memory_bytes
from engine.parallel.peer_memory import PeerMemory
from engine.parallel.shard import Shard
from engine.program.engine import Engine
from engine.runner.model_runner import ModelRunner
from engine.runner.next_drafts import DraftsUnderway
from engine.scheduling.stats import StepStats
from engine.settings.config import EngineConfig
from engine.settings.drafting import Speculation
from engine.values.plan import Chunk, StepPlan, StepResult
from engine.values.sampling_params import SamplingParams
from engine.values.stream_delta import StreamDelta
from tests.engine.support.devices import DEVICE
from tests.engine.support.eagle3_models import save_eagle3
from tests.engine.support.engines_on_ranks import PROMPTS, Layout, ranks_config, run_on_ranks, tokens_of_each
from tests.engine.support.gpu_proofs import (
    GRAPHS,
    ON_GPU,
    be_late,
    busy_copies,
    counted_prompts,
    counted_replays,
    eventually,
    late_copies,
    late_steps,
    noted_logits,
    poison,
    random_engine,
)
from tests.engine.support.grammar_models import ids, save_random
from tests.engine.support.graph_workloads import (
    assert_same_tokens,
    greedy_request,
    last_chunk_of,
    play_greedily,
    play_workload,
)
from tests.engine.support.mtp_models import save_with_mtp
from tests.engine.support.oracle import random_ids, save_tiny
from tests.engine.support.recorded_graphs import Recording, record_as_on_gpus

if TYPE_CHECKING:
    from tests.engine.support.rank_processes import Threads, Watched

needs_gpu = pytest.mark.skipif(not ON_GPU, reason="needs a CUDA GPU")
needs_msgspec = pytest.mark.skipif(not find_spec("msgspec"), reason="ranks need msgspec")
GREEDY = SamplingParams(0.0, ignore_eos=True)
SIZES: dict[str, Any] = {"device": DEVICE.type, "dtype": "float32", "max_model_len": 256, "max_running": 16}
_POISON_BYTES = 8 * 2**30


@pytest.fixture(autouse=True)
def no_counter_is_left() -> Iterator[None]:
    """Programs that share a product count their arrivals (`split_k.py`). A kernel that ended early, or two streams
    at a time, would leave counts that spoil later products in silence.
    """
    yield
    if ON_GPU:
        from engine.kernels.triton.split_k import counters

        torch.cuda.synchronize()
        device = torch.device("cuda", torch.cuda.current_device())
        assert not counters(device).any(), "a product has left its counters above zero"


@pytest.fixture
def recordings(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU, let engines record steps with doubles."""
    if not ON_GPU:
        record_as_on_gpus(monkeypatch)


@needs_gpu
@pytest.mark.parametrize("rows", [1, 8, 64])
def test_kernels_that_are_launched_early_compute_the_same_bits(
    rows: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such a kernel starts while the one before it still runs, and waits itself. After an update of Triton or of
    ptxas, a read may move before the wait: it then sees old numbers, seldom, and mostly while memory is busy.
    """
    from engine.kernels.triton import launch

    prompts = [random_ids(row, 100 + row) for row in range(rows)]
    found: list[tuple[list[list[int]], list[torch.Tensor]]] = []
    for is_early in (False, True):
        with monkeypatch.context() as patched, noted_logits() as logits:
            if not is_early:
                patched.setattr(launch, "launches_early", lambda device: False)
            engine = random_engine(tmp_path)
            with busy_copies():
                tokens = drive(engine, prompts, [200] * rows, GREEDY).tokens
                logits.clear()
                tokens += drive(engine, prompts, [20] * rows, SamplingParams(0.0, logprobs=1)).tokens
            found.append((tokens, [*logits]))
    (tokens, logits), (others, other_logits) = found
    assert tokens == others
    assert len(logits) == len(other_logits) >= 20
    assert all(map(torch.equal, logits, other_logits))


@pytest.mark.usefixtures("recordings")
def test_replays_of_all_sizes_in_any_order_compute_what_their_kernels_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All graphs share a pool of memory. If one reads memory that another has overwritten, or that is no longer
    its own, it is wrong only when the sizes come in another order. So free memory is full of NaN, and the same
    work is launched kernel by kernel on tensors like these.
    """
    with noted_logits() as replayed:
        engines = [random_engine(tmp_path)]
    with noted_logits() as launched, monkeypatch.context() as patched:
        patched.setattr(loading, "CudaCapture", lambda device: Recording())
        engines.append(random_engine(tmp_path))
    generator = torch.Generator(DEVICE).manual_seed(0)
    runner, plain = (cast(ModelRunner, engine.runner) for engine in engines)
    for layer, other in zip(runner.pages.data, plain.pages.data, strict=True):
        pages = layer[:, : runner.num_pages]
        pages.copy_(torch.randn(pages.shape, generator=generator, device=DEVICE))
        other[:, : runner.num_pages] = pages
    draw, longest = random.Random(0), 300
    num_pages = -(-longest // engines[0].config.page_size)
    order = [1, 2, 4, *range(8, 65, 8)] * 2
    draw.shuffle(order)
    with counted_replays() as replays:
        for rows in order:
            requests = [
                greedy_request(f"{row} of {rows}", draw.randint(1, longest), logprobs=1) for row in range(rows)
            ]
            free = draw.sample(range(runner.num_pages), rows * num_pages)
            tables = [free[row * num_pages : (row + 1) * num_pages] for row in range(rows)]
            chunks = tuple(last_chunk_of(*pair) for pair in zip(requests, tables, strict=True))
            poison(_POISON_BYTES if ON_GPU else 1)
            found, expected = (each.run(StepPlan(chunks)).token_ids for each in (runner, plain))
            assert found == expected
            assert torch.equal(replayed[-1], launched[-1]), f"{rows} rows have other logits in a graph"
    assert sum(replays) >= len(order)


GRAMMARS = (
    Grammar("regex", r"[a-z]{2,9}-[0-9]{1,6}(\.[0-9]{1,4})?"),
    Grammar("choice", json.dumps(["yes", "no", "it depends"])),
)

HAS_GRAMMARS = find_spec("llguidance") is not None
"""A bare GPU machine lacks it."""


def play_in_little_memory(engine: Engine) -> dict[str, list[int]]:
    """Admit requests at any time, with grammars, chance and penalties, and abort some. Their pages do not fit."""
    draw, tokens = random.Random(5), defaultdict[str, list[int]](list)
    shared = ids("Answer in a few words: what is it, and how large?")
    for number in range(24):
        grammar = {"grammar": GRAMMARS[number % 2]} if HAS_GRAMMARS else {}
        kinds: list[dict[str, Any]] = [{}, grammar, {"top_p": 0.8}, {"top_k": 9}]
        params = SamplingParams(
            draw.choice([0.0, 1.0]),
            max_tokens=draw.randint(8, 40),
            seed=number,
            repetition_penalty=1.2 if number % 6 == 1 else 1.0,
            logprobs=2 if number % 6 == 2 else None,
            **draw.choice(kinds),
        )
        prompt = shared[: draw.randint(0, len(shared))] + [draw.randrange(8, 2000) for _ in range(3)]
        engine.loop.submit(engine.new_request(f"r{number}", prompt, params))
        for _ in range(draw.randint(0, 3)):
            for event in engine.loop.step():
                tokens[event.request_id] += event.token_ids
        if draw.random() < 0.15:
            engine.loop.abort(f"r{number}")
            tokens[f"r{number}"] += []
    while engine.loop.has_work:
        for event in engine.loop.step():
            assert event.finish_reason != "error", event.error
            tokens[event.request_id] += event.token_ids
    account = engine.cache.account()
    assert account.locked == account.private == 0
    engine.close()
    return tokens


@pytest.mark.usefixtures("recordings")
@pytest.mark.parametrize("preemption", ["swap", "recompute"])
def test_a_device_that_is_a_step_late_computes_the_same_tokens(preemption: str, tmp_path: Path) -> None:
    """The host writes the next step's words, masks, prompts and page tables while the device may still read the
    last one's. Here the device always does. An abort strikes earlier or later, so one of two answers may be the
    longer.
    """
    model = save_random(tmp_path)
    sizes: dict[str, Any] = {"page_size": 4, "kv_pages": 45, "max_step_tokens": 64, "host_kv_gib": 2**-6}
    settings = SIZES | sizes | {"preemption": preemption}
    expected = play_in_little_memory(
        Engine.from_config(EngineConfig(str(model), overlap=False, cuda_graphs="off", **settings))
    )
    engine = Engine.from_config(EngineConfig(str(model), overlap=True, cuda_graphs=GRAPHS, **settings))
    with late_steps(), counted_replays() as replays, counted_prompts() as prompts:
        found = play_in_little_memory(engine)
    assert sum(replays) > 10 and len(prompts) > 3 and all(prompts)
    load = engine.loop.load()
    assert load.num_preemptions > 0 and (load.num_swapped > 0) == (preemption == "swap")
    assert set(found) == set(expected)
    for name, tokens in found.items():
        length = min(len(tokens), len(expected[name]))
        assert tokens[:length] == expected[name][:length]


@needs_gpu
def test_a_step_that_samples_nothing_ends_after_its_work(tmp_path: Path) -> None:
    """Its KV is in its pages once its result is there. The host waits for nothing before."""
    runner = cast(ModelRunner, random_engine(tmp_path).runner)
    request = greedy_request("r", 100)
    part = Chunk(request, 0, 64, request.tokens[:64], range(8), samples=False)
    runner.run(StepPlan((part,)))
    be_late(20)
    step = runner.prepare(StepPlan((part,)))()
    assert not isinstance(step, StepResult) and not step.is_done_within(0)
    assert not step.wait().token_ids and torch.cuda.current_stream().query()


@pytest.mark.usefixtures("recordings")
@pytest.mark.parametrize("late", ["out", "in"])
def test_pages_that_are_swapped_late_hold_the_same_tokens(late: StreamName, tmp_path: Path) -> None:
    """Transfers have streams of their own: a missing wait would copy a page before it is written, or let a step
    read it before it is there. Memory holds three of twelve requests.
    """
    model = str(save_tiny("qwen3", tmp_path))
    params = SamplingParams(0.0, max_tokens=40, ignore_eos=True)
    prompts = [random_ids(seed, 30 + seed) for seed in range(12)]
    sizes: dict[str, Any] = {"page_size": 8, "max_step_tokens": 64}
    memory: dict[str, Any] = {"kv_pages": 3 * 10, "preemption": "swap", "host_kv_gib": 2**-5}
    plain = Engine.from_config(EngineConfig(model, cuda_graphs="off", kv_pages=300, **SIZES, **sizes))
    expected = drive(plain, prompts, [40] * 12, params).tokens
    engine = Engine.from_config(EngineConfig(model, cuda_graphs=GRAPHS, **SIZES, **sizes, **memory))
    with late_copies(late):
        found = drive(engine, prompts, [40] * 12, params).tokens
    assert engine.loop.load().num_swapped > 0
    assert found == expected


@pytest.mark.usefixtures("recordings")
def test_two_engines_in_two_threads_do_not_touch_each_other(tmp_path: Path) -> None:
    """All products of a GPU share their counters, as all work is on one stream. Two engines in a process must not
    be an exception.
    """
    engines = [random_engine(tmp_path), random_engine(tmp_path)]
    prompts = [[random_ids(10 * at + row, 50 + row) for row in range(4)] for at in range(2)]

    def run(at: int) -> Trace:
        return drive(engines[at], prompts[at], [100] * 4, GREEDY)

    alone = [run(at).tokens for at in range(2)]
    with ThreadPoolExecutor(2) as threads:
        together = [trace.tokens for trace in threads.map(run, range(2))]
    assert together == alone


FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "drafts from the text": ("qwen3", {"speculation": Speculation(adaptive=False, min_match=1)}),
    "drafts of a model": ("qwen3", {}),
    "drafts of a layer": ("qwen3", {}),
    "windows and sinks": ("gpt_oss", {}),
    "windows in groups": ("gemma3", {"windowed_kv": "on"}),
    "experts": ("qwen3_moe", {}),
    "recurrent states": ("qwen3_next", {}),
    "recurrent states, drafts": ("qwen3_next", {"speculation": Speculation(adaptive=False, min_match=1)}),
    "heads of two sizes": ("gemma4_small", {}),
    "heads of two sizes, drafts": ("gemma4_moe", {"speculation": Speculation(adaptive=False, min_match=1)}),
    "chunks": ("llama4", {}),
    "latent KV": ("deepseek_v3", {"speculation": Speculation(adaptive=False, min_match=1)}),
}


@pytest.mark.usefixtures("recordings")
@pytest.mark.parametrize("kind", FAMILIES)
def test_graphs_of_all_kinds_give_the_tokens_of_a_cpu(kind: str, tmp_path: Path) -> None:
    """Graphs with draft tokens, of a draft model, with states of inner layers, with windows and groups of layers,
    with experts, with recurrent states, with heads of two sizes, with chunks, and of latent KV with draft tokens.
    """
    family, settings = FAMILIES[kind]
    model = save_tiny(family, tmp_path / "model")
    if kind == "drafts of a model":
        draft = save_tiny(family, tmp_path / "draft", seed=1)
        settings = {"speculation": Speculation("draft_model", model=str(draft), adaptive=False)}
    elif kind == "drafts of a layer":
        layer = save_eagle3(tmp_path / "layer", model)
        settings = {"speculation": Speculation("eagle3", model=str(layer), adaptive=False)}
    sizes = SIZES | {"kv_pages": 256}
    plain = EngineConfig(str(model), cuda_graphs="off", **{**sizes, "device": "cpu", "attention": "reference"})
    expected = play_greedily(Engine.from_config(plain))
    with counted_replays() as replays:
        found = play_greedily(
            Engine.from_config(EngineConfig(str(model), cuda_graphs=GRAPHS, **sizes, **settings))
        )
    assert sum(replays) > 10
    assert found == expected


@pytest.mark.usefixtures("recordings")
@pytest.mark.parametrize("method", ["draft_model", "mtp"])
def test_drafts_that_begin_before_a_step_s_tokens_are_known_change_no_token(
    method: Literal["draft_model", "mtp"], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of so small a vocabulary, random models often draft the right token: some, all or none in each row."""
    save = save_with_mtp if method == "mtp" else save_tiny
    model = save("glm4_moe" if method == "mtp" else "qwen3", tmp_path / "model", vocab_size=12)
    drafter = None if method == "mtp" else str(save_tiny("llama2", tmp_path / "drafter", seed=3, vocab_size=12))
    config = EngineConfig(str(model), cuda_graphs=GRAPHS, kv_pages=256, **SIZES)
    drafting = dataclasses.replace(config, speculation=Speculation(method, model=drafter, adaptive=False))
    begun, launched = list[DraftsUnderway](), DraftsUnderway.launched

    def noting(drafts: DraftsUnderway, *tokens: Any) -> None:
        begun.append(drafts)
        launched(drafts, *tokens)

    monkeypatch.setattr(DraftsUnderway, "launched", noting)
    found, num_accepted = list[dict[str, list[int]]](), 0
    for each in (config, drafting):
        engine, tokens = Engine.from_config(each), defaultdict[str, list[int]](list)
        steps = list[StepStats]()
        engine.loop.on_step = steps.append
        for number in range(12):
            asked: dict[str, Any] = {"seed": number, "top_k": number % 3 * 4, "max_tokens": 20 + number}
            sampling = SamplingParams(2.0 * (number % 4), **asked)
            prompt = [(number + 5 * at) % 12 for at in range(1 + 7 * (number % 5))]
            engine.loop.submit(engine.new_request(f"r{number}", prompt, sampling))
            for event in engine.loop.step():
                tokens[event.request_id] += event.token_ids
        while engine.loop.has_work:
            for event in engine.loop.step():
                tokens[event.request_id] += event.token_ids
        engine.loop.stop()
        found.append(tokens)
        num_accepted += sum(step.num_accepted_tokens for step in steps)
    assert found[0] == found[1]
    assert num_accepted > 40 and len(begun) > 20


@pytest.mark.usefixtures("recordings")
@pytest.mark.parametrize("method", ["draft_model", "mtp"])
def test_drafts_that_stay_on_the_device_change_no_token(
    method: Literal["draft_model", "mtp"], tmp_path: Path
) -> None:
    """Several calls are one graph, and each begins with what the last one left. The model drafts for itself and is
    right, or a random layer drafts for it.
    """
    save = save_with_mtp if method == "mtp" else save_tiny
    model = str(save("glm4_moe" if method == "mtp" else "qwen3", tmp_path / "model", eos_token_id=7))
    drafting = Speculation(method, model=None if method == "mtp" else model, adaptive=False)
    config = EngineConfig(model, cuda_graphs=GRAPHS, kv_pages=256, **SIZES)
    expected, _ = play_workload(Engine.from_config(config), 3)
    engine, steps = Engine.from_config(dataclasses.replace(config, speculation=drafting)), list[StepStats]()
    engine.loop.on_step = steps.append
    with counted_replays(ChainSize) as replays:
        found, _ = play_workload(engine, 3)
    assert_same_tokens(found, expected)
    assert sum(replays) > 20
    if method == "draft_model":
        num_drafts = sum(step.num_draft_tokens for step in steps)
        assert sum(step.num_accepted_tokens for step in steps) > 0.9 * num_drafts > 100


@needs_gpu
def test_one_kernel_sums_over_ranks_that_are_two_streams() -> None:
    """The kernels of both ranks wait for each other inside one launch, so both must be on the GPU together, see
    each other's writes, and keep the parts of even and odd calls apart. One whose rank is lost must end.
    """
    from engine.kernels.triton.norm import add_norm

    size, most_rows, calls = 4096, 200, 1000
    max_bytes = most_rows * size * 2
    memories = torch.zeros(2, memory_bytes(max_bytes, 2), dtype=torch.uint8, device=DEVICE)
    addresses = torch.tensor([memory.data_ptr() for memory in memories], device=DEVICE)
    streams = [torch.cuda.Stream(DEVICE) for _ in range(2)]
    generator = torch.Generator(DEVICE).manual_seed(0)
    numbers = torch.randn(3, most_rows, size, generator=generator, device=DEVICE).to(torch.bfloat16)
    weight = torch.linspace(0.5, 2, size, device=DEVICE).to(torch.bfloat16)

    def ranks() -> list[OneShotSum]:
        return [OneShotSum(PeerMemory(memories[rank], addresses), Shard(rank, 2), max_bytes) for rank in range(2)]

    def sums(ranks: list[OneShotSum], x: torch.Tensor, parts: list[torch.Tensor]) -> list[tuple[Any, Any]]:
        found = []
        for rank, stream, part in zip(ranks, streams, parts, strict=True):
            with torch.cuda.stream(stream):
                own = x.clone()
                found.append((own, rank.add_norm(own, part, weight, 1e-5)))
        torch.cuda.synchronize()
        return found

    # To load a kernel or to allocate memory may wait for kernels that run: for ever, if these wait for a launch.
    torch.cuda.synchronize()
    first = ranks()
    for rank in first:
        rank.abort()
    torch.cuda.synchronize()
    sums(first, numbers[0], [*numbers[1:]])
    memories.zero_()
    both, draw = ranks(), random.Random(0)
    torch.cuda.synchronize()
    for call in range(calls):
        rows = draw.randint(1, most_rows)
        x, *parts = (numbers[(call + at) % 3][:rows] for at in range(3))
        found = sums(both, x, parts)
        summed = x.clone()
        normed = add_norm(summed, (parts[0].float() + parts[1].float()).to(x.dtype), weight, 1e-5)
        for own, mine in found:
            assert torch.equal(own, summed) and torch.equal(mine, normed)
        del found
    ended = torch.cuda.Event()
    with torch.cuda.stream(streams[0]):
        both[0].add_norm(numbers[0].clone(), numbers[1], weight, 1e-5)
        ended.record()
    assert not eventually(ended.query, 0.3), "it computed a sum without the other rank"
    both[0].abort()
    assert eventually(ended.query, 5.0), "it still waits for a rank that is lost"


# --- ranks ----------------------------------------------------------------------------------------------------


def processes() -> Watched:
    """Return a launcher of processes with a GPU each, or that share the only one."""
    from tests.engine.support.rank_processes import OneGpu, Watched

    return Watched() if torch.cuda.device_count() > 1 else OneGpu()


def ranks_here() -> Watched | Threads:
    """Return a launcher of processes on GPUs, or of threads on a CPU."""
    from tests.engine.support.rank_processes import Threads

    return processes() if ON_GPU else Threads()


@pytest.fixture
def nccl_in_one_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let ranks that share a GPU reach each other as those of several hosts do."""
    if ON_GPU and torch.cuda.device_count() < 2:
        monkeypatch.setenv("NCCL_HOSTID", "raydix-rank-0")
        monkeypatch.setenv("NCCL_SOCKET_IFNAME", "lo")
        monkeypatch.setenv("NCCL_NET", "Socket")


RANKS: dict[str, tuple[str, Layout, dict[str, Any]]] = {
    "one-shot sums": ("qwen3", Layout(2), {}),
    "sums of NCCL": ("qwen3", Layout(2), {"one_shot_kib": 0}),
    "experts": ("qwen3_moe", Layout(2), {"expert_parallel": True}),
    "stages": ("qwen3", Layout(1, stages=2), {}),
    "parts of KV, asked": ("mqa", Layout(2, parts=2), {}),
    "latent KV": ("deepseek_v3", Layout(2), {}),
    "parts of latent KV": ("deepseek_v3", Layout(2, parts=2), {}),
    "parts of KV in a ring": ("mqa", Layout(2, parts=2), {"ring_attention_tokens": 1}),
    "stages of two": ("qwen3", Layout(2, stages=2), {}),
    "parts of KV of four": ("qwen3", Layout(4, parts=2), {"ring_attention_tokens": 16}),
}


@needs_msgspec
@pytest.mark.usefixtures("recordings", "nccl_in_one_host")
@pytest.mark.parametrize("kind", RANKS)
def test_ranks_give_the_tokens_of_one(kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """NCCL's groups without torch's global one, its operations in graphs, hidden states between stages, memory
    that ranks map from each other, and attention with the sums of its weights. In float32, so that no token
    depends on the order of a sum.
    """
    family, layout, settings = RANKS[kind]
    num_ranks = layout.size * layout.stages
    if ON_GPU and num_ranks > 2 and torch.cuda.device_count() < num_ranks:
        pytest.skip(f"needs {num_ranks} GPUs")
    num_kv_heads = {"mqa": 1, "deepseek_v3": 8}.get(family, 2)
    model = save_tiny(family, tmp_path, num_attention_heads=8, num_key_value_heads=num_kv_heads)
    params = SamplingParams(temperature=0.8, top_p=0.9, seed=3, max_tokens=12)
    sizes: dict[str, Any] = {"device": DEVICE.type, "dtype": "float32", "max_model_len": 128}
    alone, _ = run_on_ranks(model, 1, PROMPTS, params, cuda_graphs="off", **sizes)
    with counted_replays() as replays:
        shared, _ = run_on_ranks(
            model,
            layout,
            PROMPTS,
            params,
            ranks_here(),
            cuda_graphs=GRAPHS,
            **sizes,
            **settings,
        )
    assert tokens_of_each(shared) == tokens_of_each(alone)
    assert sum(replays) >= 8
    if ON_GPU and kind == "one-shot sums":
        assert "NCCL computes all sums" not in caplog.text


@needs_msgspec
@pytest.mark.usefixtures("recordings", "nccl_in_one_host")
@pytest.mark.parametrize("kind", ["one-shot sums", "stages"])
def test_a_rank_that_is_late_changes_no_token(kind: str, tmp_path: Path) -> None:
    """The first one, on GPUs: the other must wait inside its kernels, and keep what the first has not read."""
    family, layout, settings = RANKS[kind]
    model = save_tiny(family, tmp_path, num_attention_heads=8, num_key_value_heads=2)
    sizes: dict[str, Any] = {"device": DEVICE.type, "dtype": "float32", "max_model_len": 128, **settings}
    params, launcher = SamplingParams(temperature=0, max_tokens=40), ranks_here()
    alone, _ = run_on_ranks(model, 1, PROMPTS, params, cuda_graphs="off", **sizes)
    with late_steps():
        shared, _ = run_on_ranks(model, layout, PROMPTS, params, launcher, cuda_graphs=GRAPHS, **sizes)
    assert tokens_of_each(shared) == tokens_of_each(alone)


@needs_msgspec
@pytest.mark.usefixtures("nccl_in_one_host")
@pytest.mark.parametrize("kind", ["one-shot sums", "stages"])
def test_a_rank_that_is_killed_ends_its_engine(kind: str, tmp_path: Path) -> None:
    """The kernels of the other rank wait for it, inside a graph too, and must end."""
    family, layout, settings = RANKS[kind]
    model = save_tiny(family, tmp_path, num_attention_heads=8, num_key_value_heads=2)
    launcher = processes()
    config = ranks_config(model, layout, device=DEVICE.type, dtype="float32", max_model_len=512, **settings)
    engine = Engine.from_config(config, launcher=launcher)
    events: list[StreamDelta] = []
    engine.loop.start(events.extend)
    engine.loop.submit(engine.new_request("a", PROMPTS[0], SamplingParams(0.0, max_tokens=400)))
    assert eventually(lambda: events, 60)
    os.kill(launcher.pids[0], signal.SIGKILL)
    assert eventually(lambda: engine.loop.failure is not None, 5 if ON_GPU else 60)
    assert str(engine.loop.failure).startswith("rank 1 ended, killed by signal 9")
    engine.close()
    if ON_GPU:
        torch.cuda.synchronize()  # No kernel is left that waits.
