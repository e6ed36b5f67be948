"""Bodies: what JSON becomes is counted before it is made, and all bodies together are bounded."""

from __future__ import annotations

import asyncio
import gzip
import json
import threading
import tracemalloc
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import httpx
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.requests import Request

from benchmarks.loop_gap_cases import Case
from benchmarks.loop_gaps import application, post
from deployments.api import ApiService, Limits, create_app
from deployments.api.base.errors import ApiError
from deployments.api.fields import protocol
from deployments.api.http import body, json_size
from deployments.api.http.access import AccessControl
from deployments.api.http.body import read_json
from deployments.api.http.body_memory import MEMORY_FACTOR, VALUE_BYTES, BodyMemory
from deployments.api.http.json_size import count_values, most_values
from deployments.config.tenants import KeyRing, TenantSettings, hash_key
from tests.deployments.support.scripted_api import Client

TEXTS = st.text(alphabet='a,:[{"\\é\n}]', max_size=12)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | TEXTS,
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(TEXTS, inner, max_size=5),
    max_leaves=30,
)


def num_objects(value: Any) -> int:
    """Number of values and names that a parser makes."""
    if isinstance(value, dict):
        return 1 + sum(1 + num_objects(child) for child in value.values())
    return 1 + sum(map(num_objects, value)) if isinstance(value, list) else 1


@given(VALUES, st.integers(1, 20))
def test_no_value_is_missed_and_no_text_is_taken_for_values(value: Any, piece: int) -> None:
    body = json.dumps(value, ensure_ascii=False).encode()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_size, "PIECE_BYTES", piece)  # borders everywhere, within escapes too
        counted = count_values(body)
    marks = json.dumps(_without_texts(value))
    weight = 1 + sum({",": 1, ":": 5, "[": 10, "{": 10}.get(character, 0) for character in marks)
    assert num_objects(value) <= counted == weight <= most_values(body)


def _without_texts(value: Any) -> Any:
    """Return JSON of the same form whose texts have no marks."""
    if isinstance(value, dict):
        return {str(index): _without_texts(child) for index, child in enumerate(value.values())}
    if isinstance(value, list):
        return [_without_texts(child) for child in value]
    return "" if isinstance(value, str) else value


@given(VALUES, st.binary(max_size=5), st.integers(0, 60))
def test_a_fault_hides_nothing_that_comes_before_it(value: Any, fault: bytes, at: int) -> None:
    """A parser makes the values up to the fault: they are counted, whatever follows."""
    body = json.dumps(value).encode()[:at]
    assert count_values(body) <= count_values(body + fault)


def limited(service: ApiService, **limits: Any) -> Client:
    return Client(httpx.ASGITransport(create_app(replace(service, limits=Limits(**limits)))))


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"])
@pytest.mark.parametrize("unit", ["[]", "1", '""', '{"a":1}'])
def test_too_many_values_are_refused_before_they_are_made(
    service: ApiService, monkeypatch: pytest.MonkeyPatch, path: str, unit: str
) -> None:
    client = limited(service, max_json_values=1024)  # which decodes the schemas of bodies
    decoded: list[int] = []
    real = msgspec.json.decode

    def decode(body: bytes, **options: Any) -> Any:
        decoded.append(len(body))
        return real(body, **options)

    monkeypatch.setattr(msgspec.json, "decode", decode)
    body = f'{{"model":"demo","metadata":[{",".join([unit] * 2000)}]}}'.encode()
    answer = client.post(path, body)
    assert answer.status_code == 400 and "limits.max_json_values" in answer.json()["error"]["message"]
    assert decoded == []


def test_marks_in_texts_are_not_values(service: ApiService) -> None:
    body = {"model": "demo", "prompt": 'a, "b": [c], {d}' * 25, "max_tokens": 1, "user": ", " * 5000}
    assert limited(service, max_json_values=1024).post("/v1/completions", body).status_code == 200


def test_values_within_arguments_of_calls_count_too(service: ApiService) -> None:
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": '{"a":[' + "1," * 600 + "1]}"}}
    message = {"role": "assistant", "tool_calls": [call, call]}
    answer = limited(service, max_json_values=1024).post(
        "/v1/chat/completions", {"model": "demo", "messages": [{"role": "user", "content": "a"}, message]}
    )
    assert answer.status_code == 400 and "arguments of tool calls" in answer.json()["error"]["message"]


def test_a_large_body_that_is_not_json_is_refused_with_its_place(
    service: ApiService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Limits, "inline_body_bytes", 100)
    answer = limited(service).post("/v1/completions", b'{"prompt":"' + b"a" * 200 + b'"]')
    assert answer.status_code == 400 and "byte 212" in answer.json()["error"]["message"]


# --- all bodies together -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "is_far"),
    [({}, False), ({"user": "x" * 300_000}, True), ({"metadata": [1] * 20_000}, True)],
    ids=["small", "bytes", "values"],
)
def test_a_large_body_is_parsed_in_a_thread(
    service: ApiService, monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any], is_far: bool
) -> None:
    """Both its JSON and what the API makes of it."""
    threads: list[str] = []

    def noted(work: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            threads.append(threading.current_thread().name)
            return work(*args, **kwargs)

        return call

    monkeypatch.setattr("deployments.api.http.body.parse_object", noted(body.parse_object))
    monkeypatch.setattr("deployments.api.application.app.parse", noted(protocol.parse))
    answer = limited(service).post("/v1/completions", {"model": "demo", "prompt": "hi", **fields})
    assert answer.status_code == 200 and len(threads) == 2
    assert [thread.startswith("prepare") for thread in threads] == [is_far] * 2


def test_room_is_taken_as_bytes_arrive_and_given_back_at_the_end() -> None:
    memory = BodyMemory(1000, has_tenants=False)
    with memory.open("a") as one, memory.open("b") as two:
        one.take(600)
        two.take(400)
        with pytest.raises(ApiError) as refused:
            two.take(1)
        assert refused.value.status == 429 and "retry-after" in refused.value.headers
        assert memory.num_bytes == 1000
    assert memory.num_bytes == 0


def test_a_thread_that_works_on_after_its_request_was_cancelled_takes_no_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The client leaves between the beginning of the work on its body and the counting of its values."""
    memory, begun, may_count = BodyMemory(10**6, has_tenants=False), threading.Event(), threading.Event()

    def most(body: bytearray) -> int:
        begun.set()
        may_count.wait()
        return most_values(body)

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"{" + b" " * 2000 + b"}", "more_body": False}

    async def answer() -> None:
        with memory.open("t") as room:
            await read_json(Request({"type": "http", "headers": []}, receive), Limits(), room)

    monkeypatch.setattr(Limits, "inline_body_bytes", 100)

    async def play() -> None:
        task = asyncio.create_task(answer())
        while not begun.is_set():
            await asyncio.sleep(0.001)
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled() and memory.num_bytes == 0
        may_count.set()

    monkeypatch.setattr("deployments.api.http.body.most_values", most)
    asyncio.run(play())  # which waits for the thread
    assert memory.num_bytes == 0


def test_where_there_are_no_tenants_one_address_leaves_room_to_the_others(service: ApiService) -> None:
    """Bodies of which all but the end has come take at most three quarters of the room."""
    limits = Limits(max_body_bytes=1024, max_total_body_bytes=4096, max_json_values=1024)
    app = create_app(replace(service, limits=limits))
    body = b'{"model": "demo", "prompt": "hi", "max_tokens": 1}'

    async def scenario() -> None:
        stay, num_begun = asyncio.Event(), 0

        async def unfinished() -> AsyncIterator[bytes]:
            nonlocal num_begun
            yield b" " * 1000
            num_begun += 1
            await stay.wait()

        async def post(address: str, content: Any) -> int:
            transport = httpx.ASGITransport(app, client=(address, 1))
            async with httpx.AsyncClient(transport=transport, base_url="http://a") as client:
                headers = {"content-type": "application/json"}
                return (await client.post("/v1/completions", headers=headers, content=content)).status_code

        slow = [asyncio.create_task(post("10.0.0.1", unfinished())) for _ in range(3)]
        while num_begun < 3:
            await asyncio.sleep(0.001)
        assert await post("10.0.0.1", body + b" " * 900) == 429
        assert await post("10.0.0.2", body) == 200
        for task in slow:
            task.cancel()
        await asyncio.gather(*slow, return_exceptions=True)
        assert await post("10.0.0.1", body) == 200

    asyncio.run(scenario())


def test_no_tenant_takes_more_than_half() -> None:
    memory = BodyMemory(1000, has_tenants=True)
    with memory.open("a") as one, memory.open("a") as more, memory.open("b") as other:
        one.take(500)
        with pytest.raises(ApiError):
            more.take(1)
        other.take(500)
    assert memory.num_bytes == 0


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"model": "demo", "prompt": "the " * 150}),
        ("/v1/chat/completions", {"model": "demo", "messages": [{"role": "user", "content": "the " * 150}]}),
        ("/tokenize", {"prompt": "the " * 150}),
        ("/detokenize", {"tokens": [5] * 300}),
    ],
)
def test_a_body_that_exceeds_the_room_gets_a_429_and_the_next_request_finds_it_free(
    service: ApiService, monkeypatch: pytest.MonkeyPatch, path: str, body: object
) -> None:
    """Another body holds the room while this one comes; when it is gone there is room again."""
    keys = KeyRing((TenantSettings(name="a", key_hashes=(hash_key("key"),)),))
    limits = Limits(max_body_bytes=1024, max_total_body_bytes=8192)
    rooms: list[BodyMemory] = []
    made = BodyMemory.__init__

    def note(self: BodyMemory, *args: Any, **options: Any) -> None:
        made(self, *args, **options)
        rooms.append(self)

    monkeypatch.setattr(BodyMemory, "__init__", note)
    app = create_app(replace(service, limits=limits, access=AccessControl(keys)))
    client = Client(httpx.ASGITransport(app))
    headers = {"authorization": "Bearer key"}
    memory = rooms[0]
    with memory.open("a") as other:
        other.take(3900)
        refused = client.post(path, body, headers=headers)
        assert refused.status_code == 429 and refused.headers["retry-after"]
        assert "limits.max_total_body_bytes" in refused.json()["error"]["message"]
        assert memory.num_bytes == 3900
    assert client.post(path, body, headers=headers).status_code == 200
    assert memory.num_bytes == 0


def _chat(content: str) -> bytes:
    return json.dumps({"model": "demo", "messages": [{"role": "user", "content": content}]}).encode()


@pytest.mark.parametrize(
    "body",
    [
        _chat("lorem ipsum, " * 20_000),
        _chat("lorem ipsum <|im_end|> \U0001f469" * 10_000),
        _chat("<|im_end|>" * 20_000),
        json.dumps({"model": "demo", "messages": [{"role": "user", "content": "a"}] * 3000}).encode(),
        json.dumps({"model": "demo", "prompt": [1234] * 200_000, "echo": True}).encode(),
    ],
    ids=["text", "wide text", "special tokens", "messages", "ids"],
)
def test_a_body_takes_no_more_memory_than_is_counted(body: bytes) -> None:
    """From its first byte to its answer, in the memory of Python's own objects."""
    app = application(Limits(), context=400_000)
    case = Case("", "/v1/completions" if b'"prompt"' in body else "/v1/chat/completions", body)
    asyncio.run(post(app, case))  # what is imported and compiled once is not the body's
    tracemalloc.start()
    try:
        status, _ = asyncio.run(post(app, case))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert status == 200
    assert peak <= MEMORY_FACTOR * (len(body) + VALUE_BYTES * most_values(body))


def test_limits_that_would_never_take_a_body_are_refused() -> None:
    with pytest.raises(ValueError, match="max_total_body_bytes"):
        Limits(max_body_bytes=2**30)


ENDPOINTS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"model": "demo", "prompt": "hi"}),
    ("/v1/chat/completions", {"model": "demo", "messages": [{"role": "user", "content": "hi"}]}),
    ("/v1/messages", {"model": "demo", "max_tokens": 5, "messages": [{"role": "user", "content": "hi"}]}),
    ("/v1/responses", {"model": "demo", "input": "hi"}),
    ("/v1/responses/input_tokens", {"model": "demo", "input": "hi"}),
    ("/v1/conversations", {"metadata": {"a": "é"}}),
    ("/tokenize", {"model": "demo", "prompt": "hi"}),
]


@pytest.mark.parametrize(("path", "fields"), ENDPOINTS)
def test_a_byte_order_mark_before_a_body_is_no_part_of_it(
    client: Client, path: str, fields: dict[str, Any]
) -> None:
    as_json = {"content-type": "application/json"}
    body = json.dumps(fields, ensure_ascii=False)
    assert client.post(path, body.encode("utf-8-sig"), headers=as_json).status_code == 200
    packed = {**as_json, "content-encoding": "gzip"}
    assert client.post(path, gzip.compress(body.encode("utf-8-sig")), headers=packed).status_code == 200
    for encoding in ("utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-le", "utf-32-be"):
        response = client.post(path, body.encode(encoding), headers=as_json)
        error = response.json()["error"]
        assert response.status_code == 400 and "UTF-8" in error["message"] and "UTF-16" in error["message"]
    for wrong in (b"\xef\xbb\xbf", b"\xef\xbb\xbf\xef\xbb\xbf{}", b"\xef\xbb{}", b"{}\xef\xbb\xbf"):
        assert client.post(path, wrong, headers=as_json).status_code == 400


def test_a_large_body_in_another_encoding_is_told_so(service: ApiService, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Limits, "inline_body_bytes", 10)
    client = Client(httpx.ASGITransport(create_app(service)))
    body = json.dumps({"model": "demo", "prompt": "hi"})
    as_json = {"content-type": "application/json"}
    assert client.post("/v1/completions", body.encode("utf-8-sig"), headers=as_json).status_code == 200
    error = client.post("/v1/completions", body.encode("utf-16"), headers=as_json).json()["error"]
    assert "UTF-16" in error["message"]
