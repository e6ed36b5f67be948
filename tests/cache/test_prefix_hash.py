"""Chained hashes of prefixes: what they depend on, that they can be extended, and that they never change."""

from __future__ import annotations

import struct
from array import array

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from cache.node import Namespace
from cache.prefix_hash import block_hashes, prefix_key, prefix_root

ROOT = prefix_root(Namespace("m", salt="s"))
IDS = st.lists(st.integers(-(2**31), 2**31 - 1), max_size=60)


@given(IDS, st.integers(0, 2**64 - 1), st.integers(1, 17))
def test_each_hash_is_of_its_block_seeded_with_the_one_before(ids: list[int], root: int, size: int) -> None:
    expected, previous = [], root
    for begin in range(0, len(ids) - size + 1, size):
        content = b"".join(struct.pack("<i", token) for token in ids[begin : begin + size])
        previous = xxhash.xxh3_64(content, seed=previous).intdigest()
        expected.append(previous)
    assert block_hashes(ids, root, size) == expected
    assert block_hashes(array("i", ids), root, size) == expected


@given(IDS, st.integers(1, 17), st.data())
def test_a_chain_continues_from_any_of_its_hashes(ids: list[int], size: int, data: st.DataObject) -> None:
    chain = block_hashes(ids, ROOT, size)
    known = data.draw(st.integers(0, len(chain)))
    root = chain[known - 1] if known else ROOT
    assert chain[:known] + block_hashes(ids, root, size, known * size) == chain


def test_the_values_are_the_same_in_every_release() -> None:
    """Ingress and replica may run different releases during an update: they must name prefixes alike."""
    root = prefix_root(Namespace("demo", "adapter", "salt"))
    assert (root, *block_hashes(range(5), root, 2)) == VALUES


VALUES = (6938432443450326968, 15369607691669315417, 5034185551452556710)


def test_the_key_is_of_the_tokens_and_the_whole_namespace() -> None:
    prompt = list(range(64))
    key = prefix_key(prompt, ROOT)
    assert key == prefix_key(tuple(prompt), ROOT)
    others = {
        key,
        prefix_key([1, *prompt[1:]], ROOT),
        prefix_key(prompt[:10], ROOT),
        *(prefix_key(prompt, prefix_root(Namespace(*parts))) for parts in NEIGHBOURS),
    }
    assert len(others) == 3 + len(NEIGHBOURS)


NEIGHBOURS = (("n", "", "s"), ("m", "", "t"), ("m", "s", ""), ("ms", "", ""), ("m", "a", "s"))


def test_block_hashes_refuses_invalid_tokens_and_sizes() -> None:
    with pytest.raises(OverflowError, match="32 bits"):
        block_hashes([2**31], ROOT, 1)
    with pytest.raises(ValueError, match="at least 1 token"):
        block_hashes([1], ROOT, 0)
    assert block_hashes([1, 2, 3], ROOT, 2, 7) == []
