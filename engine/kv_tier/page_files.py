"""A directory of KV pages: one file for each page, by the key of its tokens (`cache/tiers/page_keys.py`).

    DIRECTORY/raydix-kv.json         the model and the layout of all pages here, and the directory's own name
    DIRECTORY/3f/3f9c…e1.kv          a page (engine/kv_tier/page_file.py)
    DIRECTORY/3f/3f9c…e1.0.kv        a page's part that the first of several ranks has, and so on

Several engines may write, read and delete here at the same time: two files of one name have the same content. If a
model has several ranks, the first one knows which pages exist and which to delete, and a page counts once all
ranks' files exist.

A page's file also lists its blocks, which routers use. The blocks in files of other and earlier engines are read
gradually, the newest first.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import re
import secrets
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from cache.news.store_log import StoreLog
from cache.tiers.block_counts import BlockCounts
from engine.base.files import rewrite
from engine.kv_tier.page_file import WRITING, RankFiles, SpoiltFile
from engine.model_files.json_files import parse_json

logger = logging.getLogger(__name__)

FORMAT = 2
MANIFEST = "raydix-kv.json"
_FOLDER = re.compile("[0-9a-f]{2}")
_ABANDONED_S = 3600.0
"""Age in seconds after which an incomplete file is surely abandoned."""


class _File(NamedTuple):
    size: int
    """Bytes, of all ranks."""
    blocks: tuple[int, ...] | None = None
    """None: they were not read yet."""


class PageFiles:
    """The pages in one directory. `has` may be called by one thread while others read and write."""

    def __init__(
        self,
        directory: Path,
        identity: dict[str, str | int],
        part_bytes: Sequence[int],
        max_bytes: int,
    ) -> None:
        """`identity` identifies the model: its fingerprint and the layout of a page. `part_bytes`: bytes of each
        rank's part of a page.

        Raises ValueError, with the remedy, if the directory cannot be used or holds the pages of another model.
        """
        self.directory = directory
        self.log = StoreLog()
        """The blocks here that were read so far."""
        self._counts = BlockCounts()
        self._max_bytes = max_bytes
        num_ranks = len(part_bytes)
        self._of_ranks = [RankFiles(directory, size, rank, num_ranks) for rank, size in enumerate(part_bytes)]
        self._own = self._of_ranks[0]
        self._files: OrderedDict[bytes, _File] = OrderedDict()  # by key, the least recently used first
        self._unread: deque[bytes] = deque()  # pages with unread blocks, the newest last
        self._bytes = 0
        self._lock = threading.Lock()
        self._scanned: dict[str, int] = {}  # subdirectory -> its modification time when last read
        self.name = _open(directory, identity if num_ranks == 1 else {**identity, "ranks": num_ranks})
        """Name of the directory: the same for all engines that share it."""
        self.scan()

    def __len__(self) -> int:
        return len(self._files)

    @property
    def num_bytes(self) -> int:
        """Bytes of all known files."""
        return self._bytes

    def has(self, key: bytes) -> bool:
        """Whether this engine knows the page to be there. O(1), without reading the directory."""
        return key in self._files

    def scan(self) -> None:
        """Learn which files other engines wrote and deleted. Reads only subdirectories that have changed."""
        found: dict[bytes, list[os.DirEntry[str]]] = {}
        changed = set()
        with contextlib.suppress(OSError):
            for entry in os.scandir(self.directory):
                if _FOLDER.fullmatch(entry.name) and entry.is_dir():
                    changed_at = entry.stat().st_mtime_ns
                    if self._scanned.get(entry.name) != changed_at:
                        self._scanned[entry.name] = changed_at
                        changed.add(int(entry.name, 16))
                        found.update(self._pages_in(entry))
        with self._lock:
            for key in [key for key in self._files if key[0] in changed and key not in found]:
                self._drop(key)
        new = []
        for key, entries in found.items():
            if key not in self._files:
                with contextlib.suppress(OSError):
                    stats = [entry.stat() for entry in entries]
                    new.append((stats[0].st_mtime, key, sum(one.st_size for one in stats)))
        with self._lock:
            for _, key, size in sorted(new):
                if key not in self._files:
                    self._put(key, _File(size))
                    self._unread.append(key)
        self._make_room(0)

    def _pages_in(self, directory: os.DirEntry[str]) -> dict[bytes, list[os.DirEntry[str]]]:
        """Return the pages in a subdirectory for which all ranks' files exist, and delete abandoned files."""
        found: dict[bytes, list[os.DirEntry[str]]] = {}
        given_up = []
        for entry in os.scandir(directory.path):
            key = self._own.key_of(entry.name)
            if key is not None and entry.name.startswith(directory.name):
                found.setdefault(key, []).append(entry)
            elif entry.name.endswith(WRITING):
                given_up.append(entry)
        for key in [key for key, entries in found.items() if len(entries) < self._own.num_ranks]:
            given_up += found.pop(key)
        for entry in given_up:
            with contextlib.suppress(OSError):
                if time.time() - entry.stat().st_mtime > _ABANDONED_S:
                    os.unlink(entry.path)
        return found

    def learn_blocks(self, most: int) -> bool:
        """Read the blocks of up to `most` files that other engines have written, the newest first. Return whether
        there may be more.
        """
        for _ in range(most):
            if not self._unread:
                return False
            key = self._unread.pop()
            if key in self._files:
                self._learn(key, self._own.blocks_in(key))
        return True

    def _learn(self, key: bytes, blocks: tuple[int, ...]) -> None:
        with self._lock:
            file = self._files.get(key)
            if file is not None and file.blocks is None:
                self._files[key] = file._replace(blocks=blocks)
                self.log.store(self._counts.add(blocks))

    def use(self, keys: Iterable[bytes]) -> None:
        """Count a use of pages, so that others are deleted first; the last one counts as used last."""
        with self._lock:
            for key in keys:
                if key in self._files:
                    self._files.move_to_end(key)

    def write(self, key: bytes, page: memoryview, blocks: Sequence[int] = ()) -> bool:
        """Write a page with the blocks of those hashes; False if it can never fit. Raises OSError, and then leaves
        no file.

        With several ranks it writes the first one's part, and the page counts after `add`.
        """
        size = self._size(len(blocks))
        if size > self._max_bytes:
            return False
        self._make_room(size)
        self._own.write(key, page, blocks)
        if self._own.num_ranks == 1:
            self.add(key, blocks)
        return True

    def _size(self, num_blocks: int) -> int:
        """Return the bytes of all ranks' files of a page."""
        return sum(files.size(num_blocks) for files in self._of_ranks)

    def add(self, key: bytes, blocks: Sequence[int]) -> None:
        """Record that all ranks have written a page."""
        with self._lock:
            self._drop(key)
            self._put(key, _File(self._size(len(blocks)), tuple(blocks)))
            self.log.store(self._counts.add(blocks))

    def read(self, key: bytes, page: memoryview) -> bool:
        """Read a page into `page`; False if it is missing or spoilt, and it is then forgotten.

        The memory may be overwritten all the same.
        """
        try:
            blocks = self._own.read(key, page)
        except FileNotFoundError:  # Another engine needed its room.
            self.forget(key)
            return False
        except OSError as error:
            logger.warning("cannot read a page in %s, so it is computed again: %s", self.directory, error)
            self.forget(key)
            return False
        except SpoiltFile as error:
            logger.warning("%s: it is deleted, and its page computed again", error)
            self.delete(key)
            return False
        self._learn(key, blocks)
        self.use([key])
        return True

    def forget_all(self) -> list[bytes]:
        """Forget all pages, and return their keys; the caller has to delete their files."""
        with self._lock:
            keys = list(self._files)
            for key in keys:
                self._drop(key)
        return keys

    def _make_room(self, size: int) -> None:
        """Delete the least recently used pages until `size` more bytes fit."""
        while self._bytes + size > self._max_bytes:
            with self._lock:
                oldest = next(iter(self._files), None)
            if oldest is None:
                return
            self.delete(oldest)

    def delete(self, key: bytes) -> None:
        """Delete a page's files, if there are any."""
        self.forget(key)
        self._own.delete(key)

    def forget(self, key: bytes) -> None:
        """Record that a page no longer exists."""
        with self._lock:
            self._drop(key)

    def _put(self, key: bytes, file: _File) -> None:
        self._files[key] = file
        self._bytes += file.size

    def _drop(self, key: bytes) -> None:
        file = self._files.pop(key, None)
        if file is not None:
            self._bytes -= file.size
            self.log.evict(self._counts.remove(file.blocks or ()))


def _open(directory: Path, identity: dict[str, str | int]) -> str:
    """Check that the directory exists, can be written and is this model's; return its name."""
    if not directory.is_dir():
        raise ValueError(
            f"kv_tier.directory is {directory}, which is not a directory: create it, or name another one"
        )
    identity = {"format": FORMAT, **identity}
    manifest = directory / MANIFEST
    part = directory / f"{os.getpid()}-{id(identity)}{WRITING}"
    try:
        with rewrite(part) as file:
            file.write(f"{json.dumps({**identity, 'name': secrets.token_hex(16)}, indent=1)}\n".encode())
        _put_in_place(part, manifest)
        found = parse_json(manifest)
    except OSError as error:
        is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        advice = "its disk is full: make room" if is_full else "this user must be able to read and write there"
        raise ValueError(f"kv_tier.directory is {directory}, but {advice} ({error})") from error
    except ValueError as error:
        raise ValueError(
            f"kv_tier.directory is {directory}, but its {MANIFEST} is no JSON, so it is unknown whose pages are "
            f"there: delete them, or name another directory ({error})"
        ) from error
    name = found.pop("name", None) if isinstance(found, dict) else None
    if found != identity or not isinstance(name, str):
        raise ValueError(
            f"kv_tier.directory is {directory}, which holds the pages of another model or layout "
            f"({_difference(found, identity)}): give each a directory of its own, for which "
            '"{fingerprint}" may be part of its name, or delete what is there'
        )
    return name


def _put_in_place(part: Path, manifest: Path) -> None:
    """Put the manifest in place, unless another engine that shares the directory did so first."""
    try:
        os.link(part, manifest)
    except FileExistsError:
        pass
    except OSError:  # The file system has no links.
        if not manifest.exists():
            os.replace(part, manifest)
            return
    part.unlink()


def _difference(found: object, expected: dict[str, str | int]) -> str:
    if not isinstance(found, dict):
        return f"{MANIFEST} is no JSON object"
    different = [name for name in sorted({*found, *expected}) if found.get(name) != expected.get(name)]
    listed = (f"{name} {found.get(name)!r} instead of {expected.get(name)!r}" for name in different)
    return ", ".join(listed) or f"{MANIFEST} has no name"
