"""The section `files` of `deployments.yaml`: files and batches that clients store on the server."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field, field_validator

from deployments.config.section import Section

MIB = 2**20
DAY_S = 86_400


class FileSettings(Section):
    """Where files and batches are stored, and how many there may be; see `deployments/batch/spool.py`.

    Bounds hold for each tenant, in the directory that all ingresses share.
    """

    directory: str | None = None
    """Directory of files and batches, on a file system that all ingresses share; each creates it. None: there is
    neither /v1/files nor /v1/batches."""
    max_file_bytes: int = Field(default=200 * MIB, ge=1024)
    """Largest file, in bytes."""
    max_files: int = Field(default=1000, ge=1)
    """Most files of a tenant, those that batches have written included."""
    max_total_bytes: int = Field(default=10 * 1024 * MIB, ge=1024)
    """Bytes of all files of a tenant, and of the answers of its batches, above which no file is taken."""
    max_requests: int = Field(default=50_000, ge=1)
    """Most requests of a batch."""
    max_batches: int = Field(default=1000, ge=1)
    """Most batches of a tenant. The oldest that has ended is forgotten for a new one; its files stay."""
    max_running: int = Field(default=4, ge=1)
    """Most batches that an ingress works on concurrently. Tenants share these places at all times."""
    max_window_s: int = Field(default=7 * DAY_S, ge=1)
    """Longest `completion_window`, in seconds."""
    keep_s: int = Field(default=30 * DAY_S, ge=1)
    """Seconds after which a file is deleted for which no time was given, and an ended batch is forgotten."""
    poll_s: float = Field(default=2.0, gt=0)
    """Seconds between two looks of an ingress for batches that no ingress works on, and for batches that clients
    cancelled at another ingress."""

    @field_validator("directory")
    @classmethod
    def _is_the_same_everywhere(cls, given: str | None) -> str | None:
        if given is None:
            return None
        path = Path(given).expanduser()
        if not path.is_absolute():
            raise ValueError(
                f"directory must be an absolute path, so that all ingresses use the same one, got {given!r}"
            )
        return str(path)
