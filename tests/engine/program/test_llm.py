"""The offline API with the embedded model."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from array import array
from typing import Any

import pytest
import torch

from engine import LLM, BeamParams, SamplingParams
from engine.base.errors import ModelLoadError, NeverFits
from engine.program.engine import Engine
from engine.settings.config import EngineConfig

QUESTION = [{"role": "user", "content": "What does itertools.chain do?"}]


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("demo", kv_pages=600, max_waiting=8)


def test_it_answers_and_finds_the_prompt_the_second_time(llm: LLM) -> None:
    first, second = llm.chat(QUESTION)[0], llm.chat(QUESTION)[0]
    assert first.text.startswith("Return a chain object")
    assert (first.finish_reason, second.text) == ("stop", first.text)
    assert second.cached_tokens == len(second.prompt_ids) - 1


def test_many_more_prompts_than_the_queue_holds(llm: LLM) -> None:
    outputs = llm.generate([f"number {i}" for i in range(40)], SamplingParams(max_tokens=3, temperature=0))
    assert len(outputs) == 40
    assert all(1 <= len(output.token_ids) <= 3 for output in outputs)


def test_token_ids_and_strings_are_the_same_prompt(llm: LLM) -> None:
    ids = llm.tokenizer.encode("def main(")
    params = SamplingParams(max_tokens=8, seed=3, ignore_eos=True)
    by_ids, by_text = llm.generate(ids, params)[0], llm.generate("def main(", params)[0]
    assert by_ids.token_ids == by_text.token_ids


def test_a_stop_string_ends_the_text_before_it(llm: LLM) -> None:
    whole = llm.chat(QUESTION)[0].text
    stop = whole[20:26]
    output = llm.chat(QUESTION, SamplingParams(temperature=0, max_tokens=64, stop=(stop,)))[0]
    assert (output.text, output.finish_reason) == (whole[: whole.index(stop)], "stop")
    account = llm.engine.cache.account()
    assert account.locked == account.private == 0


def test_seeds_repeat_and_differ(llm: LLM) -> None:
    def text(seed: int) -> str:
        return llm.generate("The", SamplingParams(temperature=1.5, max_tokens=16, seed=seed, ignore_eos=True))[
            0
        ].text

    assert text(1) == text(1)
    assert len({text(seed) for seed in range(6)}) > 1


def test_a_beam_search_returns_its_best_and_the_others(llm: LLM) -> None:
    greedy = llm.generate("The", SamplingParams(temperature=0, max_tokens=12))[0]
    narrow, wide = llm.generate(
        ["The"] * 2, [SamplingParams(max_tokens=12, beams=BeamParams(width, min(width, 3))) for width in (1, 6)]
    )
    assert narrow.token_ids == greedy.token_ids and narrow.alternatives == []
    found = [wide, *wide.alternatives]
    scores = [output.score for output in found if output.score is not None]
    assert len(found) == 3 and scores == sorted(scores, reverse=True)
    assert narrow.score is not None and scores[0] >= narrow.score
    assert len({output.text for output in found}) == 3
    for output in found:
        assert output.text == llm.tokenizer.decode(output.token_ids, skip_special_tokens=True)


def test_bad_calls_are_errors_that_name_the_expected_values(llm: LLM) -> None:
    with pytest.raises(ValueError, match="unknown setting 'page_sizes'; did you mean page_size"):
        LLM("demo", page_sizes=4)
    with pytest.raises(NeverFits, match="empty"):
        llm.generate([[]])
    with pytest.raises(ValueError, match="not in the vocabulary of 4096"):
        llm.generate([[5000]])
    for outside in (4096, -1):
        ids = array("i", [0, 4095, outside, 7])  # as the wire brings them
        with pytest.raises(ValueError, match=f"token id {outside} in the prompt is not in the vocabulary of 4096"):
            llm.engine.new_request("r", ids, SamplingParams())
    with pytest.raises(ValueError, match="2 prompts and 1 sampling"):
        llm.generate(["a", "b"], [SamplingParams()])


def test_a_program_may_end_while_a_step_is_in_flight() -> None:
    """An interpreter that exits in the middle of a model's step would crash."""
    program = """
from engine import LLM, BeamParams, SamplingParams
engine = LLM("demo").engine
engine.loop.submit(engine.new_request("a", [1, 2, 3], SamplingParams(max_tokens=50)))
engine.loop.step()
assert engine.loop.has_work
"""
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=300, check=False
    )
    assert (ended.returncode, ended.stderr) == (0, "")


def test_the_offline_api_needs_nothing_that_a_bare_machine_lacks() -> None:
    """The API imports no package that only serving, faster hashes, several ranks or grammars need."""
    script = textwrap.dedent("""
        import sys
        for name in ("msgspec", "xxhash", "llguidance", "ray", "zmq", "pydantic"):
            sys.modules[name] = None
        from engine import LLM, SamplingParams
        llm = LLM("demo", device="cpu", kv_pages=64, threads=1)
        params = SamplingParams(max_tokens=4, ignore_eos=True)
        print(len(llm.generate([5, 6, 7], params, progress=False)[0].token_ids))
    """)
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert ran.stdout.strip() == "4", ran.stderr


@pytest.mark.parametrize("given", [{}, {"kv_memory_share": 0.5, "max_step_tokens": 512}])
def test_on_a_gpu_it_takes_most_of_the_memory_unless_told_otherwise(
    monkeypatch: pytest.MonkeyPatch, given: dict[str, Any]
) -> None:
    taken: list[EngineConfig] = []

    def no_engine(config: EngineConfig) -> Engine:
        taken.append(config)
        raise ModelLoadError("this is as far as it goes")

    monkeypatch.setattr(Engine, "from_config", no_engine)
    for has_gpu in (False, True):
        monkeypatch.setattr(torch.cuda, "is_available", lambda has_gpu=has_gpu: has_gpu)
        with pytest.raises(ModelLoadError, match="as far"):
            LLM("demo", **given)
    found = [(config.kv_memory_share, config.max_step_tokens) for config in taken]
    assert found == ([(0.5, 512)] * 2 if given else [(0.25, 2048), (0.9, 8192)])
