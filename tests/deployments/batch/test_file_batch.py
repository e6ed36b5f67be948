"""A file's answers come in its order, and a run that was killed anywhere is continued by the next."""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployments.batch.errors import BatchFileError, BatchStopped
from deployments.batch.file_batch import BatchProgress, run_file_batch
from deployments.batch.input_file import BatchFile
from deployments.batch.output_file import PartialOutput
from deployments.batch.runner import BatchRunner, NoReply, Reply
from deployments.config.settings import BatchSettings
from tests.deployments.batch.support.batch_files import Shuffling, read_output, request_line, write_input


class Folder:
    """An input and an output."""

    def __init__(self, root: Path, *lines: str) -> None:
        self.input, self.output = write_input(root / "in.jsonl", *lines), root / "out.jsonl"
        self.partial = root / "out.jsonl.partial"
        self.progress: list[tuple[int, int, int]] = []

    def run(self, api: Any, *, retry_failed: bool = False, **fields: Any) -> BatchProgress:
        async def scenario(output: PartialOutput) -> BatchProgress:
            runner = BatchRunner(api.post, BatchSettings(max_in_flight=4, max_attempts=1))
            return await run_file_batch(batch, output, runner, fields, self._note)

        batch = BatchFile(self.input)
        with PartialOutput(batch, self.output, retry_failed=retry_failed) as output:
            return asyncio.run(scenario(output))

    def _note(self, progress: BatchProgress) -> None:
        self.progress.append((progress.num_done, progress.num_failed, progress.total))

    def answered(self) -> list[tuple[str | None, Any]]:
        """Each line's custom_id, and the text or the status or the code of its answer."""
        return [(line["custom_id"], _gist(line)) for line in read_output(self.output)]


def _gist(line: dict[str, Any]) -> Any:
    if line["response"] is None:
        return line["error"]["code"]
    response = line["response"]
    return response["body"]["text"] if response["status_code"] == 200 else response["status_code"]


NAMES = [f"r{number}" for number in range(12)]
NAMED = {"x-raydix-ignored-fields": "x"}
LINES = [request_line(name) for name in NAMES]


def test_answers_are_in_the_order_of_the_input_in_the_format_of_openai(tmp_path: Path) -> None:
    folder = Folder(tmp_path, *LINES)
    progress = folder.run(Shuffling())
    assert (progress.num_ok, progress.num_failed, progress.total) == (12, 0, 12)
    assert folder.answered() == [(name, name) for name in NAMES]
    first, *_ = lines = read_output(folder.output)
    assert first.pop("id").startswith("batch_req_")
    response = {"status_code": 200, "request_id": "req-r0", "body": {"text": "r0"}}
    assert first == {"custom_id": "r0", "response": response, "error": None}
    assert len({line.get("id") for line in lines}) == 12
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl", "out.jsonl"]


def test_errors_are_lines_too(tmp_path: Path) -> None:
    class Api(Shuffling):
        async def post(self, url: str, body: bytes) -> Reply:
            reply = await super().post(url, body)
            if b"lost" in body:
                raise NoReply("the connection broke", was_sent=True)
            return reply

    folder = Folder(tmp_path, request_line("a"), "nonsense", request_line("bad"), request_line("lost"), LINES[0])
    progress = folder.run(Api(failing=frozenset({"bad"})))
    assert (progress.num_ok, progress.num_failed, progress.total) == (2, 3, 5)
    expected = [("a", "a"), (None, "invalid_line"), ("bad", 400), ("lost", "no_reply"), ("r0", "r0")]
    assert folder.answered() == expected
    _, invalid, bad, lost, _ = read_output(folder.output)
    assert "This line is not valid JSON" in invalid["error"]["message"]
    assert bad["response"]["body"] == {"error": {"message": "bad"}} and bad["error"] is None
    assert lost["error"] == {"code": "no_reply", "message": "the connection broke"} and lost["response"] is None


def test_ignored_fields_of_a_request_are_named_in_its_line_and_stay_there(tmp_path: Path) -> None:
    folder = Folder(tmp_path, request_line("a", x=1), request_line("b"), request_line("c", x=1))
    folder.run(Shuffling(failing=frozenset("c")))
    folder.run(Shuffling(), retry_failed=True)
    found = [line["response"] for line in read_output(folder.output)]
    assert [response.get("headers") for response in found] == [NAMED, None, NAMED]
    assert [*found[1]] == ["status_code", "request_id", "body"]  # as OpenAI's lines are
    folder.run(Shuffling(failing=frozenset("abc")), retry_failed=True)
    assert [line["response"] for line in read_output(folder.output)] == found


def test_the_progress_is_reported_as_answers_come(tmp_path: Path) -> None:
    folder = Folder(tmp_path, "nonsense", *LINES[:3])
    folder.run(Shuffling(failing=frozenset({"r1"})))
    done = [done for done, _, _ in folder.progress]
    assert done[0] == 1 and done[-1] == 4 and done == sorted(set(done))
    assert folder.progress[0] == (1, 1, 4) and folder.progress[-1] == (4, 2, 4)


def test_fields_are_given_to_bodies_that_lack_them(tmp_path: Path) -> None:
    folder, api = Folder(tmp_path, request_line("a"), request_line("b", priority=3)), Shuffling()
    folder.run(api, priority=10)
    assert {body["prompt"]: body["priority"] for body in api.bodies} == {"a": 10, "b": 3}


class Killed(Exception):
    """Stands for the end of the process."""


class KilledAt(Shuffling):
    """Ends the process with its n-th request."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self._count = count

    async def post(self, url: str, body: bytes) -> Reply:
        if len(self.bodies) == self._count:
            raise Killed
        return await super().post(url, body)


def test_requests_answered_before_a_run_was_killed_are_not_sent_again(tmp_path: Path) -> None:
    folder = Folder(tmp_path, *LINES)
    with pytest.raises(Killed):
        folder.run(KilledAt(9))
    assert not folder.output.exists()
    kept = {line["custom_id"] for line in read_output(folder.partial) if "custom_id" in line}
    assert kept
    api = Shuffling()
    folder.progress.clear()
    folder.run(api)
    assert set(api.prompts) == set(NAMES) - kept and folder.progress[0] == (len(kept), 0, 12)
    assert folder.answered() == [(name, name) for name in NAMES]
    assert not folder.partial.exists()


@contextmanager
def temporary(*lines: str) -> Iterator[Folder]:
    with tempfile.TemporaryDirectory() as root:
        yield Folder(Path(root), *lines)


@given(st.data())
def test_a_partial_file_that_is_cut_anywhere_is_continued(data: st.DataObject) -> None:
    """The kernel may have written any part of the last line, and a crash may take more."""
    failing = data.draw(st.frozensets(st.sampled_from(NAMES), max_size=3))
    with temporary(*LINES, "nonsense") as folder:
        with pytest.raises(Killed):
            folder.run(KilledAt(data.draw(st.integers(6, 11))))
        content = folder.partial.read_bytes()
        cut = len(content) * data.draw(st.integers(0, 1000)) // 1000  # its length depends on threads
        folder.partial.write_bytes(content[:cut])
        kept = {line["custom_id"] for line in _complete(content[:cut])}
        api = Shuffling(data.draw(st.integers(0, 3)), failing)
        folder.run(api)
        assert sorted(api.prompts) == sorted(set(NAMES) - kept)
        expected = [(name, 400 if name in failing - kept else name) for name in NAMES]
        assert folder.answered() == [*expected, (None, "invalid_line")]


def _complete(content: bytes) -> list[dict[str, Any]]:
    whole = content[: content.rfind(b"\n") + 1]
    return [json.loads(line) for line in whole.splitlines()[1:]]


def test_requests_that_failed_in_a_killed_run_are_sent_again(tmp_path: Path) -> None:
    folder = Folder(tmp_path, *LINES)

    class Api(KilledAt):
        async def post(self, url: str, body: bytes) -> Reply:
            reply = await super().post(url, body)
            return Reply(400, b"{}") if len(self.bodies) <= 6 else reply

    with pytest.raises(Killed):
        folder.run(Api(9))
    folder.run(Shuffling())
    assert folder.answered() == [(name, name) for name in NAMES]


def test_a_finished_output_is_not_touched(tmp_path: Path) -> None:
    folder = Folder(tmp_path, *LINES)
    folder.run(Shuffling())
    before = folder.output.read_bytes()
    with pytest.raises(BatchFileError, match="exists already"):
        folder.run(Shuffling())
    assert folder.output.read_bytes() == before and not folder.partial.exists()


def test_only_the_failed_requests_of_a_finished_output_are_sent_again_when_asked(tmp_path: Path) -> None:
    folder = Folder(tmp_path, *LINES, "nonsense")
    folder.run(Shuffling(failing=frozenset({"r2", "r5"})))
    before = read_output(folder.output)
    write_input(folder.input, *LINES, request_line("mended"))
    api = Shuffling(failing=frozenset({"r5"}))
    folder.run(api, retry_failed=True)
    assert sorted(api.prompts) == ["mended", "r2", "r5"]
    expected = [(name, 400 if name == "r5" else name) for name in NAMES]
    assert folder.answered() == [*expected, ("mended", "mended")]
    after = read_output(folder.output)
    assert [line for line in after if line in before] == [
        line for line in before if line["custom_id"] not in (None, "r2", "r5")
    ]


def test_another_try_that_is_killed_loses_nothing_and_is_continued(tmp_path: Path) -> None:
    folder = Folder(tmp_path, *LINES)
    folder.run(Shuffling(failing=frozenset(NAMES[:6])))
    with pytest.raises(Killed):
        folder.run(KilledAt(4), retry_failed=True)
    assert [answer for _, answer in folder.answered()] == [400] * 6 + NAMES[6:]
    api = Shuffling()
    folder.run(api)
    assert folder.answered() == [(name, name) for name in NAMES]
    assert set(api.prompts) <= set(NAMES[:6])


def test_a_batch_that_stops_keeps_its_answers(tmp_path: Path) -> None:
    class Api(Shuffling):
        async def post(self, url: str, body: bytes) -> Reply:
            return await super().post(url, body) if len(self.bodies) < 6 else Reply(401, b"{}")

    folder = Folder(tmp_path, *LINES)
    with pytest.raises(BatchStopped):
        folder.run(Api())
    assert not folder.output.exists()
    folder.run(Shuffling())
    assert folder.answered() == [(name, name) for name in NAMES]


def test_a_partial_file_of_another_input_is_refused(tmp_path: Path) -> None:
    folder = Folder(tmp_path, *LINES)
    with pytest.raises(Killed):
        folder.run(KilledAt(9))
    before = folder.partial.read_bytes()
    write_input(folder.input, *LINES[:-1], request_line("r11", max_tokens=5))
    with pytest.raises(BatchFileError, match="belongs to another input"):
        folder.run(Shuffling())
    assert folder.partial.read_bytes() == before


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("a poem\n", "is not the output of a batch"),
        ('{"id": "x", "custom_id": "other", "response": null, "error": null}\n', "'other', which"),
    ],
)
def test_a_file_that_is_not_the_batch_s_output_is_refused_and_stays(
    tmp_path: Path, content: str, message: str
) -> None:
    folder = Folder(tmp_path, *LINES)
    folder.output.write_text(content)
    with pytest.raises(BatchFileError, match=message):
        folder.run(Shuffling(), retry_failed=True)
    assert folder.output.read_text() == content


def test_two_runs_at_a_time_are_refused(tmp_path: Path) -> None:
    folder = Folder(tmp_path, *LINES)
    batch = BatchFile(folder.input)
    with PartialOutput(batch, folder.output), pytest.raises(BatchFileError, match="another process is writing"):
        PartialOutput(batch, folder.output)


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    folder = Folder(tmp_path, *LINES)
    with pytest.raises(BatchFileError, match=r"partial cannot be written: no such file"):
        PartialOutput(BatchFile(folder.input), tmp_path / "nowhere/out.jsonl")


def test_a_run_without_answers_leaves_no_file(tmp_path: Path) -> None:
    folder = Folder(tmp_path, *LINES)
    with pytest.raises(Killed):
        folder.run(KilledAt(0))
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]
