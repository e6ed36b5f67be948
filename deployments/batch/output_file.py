"""Writes the answers to a file of requests, in the input's order, so that a run can be killed at any time.

    out.jsonl.partial    {"input_sha256": ...}        while the batch runs: a line for each answer, as they come
                         {"custom_id": "c", ...}
                         {"custom_id": "a", ...}
                         {"custom_i                   the process was killed here: this line is cut off
    out.jsonl            a, b, c                      at the end, atomically; the partial file is removed

An answer counts once its line is complete. The next run retries failed requests.
"""

from __future__ import annotations

import fcntl
import os
import uuid
from array import array
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

import msgspec

from deployments.batch.errors import BatchFileError
from deployments.batch.input_file import BatchFile, InvalidLine
from deployments.batch.runner import IGNORED_FIELDS, NoReply, Reply
from engine.base.files import open_or_create, open_regular, rewrite

_NONE = -1


class _Head(msgspec.Struct):
    input_sha256: str


class OutputResponse(msgspec.Struct):
    """The API's answer, error objects included."""

    status_code: int
    request_id: str
    body: msgspec.Raw
    headers: dict[str, str] | msgspec.UnsetType = msgspec.UNSET
    """The header that names the fields which the API ignored; missing if it ignored none."""


class OutputError(msgspec.Struct):
    """Why there is no answer of the API."""

    code: str
    message: str


class OutputLine(msgspec.Struct):
    """A line of the output: either `response` or `error` is given."""

    id: str
    custom_id: str | None
    response: OutputResponse | None = None
    error: OutputError | None = None

    @property
    def is_ok(self) -> bool:
        """Whether the request was answered successfully."""
        return self.response is not None and self.response.status_code < 400


_encoder = msgspec.json.Encoder()
_line_decoder = msgspec.json.Decoder(OutputLine)


def output_line(custom_id: str, reply: Reply | NoReply) -> OutputLine:
    """Return the line for one request."""
    if isinstance(reply, NoReply):
        return _failed_line(custom_id, OutputError("no_reply", str(reply)))
    headers = {IGNORED_FIELDS: reply.ignored_fields} if reply.ignored_fields else msgspec.UNSET
    response = OutputResponse(reply.status, reply.request_id, msgspec.Raw(reply.body), headers)
    return OutputLine(_new_id(), custom_id, response)


def _invalid_line(line: InvalidLine) -> OutputLine:
    return _failed_line(line.custom_id, OutputError("invalid_line", line.message))


def _failed_line(custom_id: str | None, error: OutputError) -> OutputLine:
    return OutputLine(_new_id(), custom_id, error=error)


def _new_id() -> str:
    return f"batch_req_{uuid.uuid4().hex}"


class PartialOutput:
    """The answers so far. Only one process at a time can have it open. A context manager."""

    def __init__(self, batch: BatchFile, path: Path, *, retry_failed: bool = False) -> None:
        """Continue the partial file of the output `path`, or begin it; with `retry_failed`, begin with the answers
        in the output. Raises BatchFileError when the files belong to another input.
        """
        self._batch, self.path = batch, path
        self.partial = path.with_name(f"{path.name}.partial")
        self._at = array("q", [_NONE]) * batch.num_lines
        """Position of each line's answer in the partial file."""
        self._is_ok = bytearray(batch.num_lines)
        if path.is_dir():
            raise BatchFileError(f"{path} is a directory: name the file to write")
        if path.exists() and not self.partial.exists() and not retry_failed:
            raise BatchFileError(
                f"{path} exists already, and a finished batch is not changed: name another file, remove it, or "
                "send its failed requests again with --retry-failed"
            )
        try:
            self._file = _open_locked(self.partial)
        except OSError as error:
            raise BatchFileError(
                f"{self.partial} cannot be written: {(error.strerror or str(error)).lower()}"
            ) from None
        try:
            self._take_up()
            if path.exists():
                self._take_over()
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> PartialOutput:
        return self

    def __exit__(self, *_: object) -> None:
        if not self._has_answers:
            self.partial.unlink(missing_ok=True)
        self._file.close()

    @property
    def _has_answers(self) -> bool:
        return any(at != _NONE for at in self._at)

    @property
    def num_bytes(self) -> int:
        """Size of the partial file."""
        return self._file.tell()

    @property
    def num_ok(self) -> int:
        """Number of requests that were answered successfully."""
        return self._is_ok.count(1)

    def is_ok(self, index: int) -> bool:
        """Return whether the request in this line was answered successfully."""
        return bool(self._is_ok[index])

    def add(self, lines: Iterable[OutputLine], reserve: Callable[[int], None] = lambda num_bytes: None) -> None:
        """Add answers, which are durable when the call returns, even if this process dies.

        `reserve` receives the new size of the file, and raises an error if that is not possible.
        """
        encoded = [(line, _encoder.encode(line) + b"\n") for line in lines]
        reserve(self._file.tell() + sum(len(data) for _, data in encoded))
        for line, data in encoded:
            self._note(line, self._file.tell())
            self._file.write(data)
        self._file.flush()

    def finish(self) -> None:
        """Write the output, in the input's order, and remove the partial file. All requests must be answered."""
        unsorted = self.path.with_name(f"{self.path.name}.tmp")
        with rewrite(unsorted) as file, open_regular(self.partial) as answers:
            for index, line in enumerate(self._batch):
                if isinstance(line, InvalidLine):
                    file.write(_encoder.encode(_invalid_line(line)) + b"\n")
                else:
                    answers.seek(self._at[index])
                    file.write(answers.readline())
            file.flush()
            os.fsync(file.fileno())
        unsorted.replace(self.path)
        self.partial.unlink()

    def split(self, answered: Path, failed: Path, unanswered: OutputError) -> tuple[int, int]:
        """Write two files in the input's order: with the requests that were answered successfully, and with
        all others. Return the number of lines of each. Requests without an answer get the error `unanswered`.
        """
        num_failed = 0
        with rewrite(answered) as good, rewrite(failed) as bad, open_regular(self.partial) as answers:
            for index, line in enumerate(self._batch):
                if self._at[index] != _NONE:
                    answers.seek(self._at[index])
                    data = answers.readline()
                else:
                    error = _invalid_line(line) if isinstance(line, InvalidLine) else None
                    data = _encoder.encode(error or _failed_line(line.custom_id, unanswered)) + b"\n"
                num_failed += not self._is_ok[index]
                (good if self._is_ok[index] else bad).write(data)
            for file in (good, bad):
                file.flush()
                os.fsync(file.fileno())
        return self._batch.num_lines - num_failed, num_failed

    def _take_up(self) -> None:
        """Read the partial file up to where it was cut off, or begin it."""
        expected = _encoder.encode(_Head(self._batch.fingerprint)) + b"\n"
        head = self._file.readline()
        if not head.endswith(b"\n"):
            self._file.seek(0)
            self._file.truncate()
            self._file.write(expected)
            self._file.flush()
            return
        if head != expected:
            raise BatchFileError(
                f"{self.partial} belongs to another input than {self._batch.path} as it is now: restore that "
                "input to continue, or remove the partial file to start again"
            )
        offset = len(head)
        for line, length in self._lines(self._file, self.partial):
            self._note(line, offset)
            offset += length
        self._file.seek(offset)
        self._file.truncate()

    def _take_over(self) -> None:
        """Copy the good answers from a finished output, whose failed requests will be sent again."""
        with open_regular(self.path) as file:
            for line, _ in self._lines(file, self.path):
                index = None if line.custom_id is None else self._batch.index(line.custom_id)
                if line.is_ok and index is not None and not self.is_ok(index):
                    self.add([line])

    def _lines(self, file: BinaryIO, path: Path) -> Iterator[tuple[OutputLine, int]]:
        """Yield the complete lines of an output, each with its length."""
        while (data := file.readline()).endswith(b"\n"):
            try:
                line = _line_decoder.decode(data)
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                raise BatchFileError(f"{path} is not the output of a batch ({error}); remove it") from None
            if line.custom_id is not None and self._batch.index(line.custom_id) is None:
                raise BatchFileError(
                    f"{path} answers the custom_id {line.custom_id[:128]!r}, which {self._batch.path} does not "
                    "have: it belongs to another input; name another file"
                )
            yield line, len(data)

    def _note(self, line: OutputLine, offset: int) -> None:
        index = self._batch.index(line.custom_id or "")
        assert index is not None, "the answer is to a request of the file"
        if not self._is_ok[index]:
            self._at[index], self._is_ok[index] = offset, line.is_ok


def _open_locked(path: Path) -> BinaryIO:
    """Open a file for reading and writing that no other process has open. Raises BatchFileError, OSError."""
    file = open_or_create(path)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise BatchFileError(f"another process is writing {path}; wait for it, or end it") from None
    return file
