"""Ranks on several hosts: their addresses, and models that differ between hosts."""

from __future__ import annotations

import socket
import threading
from pathlib import Path

import pytest

from engine.base.errors import ModelLoadError
from engine.parallel.rank_network import ONE_MACHINE, RankNetwork, address_of
from tests.engine.support.engines_on_ranks import PROMPTS, run_on_ranks
from tests.engine.support.oracle import save_tiny


def test_ranks_whose_hosts_have_different_models_do_not_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each rank, a thread here, sees other files."""
    model = save_tiny("qwen3", tmp_path)
    files = lambda *_: f"{threading.get_ident():015x}"  # noqa: E731
    monkeypatch.setattr("engine.loading.load_model.fingerprint", files)
    with pytest.raises(ModelLoadError, match="differ between the hosts"):
        run_on_ranks(model, 1, PROMPTS[:1], pipeline_parallel_size=2)


def test_an_interface_has_the_address_that_the_kernel_uses() -> None:
    assert address_of("lo") == ONE_MACHINE.own_address() == "127.0.0.1"
    with pytest.raises(ValueError, match=r"rank_interface is 'none7', but .* lo \(127\.0\.0\.1\)"):
        address_of("none7")


def test_only_connections_between_hosts_are_watched() -> None:
    for network, is_watched in ((RankNetwork("127.0.0.1", 3.0), 0), (RankNetwork("192.0.2.1", 3.0), 1)):
        with socket.socket() as peer:
            network.end_when_lost(peer)
            assert peer.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == is_watched
            assert peer.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 3000 * is_watched
