"""A checkpoint read by several threads at once, through a few buffers, straight into where its weights belong.

    files ──threads: preadv, a chunk each──▶ ring of reused (pinned) buffers ──copies on a side stream──▶ the model
                                                                         or ──▶ staging ──store──▶ the model

What a file holds as the model does (`Piece.into`) goes there as it is. What is converted, rounded or unpacked on
its way is read into memory of the device first, a bounded number of bytes ahead of the work. Without a GPU the
same code copies with ordinary buffers: so it is tested. A mapped file would be read by one thread, in page faults
of some hundred KiB: slow where storage is far away.
"""

from __future__ import annotations

import json
import os
import struct
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import NamedTuple

import torch

from engine.loading.pieces import Piece
from engine.models.errors import ModelLoadError

NUM_THREADS = 8
CHUNK_BYTES = 16 * 2**20
"""Of one read. Each thread has two buffers of this size: one is read into while the other is copied."""
AHEAD_BYTES = 2**30
"""Of the device's memory for what is converted on its way; a piece larger than this is read alone."""
_DTYPES = {
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F8_E4M3": torch.float8_e4m3fn,
    "I32": torch.int32,
    "I64": torch.int64,
}


class Stored(NamedTuple):
    """Where a tensor lies in a file."""

    path: Path
    offset: int
    """From the file's beginning, in bytes."""
    num_bytes: int
    dtype: torch.dtype
    shape: tuple[int, ...]


def stored_tensors(paths: Sequence[Path]) -> dict[str, Stored]:
    """Where the tensors of safetensors files are, by name; those of types that no model has are left out.

    Raises ModelLoadError. Format: https://github.com/huggingface/safetensors#format
    """
    found: dict[str, Stored] = {}
    for path in paths:
        try:
            with path.open("rb") as file:
                (length,) = struct.unpack("<Q", file.read(8))
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
            struct.error,
        ) as error:
            raise ModelLoadError(
                f"{path} is not a complete safetensors file ({error!r}); download it again"
            ) from error
    return found


def stream_pieces(
    paths: Sequence[Path],
    pieces: Sequence[Piece],
    device: torch.device,
    *,
    num_threads: int = NUM_THREADS,
    chunk_bytes: int = CHUNK_BYTES,
    ahead_bytes: int = AHEAD_BYTES,
) -> None:
    """Read all pieces from these files and store them, in their order. Returns when all is in place.

    Raises ModelLoadError when a file ends early or cannot be read; whatever happens, its threads have ended.
    """
    stored = stored_tensors(paths)
    with _Ring(device, num_threads, chunk_bytes) as ring:
        waiting: deque[tuple[_Read, Piece]] = deque()
        ahead = 0
        for piece in pieces:
            read = _Read.of(piece, stored, device)
            while waiting and ahead + read.staged_bytes > ahead_bytes:
                ahead -= _finish(ring, *waiting.popleft())
            ring.submit(read)
            ahead += read.staged_bytes
            waiting.append((read, piece))
        while waiting:
            _finish(ring, *waiting.popleft())


def _finish(ring: _Ring, read: _Read, piece: Piece) -> int:
    """Wait until a piece is read, store it, and tell how much memory that frees, in bytes."""
    ring.wait(read)
    if read.staged_bytes:
        piece.store(read.targets)
    read.targets = []
    return read.staged_bytes


@dataclass(slots=True)
class _Read:
    """A piece on its way."""

    sources: list[Stored]
    targets: list[torch.Tensor]
    """Contiguous memory for each of them."""
    staged_bytes: int
    """Of targets that are not the model's own memory."""
    ready: torch.cuda.Event | None
    """From when on the targets may be written: they may lie where work before them still reads."""
    chunks_left: int = 0

    @classmethod
    def of(cls, piece: Piece, stored: dict[str, Stored], device: torch.device) -> _Read:
        sources = [stored[tensor.name] for tensor in piece.tensors]
        into = piece.into() if piece.into is not None else None
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


class _Chunk(NamedTuple):
    read: _Read
    path: Path
    offset: int
    target: torch.Tensor
    """uint8 [bytes of the chunk]."""


class _Ring:
    """The threads and their buffers. Chunks are read in the order in which they were submitted."""

    def __init__(self, device: torch.device, num_threads: int, chunk_bytes: int) -> None:
        self._device, self._chunk_bytes = device, chunk_bytes
        self._chunks: SimpleQueue[_Chunk | None] = SimpleQueue()
        self._changed = threading.Condition()
        """Guards what reads have left, and `_error`: the first one, after which nothing more is read."""
        self._error: BaseException | None = None
        self._threads = [
            threading.Thread(target=self._work, name=f"raydix-weights-{index}", daemon=True)
            for index in range(num_threads)
        ]

    def __enter__(self) -> _Ring:
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
        """Have a piece read."""
        chunks = list(self._split(read))
        read.chunks_left = len(chunks)
        for chunk in chunks:
            self._chunks.put(chunk)

    def wait(self, read: _Read) -> None:
        """Until all of it is in place. Raises ModelLoadError when something could not be read."""
        with self._changed:
            self._changed.wait_for(lambda: not read.chunks_left or self._error is not None)
            if self._error is not None:
                raise self._error

    def _split(self, read: _Read) -> Iterator[_Chunk]:
        for source, target in zip(read.sources, read.targets, strict=True):
            data = target.reshape(-1).view(torch.uint8)  # reshape: one without dimensions has no bytes to view
            for first in range(0, source.num_bytes, self._chunk_bytes):
                part = data[first : first + self._chunk_bytes]
                yield _Chunk(read, source.path, source.offset + first, part)

    def _work(self) -> None:
        try:
            lane = _Lane(self._device, self._chunk_bytes)
            files: dict[Path, int] = {}
            try:
                self._serve(lane, files)
            finally:
                lane.finish()
                for file in files.values():
                    os.close(file)
        except BaseException as error:
            self._fail(error)

    def _serve(self, lane: _Lane, files: dict[Path, int]) -> None:
        while (chunk := self._next(lane)) is not None:
            if self._error is not None:
                continue  # to the end of the queue
            self._done(lane.finish(keep=_BUFFERS - 1))
            buffer = lane.buffer(len(chunk.target))
            if chunk.path not in files:
                files[chunk.path] = _open(chunk.path)
            _read_exactly(files[chunk.path], buffer, chunk)
            lane.copy(buffer, chunk)

    def _next(self, lane: _Lane) -> _Chunk | None:
        try:
            return self._chunks.get_nowait()
        except Empty:  # whoever submits may wait for what is still being copied
            self._done(lane.finish())
            return self._chunks.get()

    def _done(self, chunks: Sequence[_Chunk]) -> None:
        if chunks:
            with self._changed:
                for chunk in chunks:
                    chunk.read.chunks_left -= 1
                self._changed.notify_all()

    def _fail(self, error: BaseException) -> None:
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()


_BUFFERS = 2  # of each thread


class _Lane:
    """A thread's buffers, taken in turns, and the stream on which they are copied."""

    def __init__(self, device: torch.device, size: int) -> None:
        is_gpu = device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if is_gpu else None
        self._buffers = [torch.empty(size, dtype=torch.uint8, pin_memory=is_gpu) for _ in range(_BUFFERS)]
        self._copying: deque[tuple[_Chunk, torch.cuda.Event | None]] = deque()

    def buffer(self, size: int) -> torch.Tensor:
        """The one that has been free for longest; at most one less than there are may be in use."""
        return self._buffers[0][:size]

    def copy(self, buffer: torch.Tensor, chunk: _Chunk) -> None:
        """Begin to copy what `buffer` returned last to where it belongs."""
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

    def finish(self, keep: int = 0) -> list[_Chunk]:
        """Wait until no more than `keep` copies are under way; the chunks that have become complete."""
        complete = []
        while len(self._copying) > keep:
            chunk, event = self._copying.popleft()
            if event is not None:
                event.synchronize()
            complete.append(chunk)
        return complete


def _open(path: Path) -> int:
    try:
        return os.open(path, os.O_RDONLY)
    except OSError as error:
        raise ModelLoadError(f"{path} cannot be opened: {error}; download the model again") from error


def _read_exactly(file: int, buffer: torch.Tensor, chunk: _Chunk) -> None:
    """Fill the buffer from the chunk's place in the file. Raises ModelLoadError."""
    memory, read = buffer.numpy().data, 0
    while read < len(memory):
        try:
            count = os.preadv(file, [memory[read:]], chunk.offset + read)
        except OSError as error:
            raise ModelLoadError(
                f"{chunk.path} cannot be read at byte {chunk.offset + read}: {error}; check the storage it is on"
            ) from error
        if not count:
            raise ModelLoadError(
                f"{chunk.path} ends at byte {chunk.offset + read}, its header says there is more: it is not "
                "complete; download the model again"
            )
        read += count
