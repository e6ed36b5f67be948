"""Ids and seeds are never handed out twice: not to two threads, and not to a process and its fork."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor

from deployments.api.base.randomness import POOL_BYTES, RandomPool, random_below, random_hex


def test_no_bytes_are_handed_out_twice_also_to_threads() -> None:
    pool = RandomPool()
    with ThreadPoolExecutor(8) as threads:
        drawn = list(threads.map(lambda _: pool.take(16), range(4 * POOL_BYTES // 16)))
    assert len(set(drawn)) == len(drawn)
    assert {len(one) for one in drawn} == {16}
    assert len(pool.take(POOL_BYTES)) == POOL_BYTES


def test_a_fork_does_not_continue_the_pool_of_its_parent() -> None:
    random_hex(16)
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writer, random_hex(16).encode())
        os._exit(0)
    os.waitpid(child, 0)
    assert os.read(reader, 32).decode() != random_hex(16)
    os.close(reader)
    os.close(writer)


def test_numbers_stay_below_their_end_and_reach_all_of_them() -> None:
    assert {random_below(3) for _ in range(200)} == {0, 1, 2}
    assert max(random_below(2**64) for _ in range(64)) > 2**56
