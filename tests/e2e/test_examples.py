"""The programs in examples/ that need a server, against the running application."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from examples import background_response, load_test, reconnect, streamed_tool_call, structured_output
from tests.e2e.conftest import Service

pytestmark = pytest.mark.e2e

Run = Callable[..., str]


@pytest.fixture
def run(base_url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Run an example's `main` with these arguments and the application's URL; returns what it printed."""

    def run_main(main: Callable[[], None], *arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", ["example", *arguments, "--url", base_url])
        main()
        return capsys.readouterr().out

    return run_main


def test_a_tool_is_called_and_its_result_sent_back(run: Run) -> None:
    called, answer = run(streamed_tool_call.main, "What is 6 times 7?", "--force").splitlines()
    assert (call := re.fullmatch(r"Multiply\(a=(-?\d+) b=(-?\d+)\) = (-?\d+)", called))
    assert int(call[1]) * int(call[2]) == int(call[3])
    assert answer


def test_a_chat_without_a_call_is_streamed(run: Run) -> None:
    assert run(streamed_tool_call.main, "What does math.sqrt do?") == "Return the square root of x.\n"


@pytest.mark.parametrize("main", [reconnect.main, background_response.main])
def test_an_answer_that_could_be_continued_is_read_to_its_end(run: Run, main: Callable[[], None]) -> None:
    """How they continue, `tests/examples/test_reconnect.py` tests."""
    assert run(main, "What does math.sqrt do?") == "Return the square root of x.\n"


def test_a_pydantic_class_is_filled_in(run: Run) -> None:
    printed = run(structured_output.main, "Is itertools.chain a class? Rate it.")
    assert structured_output.Review.model_validate_json(printed)


def test_a_data_set_is_answered(
    service: Service, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("pyarrow", reason="Ray Data is not installed here: pip install 'ray[data]'")
    from examples import ray_data

    questions = {f"What does {name} do?" for name in ("math.sqrt", "os.path.join", "shutil.copy")}
    source, target = tmp_path / "prompts.jsonl", tmp_path / "answers"
    source.write_text("".join(json.dumps({"prompt": question}) + "\n" for question in questions))
    monkeypatch.setattr(sys, "argv", ["example", str(source), str(target)])
    ray_data.main()
    rows = [json.loads(line) for path in target.glob("*.json") for line in path.read_text().splitlines()]
    assert {row["prompt"] for row in rows} == questions and len(rows) == 3
    assert all(row["answer"] and row["error"] is None for row in rows)


def test_a_load_is_put_on_the_server_and_drawn(run: Run, tmp_path: Path) -> None:
    printed = run(load_test.main, str(tmp_path / "load.png"), "--users", "3", "--requests", "7")
    assert [line.partition(":")[0] for line in printed.splitlines()] == ["TTFT of 7 answers", "ITL of 7 answers"]
    assert (tmp_path / "load.png").read_bytes().startswith(b"\x89PNG")
