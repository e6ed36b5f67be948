"""Bodies that are sent packed: the same answers, the same bound, and never much more unpacked than it."""

from __future__ import annotations

import asyncio
import gzip
import json
import random
import sys
import threading
import zlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployments.api import ApiService, Limits, create_app
from deployments.api.base.errors import ApiError
from deployments.api.http import packed_body
from deployments.api.http.body_memory import BodyMemory
from deployments.api.http.packed_body import PIECE_BYTES, unpacked
from tests.deployments.support.scripted_api import Client, ScriptedEngine

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

Pack = Callable[[bytes], bytes]


def raw_deflate(body: bytes) -> bytes:
    packer = zlib.compressobj(wbits=-zlib.MAX_WBITS)
    return packer.compress(body) + packer.flush()


def large_window(body: bytes) -> bytes:
    return zstd.compress(body, options={zstd.CompressionParameter.window_log: 24})


PACKINGS: list[tuple[str, Pack]] = [
    ("gzip", gzip.compress),
    ("deflate", zlib.compress),
    ("deflate", raw_deflate),
    ("zstd", zstd.compress),
]
NAMES = ["gzip", "zlib", "raw deflate", "zstd"]
BODY = {"model": "demo", "prompt": "Grüße", "max_tokens": 3}


def unpack(body: bytes, name: str, max_bytes: int = 2**24, memory: BodyMemory | None = None) -> bytes:
    async def run() -> bytes:
        with (memory or BodyMemory(2**28, has_tenants=False)).open("t") as room:
            room.take(len(body))
            return bytes(await unpacked(bytearray(body), name, max_bytes, room))

    return asyncio.run(run())


@pytest.mark.parametrize(("name", "pack"), PACKINGS, ids=NAMES)
@given(st.binary(max_size=300), st.integers(1, 40), st.integers(1, 4000))
def test_a_packed_body_of_any_length_is_unpacked(
    name: str, pack: Pack, part: bytes, piece: int, times: int
) -> None:
    body = part * times
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packed_body, "PIECE_BYTES", piece * 100)
        assert unpack(pack(body), name) == body


@pytest.mark.parametrize(("name", "pack"), PACKINGS, ids=NAMES)
@pytest.mark.parametrize("path", ["/v1/completions", "/tokenize"])
def test_a_packed_body_is_answered_like_a_plain_one(
    client: Client, engine: ScriptedEngine, name: str, pack: Pack, path: str
) -> None:
    body = json.dumps({**BODY, "max_tokens": 3} if path.startswith("/v1") else {"prompt": "Grüße"}).encode()
    headers = {"content-type": "application/json", "content-encoding": name.upper()}
    answer, plain = client.post(path, pack(body), headers=headers), client.post(path, json.loads(body))
    assert answer.status_code == plain.status_code == 200, answer.text
    if path == "/tokenize":
        assert answer.json() == plain.json()
    else:
        assert [asked.prompt_ids for asked in engine.requests] == [engine.requests[0].prompt_ids] * 2


@pytest.mark.parametrize(("name", "pack"), PACKINGS, ids=NAMES)
@pytest.mark.parametrize(
    ("damage", "why"),
    [
        (lambda packed: packed[:-1], "ends too early"),
        (lambda packed: packed[: len(packed) // 2], "ends too early"),
        (lambda packed: b"", "ends too early"),
        (lambda packed: packed + b"\0", "something follows its end"),
        (lambda packed: packed + packed, "something follows its end"),
        (lambda packed: b"\x06" + packed, "it is damaged"),
        (lambda packed: packed[:5] + b"\xff" * 20 + packed[25:], "it is damaged"),
    ],
)
def test_a_damaged_body_is_a_bad_request(name: str, pack: Pack, damage: Pack, why: str) -> None:
    text = random.Random(1).randbytes(400).hex().encode()
    with pytest.raises(ApiError, match=f"The body is not {name}, as its content-encoding says: .*") as refused:
        unpack(damage(pack(text)), name)
    assert refused.value.status == 400
    assert why in refused.value.message


def test_a_window_that_http_does_not_allow_is_refused() -> None:
    body = random.Random(1).randbytes(2**24)
    with pytest.raises(ApiError, match="needs a window of more than 8388608 bytes"):
        unpack(large_window(body), "zstd", 2**25)


@pytest.mark.parametrize(("name", "pack"), PACKINGS, ids=NAMES)
def test_a_bomb_is_refused_as_soon_as_it_exceeds_the_bound(
    monkeypatch: pytest.MonkeyPatch, name: str, pack: Pack
) -> None:
    bomb = pack(bytes(2**26))
    assert len(bomb) < 2**17
    memory, took = BodyMemory(2**28, has_tenants=False), 0
    take = memory.take

    def count(tenant: str, num_bytes: int) -> None:
        nonlocal took
        took += num_bytes
        take(tenant, num_bytes)

    monkeypatch.setattr(memory, "take", count)
    with pytest.raises(ApiError, match=r"limits\.max_body_bytes") as refused:
        unpack(bomb, name, 2**20, memory)
    assert refused.value.status == 413
    assert took <= len(bomb) + 2**20 + PIECE_BYTES
    assert memory.num_bytes == 0


def test_a_packed_body_takes_the_room_of_its_unpacked_size() -> None:
    async def run() -> None:
        memory = BodyMemory(2**20, has_tenants=False)
        body = gzip.compress(b"a" * 10_000)
        with memory.open("t") as room:
            room.take(len(body))
            await unpacked(bytearray(body), "gzip", 2**20, room)
            assert memory.num_bytes == 10_000
        assert memory.num_bytes == 0
        with pytest.raises(ApiError, match=r"limits\.max_total_body_bytes"), memory.open("t") as room:
            await unpacked(bytearray(gzip.compress(bytes(2**21))), "gzip", 2**24, room)
        assert memory.num_bytes == 0

    asyncio.run(run())


@pytest.mark.parametrize("given", ["br", "gzip, gzip", "gzip, identity", "compress"])
def test_another_encoding_is_refused_and_the_known_ones_are_named(client: Client, given: str) -> None:
    headers = {"content-type": "application/json", "content-encoding": given}
    answer = client.post("/v1/completions", json.dumps(BODY).encode(), headers=headers)
    assert answer.status_code == 415
    assert "gzip, deflate, zstd" in answer.json()["error"]["message"]
    assert answer.headers["accept-encoding"] == "gzip, deflate, zstd"


@pytest.mark.parametrize("given", ["identity", "Identity", ""])
def test_a_body_may_say_that_it_is_not_packed(client: Client, given: str) -> None:
    headers = {"content-type": "application/json", "content-encoding": given}
    assert client.post("/v1/completions", json.dumps(BODY).encode(), headers=headers).status_code == 200


def test_the_bound_holds_for_packed_bytes_too(service: ApiService) -> None:
    small = Client(httpx.ASGITransport(create_app(replace(service, limits=Limits(max_body_bytes=1024)))))
    body = json.dumps({**BODY, "prompt": random.Random(1).randbytes(2000).hex()}).encode()
    headers = {"content-type": "application/json", "content-encoding": "gzip"}
    for packed in (gzip.compress(body), gzip.compress(json.dumps({**BODY, "prompt": "a" * 2000}).encode())):
        answer = small.post("/v1/completions", packed, headers=headers)
        assert (answer.status_code, answer.json()["error"]["code"]) == (413, "request_too_large")


def test_all_of_a_large_body_is_unpacked_off_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each thread's turn is one piece, and nothing but their sum is done on the event loop."""
    threads: list[int] = []
    real = zlib.decompressobj

    class Noted:
        def __init__(self, wbits: int) -> None:
            self._inner = real(wbits)

        def __getattr__(self, name: str) -> Any:
            return getattr(self._inner, name)

        def decompress(self, data: Any, most: int) -> bytes:
            threads.append(threading.get_ident())
            assert most <= PIECE_BYTES and len(data) <= PIECE_BYTES
            return self._inner.decompress(data, most)

    monkeypatch.setattr("deployments.api.http.packed_body.zlib.decompressobj", Noted)
    body = random.Random(1).randbytes(2**21).hex().encode()
    assert unpack(gzip.compress(body, 1), "gzip") == body
    assert len(threads) >= 16 and threading.get_ident() not in threads
