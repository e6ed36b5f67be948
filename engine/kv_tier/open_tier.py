"""Opens the file tier that an engine's settings name, for the memory of its host pages."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path

from engine.attention.host_pages import HostKVPages
from engine.base.files import PRIVATE_FOLDER
from engine.kv_tier.page_file import RankFiles
from engine.kv_tier.page_files import PageFiles
from engine.kv_tier.page_mover import PageMover
from engine.settings.kv_tier import KVTier

MAX_QUEUED_SHARE = 0.25
"""Largest share of the host pages that may wait to be written, and so cannot be given to others."""
RETRY_S = 30.0
"""Seconds for which nothing is written after the disk was full or failed."""


def open_tier(settings: KVTier, host: HostKVPages, fingerprint: str, part_bytes: Sequence[int]) -> PageMover:
    """Open the directory and start the threads that move the first rank's pages.

    `part_bytes`: bytes of each rank's part of a page. Raises ValueError, with the remedy, if the directory cannot
    be used or holds the pages of another model.
    """
    max_bytes = int(settings.disk_gib * 2**30)
    page_bytes = sum(part_bytes)
    if max_bytes < page_bytes:
        raise ValueError(
            f"kv_tier.disk_gib is {settings.disk_gib:g}, but one page takes {page_bytes / 2**30:.6f} GiB: raise it"
        )
    directory = _directory(settings.directory, fingerprint)
    return PageMover(
        PageFiles(directory, host.identity(fingerprint), part_bytes, max_bytes),
        host.page,
        host.page_bytes,
        max_queued=max(1, int(MAX_QUEUED_SHARE * host.num_pages)),
        rescan_s=settings.rescan_s,
        retry_s=RETRY_S,
        expected_bytes_per_s=settings.expected_mib_per_s * 2**20,
    )


def rank_files(settings: KVTier, host: HostKVPages, fingerprint: str, rank: int, num_ranks: int) -> RankFiles:
    """Return the files of a rank after the first, which has opened the directory."""
    return RankFiles(_directory(settings.directory, fingerprint), host.page_bytes, rank, num_ranks)


def _directory(name: str, fingerprint: str) -> Path:
    """Return the directory of a model's pages; it is made if it is named after the model."""
    directory = Path(name.replace("{fingerprint}", fingerprint))
    if "{fingerprint}" in name and directory.parent.is_dir():
        with contextlib.suppress(OSError):  # Opening the directory will report the error.
            directory.mkdir(mode=PRIVATE_FOLDER, exist_ok=True)
    return directory
