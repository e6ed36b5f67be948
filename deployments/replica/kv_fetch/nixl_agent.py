"""NIXL, with which replicas read pages from each other's memory. Only this file uses its API.

NIXL cannot abort a read: until `has_ended` confirms its end, a read may write to its memory.
"""

from __future__ import annotations

from collections.abc import Iterable
from importlib import import_module
from typing import Any
from uuid import uuid4

import numpy as np

from engine.host_tier.peers import PageRegion

_MODULES = ("nixl._api", "nixl_cu12._api", "nixl_cu13._api")
"""The package that chooses among those for versions of CUDA, and each of these by itself."""
_BACKEND = "UCX"


def _library() -> Any:
    """Import NIXL. Raises RuntimeError when it is not installed or does not work here."""
    reasons = []
    for module in _MODULES:
        try:
            return import_module(module)
        except Exception as error:  # a package for another CUDA may raise anything
            reasons.append(str(error))
    raise RuntimeError(
        "engines.kv_fetch.transport is nixl, which cannot be imported here: pip install 'raydix[nixl]' where the "
        f"replicas run, or leave the transport at zmq ({'; '.join(reasons)})"
    )


def check_nixl() -> None:
    """Raise RuntimeError, with what to do, if NIXL cannot be used here."""
    _library()


class NixlAgent:
    """This process as others' agents see it, with the memory of its pages.

    Only one thread at a time uses it; NIXL's own thread answers other replicas' reads.
    """

    def __init__(self, regions: Iterable[PageRegion]) -> None:
        """Make `regions` readable for holders of `metadata`. Raises RuntimeError when NIXL does not work."""
        library = _library()
        self._agent = library.nixl_agent(f"raydix-{uuid4().hex}", library.nixl_agent_config(backends=[_BACKEND]))
        if _BACKEND not in self._agent.backends:
            raise RuntimeError(f"this NIXL has no {_BACKEND}, which transfers pages; leave the transport at zmq")
        for region in regions:
            start = min(region.starts)
            num_bytes = max(region.starts) - start + region.num_pages * region.stride
            self._register(start, num_bytes, region.gpu)
        self.metadata: bytes = self._agent.get_agent_metadata()
        """The data that another agent needs to read here."""

    def _register(self, address: int, num_bytes: int, gpu: int | None) -> None:
        self._agent.register_memory([(address, num_bytes, gpu or 0, "")], _kind(gpu))

    def register_own(self, memory: np.ndarray[Any, Any]) -> None:
        """Let reads write to this memory, which no other agent knows."""
        self._register(memory.ctypes.data, memory.nbytes, None)

    def meet(self, metadata: bytes) -> str:
        """Register another agent; return its name. Raises NIXL's errors for invalid metadata."""
        return _text(self._agent.add_remote_agent(metadata))

    def forget(self, peer: str) -> None:
        """Close the connection to an agent, which must have no read in progress."""
        self._agent.remove_remote_agent(peer)

    def read(self, peer: str, gpu: int | None, remote: np.ndarray[Any, Any], address: int, size: int) -> Any:
        """Begin to read pieces of `size` bytes, at addresses `remote`, to `address`, in order; return the read.

        Raises NIXL's errors, such as for memory that the other agent has not registered.
        """
        agent = self._agent
        local = address + np.arange(len(remote), dtype=np.uint64) * np.uint64(size)
        sources = agent.get_xfer_descs(_descriptors(remote, size, gpu), _kind(gpu))
        targets = agent.get_xfer_descs(_descriptors(local, size, None), _kind(None))
        read = agent.initialize_xfer("READ", targets, sources, peer)
        agent.transfer(read)
        return read

    def has_ended(self, read: Any) -> bool | None:
        """Return None while a read is in progress, and then whether it has succeeded."""
        try:
            state = self._agent.check_xfer_state(read)
        except Exception:  # the other agent is gone: NIXL has ended the read
            return False
        return None if state == "PROC" else bool(state == "DONE")

    def release(self, read: Any) -> bool:
        """Forget a read that has ended; return whether NIXL confirms its end."""
        try:
            self._agent.release_xfer_handle(read)
        except Exception:
            return False
        return True


def _kind(gpu: int | None) -> str:
    return "DRAM" if gpu is None else "VRAM"


def _text(name: bytes | str) -> str:
    return name.decode() if isinstance(name, bytes) else name


def _descriptors(addresses: np.ndarray[Any, Any], size: int, gpu: int | None) -> np.ndarray[Any, Any]:
    """Return uint64 [N, 3]: address, bytes, device."""
    rows = np.empty((len(addresses), 3), dtype=np.uint64)
    rows[:, 0], rows[:, 1], rows[:, 2] = addresses, size, gpu or 0
    return rows
