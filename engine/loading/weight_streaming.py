"""Reads a checkpoint with several threads through a few buffers, directly into the model's memory.

    files ──threads: preadv, a chunk each──▶ ring of reused (pinned) buffers ──copies on a side stream──▶ the model
                                                                         or ──▶ staging ──store──▶ the model

A tensor that the model keeps as it is in the file (`TensorGroup.into`) is copied there directly. One that is
converted, rounded or unpacked is first read into staging memory on the device, a bounded number of bytes ahead.
Without a GPU, as in tests, the same code copies through ordinary buffers. With a mapped file, one thread would
read it in page faults of some hundred KiB, which is slow on remote storage.
"""

from __future__ import annotations

import json
import os
import struct
import threading
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import NamedTuple

import torch

from engine.base.errors import ModelLoadError
from engine.base.files import open_fd, open_regular
from engine.loading.tensor_groups import TensorGroup

_MAX_HEADER_BYTES = 100_000_000
"""The limit of the safetensors library."""
NUM_THREADS = 8
CHUNK_BYTES = 16 * 2**20
"""Bytes per read. Each thread has two buffers of this size: it fills one while the other is copied."""
AHEAD_BYTES = 2**30
"""Device memory for staging, in bytes; a larger group is read by itself."""
_DTYPES = {
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F8_E4M3": torch.float8_e4m3fn,
    "I32": torch.int32,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I64": torch.int64,
}


class Stored(NamedTuple):
    """The place of a tensor in a file."""

    path: Path
    offset: int
    """Offset from the file's beginning, in bytes."""
    num_bytes: int
    dtype: torch.dtype
    shape: tuple[int, ...]


def stored_tensors(paths: Sequence[Path]) -> dict[str, Stored]:
    """Return the places of the tensors in safetensors files, by name, without those of types that no model has.

    Raises ModelLoadError. Format: https://github.com/huggingface/safetensors#format
    """
    found: dict[str, Stored] = {}
    for path in paths:
        try:
            with open_regular(path) as file:
                (length,) = struct.unpack("<Q", file.read(8))
                if length > _MAX_HEADER_BYTES:
                    raise ValueError(f"its header would have {length} bytes")
                header = json.loads(file.read(length))
            for name, entry in header.items():
                if name != "__metadata__" and entry["dtype"] in _DTYPES:
                    first, end = entry["data_offsets"]
                    dtype, shape = _DTYPES[entry["dtype"]], tuple(entry["shape"])
                    found[name] = Stored(path, 8 + length + first, end - first, dtype, shape)
        except (
            OSError,
            ArithmeticError,
            ValueError,
            LookupError,
            TypeError,
            AttributeError,
            RecursionError,
            struct.error,
        ) as error:
            raise ModelLoadError(
                f"{path} is not a complete safetensors file ({error!r}); download it again"
            ) from error
    return found


def stream_groups(
    stored: Mapping[str, Stored],
    groups: Sequence[TensorGroup],
    device: torch.device,
    *,
    num_threads: int = NUM_THREADS,
    chunk_bytes: int = CHUNK_BYTES,
    ahead_bytes: int = AHEAD_BYTES,
) -> None:
    """Read all groups from the places of their tensors and store them in order. Returns when all are in place.

    Raises ModelLoadError if a file ends early or cannot be read. Its threads have then always ended.
    """
    with _ReaderThreads(device, num_threads, chunk_bytes) as threads:
        waiting: deque[tuple[_Read, TensorGroup]] = deque()
        ahead = 0
        for group in groups:
            read = _Read.of(group, stored, device)
            while waiting and ahead + read.staged_bytes > ahead_bytes:
                ahead -= _finish(threads, *waiting.popleft())
            threads.submit(read)
            ahead += read.staged_bytes
            waiting.append((read, group))
        while waiting:
            _finish(threads, *waiting.popleft())


def _finish(threads: _ReaderThreads, read: _Read, group: TensorGroup) -> int:
    """Wait until a group is read, and store it; returns the bytes of staging memory that this frees."""
    threads.wait(read)
    if read.staged_bytes:
        group.store(read.targets)
    read.targets = []
    return read.staged_bytes


@dataclass(slots=True)
class _Read:
    """A group that is being read."""

    sources: list[Stored]
    targets: list[torch.Tensor]
    """Contiguous memory for each source."""
    staged_bytes: int
    """Bytes of targets that are not the model's own memory."""
    ready: torch.cuda.Event | None
    """After this event the targets may be written: earlier work may still read their memory."""
    chunks_left: int = 0

    @classmethod
    def of(cls, group: TensorGroup, stored: Mapping[str, Stored], device: torch.device) -> _Read:
        sources = [stored[tensor.name] for tensor in group.tensors]
        into = group.into() if group.into is not None else None
        first = sources[0]
        if into is not None and (into.dtype, into.is_contiguous(), into.shape) == (first.dtype, True, first.shape):
            targets, staged = [into], 0
        else:
            targets = [torch.empty(source.shape, dtype=source.dtype, device=device) for source in sources]
            staged = sum(target.nbytes for target in targets)
        ready = None
        if device.type == "cuda":
            ready = torch.cuda.Event()
            ready.record(torch.cuda.current_stream(device))
        return cls(sources, targets, staged, ready)


class _FileChunk(NamedTuple):
    read: _Read
    path: Path
    offset: int
    target: torch.Tensor
    """uint8 [bytes of the chunk]."""


class _ReaderThreads:
    """The reading threads. They read chunks in the order in which these were submitted."""

    def __init__(self, device: torch.device, num_threads: int, chunk_bytes: int) -> None:
        self._device, self._chunk_bytes = device, chunk_bytes
        self._chunks: SimpleQueue[_FileChunk | None] = SimpleQueue()
        self._changed = threading.Condition()
        """Guards `chunks_left` of reads, and `_error`: the first error, which stops all reading."""
        self._error: BaseException | None = None
        self._threads = [
            threading.Thread(target=self._work, name=f"raydix-weights-{index}", daemon=True)
            for index in range(num_threads)
        ]

    def __enter__(self) -> _ReaderThreads:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self._fail(RuntimeError("loading has ended"))
        for _thread in self._threads:
            self._chunks.put(None)
        for thread in self._threads:
            thread.join()

    def submit(self, read: _Read) -> None:
        """Queue a group for reading."""
        chunks = list(self._split(read))
        read.chunks_left = len(chunks)
        for chunk in chunks:
            self._chunks.put(chunk)

    def wait(self, read: _Read) -> None:
        """Wait until a group is in place. Raises ModelLoadError if some of it could not be read."""
        with self._changed:
            self._changed.wait_for(lambda: not read.chunks_left or self._error is not None)
            if self._error is not None:
                raise self._error

    def _split(self, read: _Read) -> Iterator[_FileChunk]:
        for source, target in zip(read.sources, read.targets, strict=True):
            data = target.reshape(-1).view(
                torch.uint8
            )  # reshape: a tensor without dimensions cannot be viewed as bytes
            for first in range(0, source.num_bytes, self._chunk_bytes):
                part = data[first : first + self._chunk_bytes]
                yield _FileChunk(read, source.path, source.offset + first, part)

    def _work(self) -> None:
        try:
            buffers = _ReaderBuffers(self._device, self._chunk_bytes)
            files: dict[Path, int] = {}
            try:
                self._serve(buffers, files)
            finally:
                buffers.finish()
                for file in files.values():
                    os.close(file)
        except BaseException as error:
            self._fail(error)

    def _serve(self, buffers: _ReaderBuffers, files: dict[Path, int]) -> None:
        while (chunk := self._next(buffers)) is not None:
            if self._error is not None:
                continue  # empties the queue
            self._done(buffers.finish(keep=_BUFFERS - 1))
            buffer = buffers.buffer(len(chunk.target))
            if chunk.path not in files:
                files[chunk.path] = _open(chunk.path)
            _read_exactly(files[chunk.path], buffer, chunk)
            buffers.copy(buffer, chunk)

    def _next(self, buffers: _ReaderBuffers) -> _FileChunk | None:
        try:
            return self._chunks.get_nowait()
        except Empty:  # The submitter may wait for unfinished copies.
            self._done(buffers.finish())
            return self._chunks.get()

    def _done(self, chunks: Sequence[_FileChunk]) -> None:
        if chunks:
            with self._changed:
                for chunk in chunks:
                    chunk.read.chunks_left -= 1
                self._changed.notify_all()

    def _fail(self, error: BaseException) -> None:
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()


_BUFFERS = 2  # per thread


class _ReaderBuffers:
    """One thread's buffers, used in turn, and the stream that copies them."""

    def __init__(self, device: torch.device, size: int) -> None:
        is_gpu = device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if is_gpu else None
        self._buffers = [torch.empty(size, dtype=torch.uint8, pin_memory=is_gpu) for _ in range(_BUFFERS)]
        self._copying: deque[tuple[_FileChunk, torch.cuda.Event | None]] = deque()

    def buffer(self, size: int) -> torch.Tensor:
        """Return the buffer that has been free the longest; at least one must be free."""
        return self._buffers[0][:size]

    def copy(self, buffer: torch.Tensor, chunk: _FileChunk) -> None:
        """Begin to copy the buffer that `buffer` returned last to the chunk's target."""
        event = None
        if self._stream is None:
            chunk.target.copy_(buffer)
        else:
            assert chunk.read.ready is not None
            with torch.cuda.stream(self._stream):
                self._stream.wait_event(chunk.read.ready)
                chunk.target.copy_(buffer, non_blocking=True)
                event = torch.cuda.Event()
                event.record(self._stream)
        self._copying.append((chunk, event))
        self._buffers.append(self._buffers.pop(0))

    def finish(self, keep: int = 0) -> list[_FileChunk]:
        """Wait until at most `keep` copies are under way; returns the chunks that are complete."""
        complete = []
        while len(self._copying) > keep:
            chunk, event = self._copying.popleft()
            if event is not None:
                event.synchronize()
            complete.append(chunk)
        return complete


def _open(path: Path) -> int:
    try:
        return open_fd(path)
    except OSError as error:
        raise ModelLoadError(f"{path} cannot be opened: {error}; download the model again") from error


def _read_exactly(file: int, buffer: torch.Tensor, chunk: _FileChunk) -> None:
    """Fill the buffer from the chunk's offset in the file. Raises ModelLoadError."""
    memory, read = buffer.numpy().data, 0
    while read < len(memory):
        try:
            count = os.preadv(file, [memory[read:]], chunk.offset + read)
        except OSError as error:
            raise ModelLoadError(
                f"{chunk.path} cannot be read at byte {chunk.offset + read}: {error}; check its storage"
            ) from error
        if not count:
            raise ModelLoadError(
                f"{chunk.path} ends at byte {chunk.offset + read}, its header says there is more: it is not "
                "complete; download the model again"
            )
        read += count
