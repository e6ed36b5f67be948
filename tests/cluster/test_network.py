"""The harness itself: hosts that live, break and heal as the tests of the cluster need it."""

from __future__ import annotations

import errno
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import psutil
import pytest

from tests.cluster.support.host import Host
from tests.cluster.support.network import Network
from tests.support.waiting import wait_until

_ECHO = """
import socket, sys
with socket.create_server((sys.argv[1], 7)) as server:
    print("listening", flush=True)
    while True:
        with server.accept()[0] as connection:
            while data := connection.recv(2**16):
                connection.sendall(data)
"""
_SEND = """
import socket, sys
with socket.create_connection((sys.argv[1], 7), timeout=float(sys.argv[2])) as connection:
    connection.sendall(b"hello")
    print(connection.recv(5).decode())
"""


@pytest.fixture(scope="module")
def hosts(network: Network) -> tuple[Host, Host, Host]:
    """Three hosts; the first one echoes what is sent to its port 7."""
    hosts = network.host("one"), network.host("two"), network.host("three")
    echo = hosts[0].start(sys.executable, "-c", _ECHO, hosts[0].address, stdout=subprocess.PIPE)
    assert echo.stdout is not None and echo.stdout.readline() == "listening\n"
    return hosts


def hears_echo(sender: Host, receiver: Host, timeout_s: float = 60) -> bool:
    try:
        return sender.run(sys.executable, "-c", _SEND, receiver.address, str(timeout_s)) == "hello\n"
    except subprocess.CalledProcessError:
        return False


@contextmanager
def connected(host: Host) -> Iterator[socket.socket]:
    with socket.create_connection((host.address, 7), timeout=60) as connection:
        yield connection


def test_hosts_reach_each_other_and_this_process_reaches_them(hosts: tuple[Host, Host, Host]) -> None:
    one, two, _ = hosts
    assert hears_echo(two, one)
    with connected(one) as connection:
        connection.sendall(b"hello")
        assert connection.recv(5) == b"hello"


def test_a_host_has_its_own_name_processes_and_disk(hosts: tuple[Host, Host, Host]) -> None:
    one, two, _ = hosts
    assert one.run("hostname") == "one\n"
    assert len(one.processes("socket.create_server")) == 1
    assert two.processes("socket.create_server") == []
    one.run("sh", "-c", f"echo here > {one.directory}/file")
    assert one.run("cat", f"{one.directory}/file") == "here\n"
    with pytest.raises(subprocess.CalledProcessError):
        two.run("cat", f"{two.directory}/file")


def test_a_cut_host_is_silent_and_its_connections_resume_when_it_is_healed(
    network: Network, hosts: tuple[Host, Host, Host]
) -> None:
    one, two, _ = hosts
    with connected(one) as connection:
        network.cut(one)
        connection.sendall(b"hello")
        assert not hears_echo(two, one, timeout_s=0.5)
        network.heal(one)
        assert connection.recv(5) == b"hello"
    assert hears_echo(two, one)


def test_a_cut_between_two_hosts_leaves_the_others_connected(
    network: Network, hosts: tuple[Host, Host, Host]
) -> None:
    one, two, three = hosts
    network.cut_between(one, two)
    assert not hears_echo(two, one, timeout_s=0.5)
    assert hears_echo(three, one)
    network.heal_between(one, two)
    assert hears_echo(two, one)


def test_a_throttled_host_gets_no_more_than_the_limit(network: Network, hosts: tuple[Host, Host, Host]) -> None:
    one, size = hosts[0], 2**19
    network.throttle(one, 8 * size)
    began = time.monotonic()
    with connected(one) as connection:
        connection.sendall(bytes(size))
        left = size
        while left:
            left -= len(connection.recv(left))
    # Of a second's bytes at that rate, a tenth may come in one burst.
    assert time.monotonic() - began > 0.5
    network.throttle(one, None)


def test_messages_to_and_from_a_distant_host_are_delayed(network: Network, hosts: tuple[Host, Host, Host]) -> None:
    delay_s = 0.2
    far = network.host("far", delay_s=delay_s)
    began = time.monotonic()
    assert hears_echo(far, hosts[0])
    # A connection takes one round trip, and the echo another one.
    assert time.monotonic() - began > 4 * delay_s


def test_a_paused_host_answers_once_it_is_resumed(hosts: tuple[Host, Host, Host]) -> None:
    one = hosts[0]
    with connected(one) as connection:
        one.pause()
        (echo,) = one.processes("socket.create_server")
        assert echo.status() == psutil.STATUS_STOPPED
        connection.sendall(b"hello")
        one.resume()
        assert connection.recv(5) == b"hello"


def test_a_full_disk_takes_no_byte_until_it_is_freed(hosts: tuple[Host, Host, Host]) -> None:
    two = hosts[1]
    write = ("sh", "-c", f"echo here > {two.directory}/more")
    two.fill_disk()
    with pytest.raises(subprocess.CalledProcessError, match=str(errno.ENOSPC) + "|returned"):
        two.run(*write)
    two.free_disk()
    two.run(*write)


def test_a_killed_host_leaves_no_process_although_it_was_paused(network: Network) -> None:
    host = network.host("short-lived")
    sleeper = host.start("sleep", "1000")
    wait_until(lambda: bool(host.processes("sleep 1000")))
    pids = [process.pid for process in host.processes()]
    host.pause()
    host.kill()
    assert sleeper.wait() == -signal.SIGKILL or sleeper.returncode == 128 + signal.SIGKILL
    wait_until(lambda: not any(psutil.pid_exists(pid) for pid in pids))
