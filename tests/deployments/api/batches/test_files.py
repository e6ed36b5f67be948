"""/v1/files: what OpenAI's client uploads is kept within bounds, listed, read, deleted, and expires."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from deployments.api import Limits
from deployments.api.http.access import AccessControl
from deployments.batch.stored_batches import StoredBatches
from deployments.config.files import FileSettings
from deployments.config.tenants import KeyRing, TenantSettings, hash_key
from tests.deployments.api.batches.conftest import (
    BOUNDARY,
    CHAT,
    END,
    FORM,
    PURPOSE,
    Ingress,
    Office,
    lines,
    part,
)
from tests.support.examples import examples

BASE64 = b"Content-Transfer-Encoding: base64"
PIECES = [PURPOSE, part("file", b"x", "a"), END, b"\r\n", b"--", b"\x00", BOUNDARY.encode()]


def left(office: Office) -> list[str]:
    """What lies in the spool, but for the lock of its tenant; folders may go meanwhile."""
    return sorted(name for _, _, names in os.walk(office.directory) for name in names if name != "lock")


def test_a_file_is_kept_read_and_deleted(office: Office) -> None:
    async def scene(ingress: Ingress) -> None:
        content = lines("a") + b"\r\n--almost a boundary\r\n" + bytes(range(256)) * 3000
        file = await ingress.ai.files.create(
            file=("C:\\dir/in.jsonl", content),
            purpose="batch",
            expires_after={"anchor": "created_at", "seconds": 7200},
        )
        assert (file.object, file.bytes, file.filename, file.purpose) == (
            "file",
            len(content),
            "in.jsonl",
            "batch",
        )
        assert file.created_at == office.clock.now and file.expires_at == file.created_at + 7200
        assert await ingress.ai.files.retrieve(file.id) == file
        assert (await ingress.ai.files.content(file.id)).content == content
        assert (await ingress.ai.files.delete(file.id)).deleted
        for method, path in (("GET", ""), ("GET", "/content"), ("DELETE", "")):
            gone = await ingress.http.request(method, f"/v1/files/{file.id}{path}")
            assert gone.status_code == 404 and gone.json()["error"]["code"] == "file_not_found"

    office.play(scene)
    assert left(office) == []


def test_files_are_listed_in_pages(office: Office) -> None:
    async def scene(ingress: Ingress) -> None:
        files = []
        for _ in range(3):
            files.append((await ingress.upload(lines("a"))).id)
            office.clock.now += 1
        batch = await ingress.until(await ingress.begin(lines("a")), "completed")
        assert [file.id for file in (await ingress.ai.files.list(order="asc")).data][:3] == files
        outputs = [file.id for file in (await ingress.ai.files.list(purpose="batch_output")).data]
        assert outputs == [batch.output_file_id]
        page = await ingress.ai.files.list(limit=2, order="asc")
        assert [file.id for file in page.data] == files[:2] and page.has_more
        after = await ingress.ai.files.list(limit=1, order="asc", after=files[1])
        assert [file.id for file in after.data] == [files[2]]
        for wrong in ({"limit": "0"}, {"limit": "10001"}, {"order": "up"}, {"after": "file-1"}):
            refused = await ingress.http.get("/v1/files", params=wrong)
            assert refused.status_code == (404 if "after" in wrong else 400) and refused.json()["error"][
                "param"
            ] == next(iter(wrong))

    office.play(scene)


def test_a_file_expires(office: Office) -> None:
    async def scene(ingress: Ingress) -> None:
        file = await ingress.upload(lines("a"))
        office.clock.now = file.expires_at - 1
        assert (await ingress.http.get(f"/v1/files/{file.id}")).status_code == 200
        office.clock.now = file.expires_at
        assert (await ingress.http.get(f"/v1/files/{file.id}")).status_code == 404
        assert (await ingress.ai.files.list()).data == []

    office.play(scene)

    async def sweep() -> None:
        async with office.ingress().working(), asyncio.timeout(60):
            while left(office):
                await asyncio.sleep(0.005)

    asyncio.run(sweep())


@pytest.mark.parametrize(
    ("headers", "body", "status", "message"),
    [
        ({"content-type": "application/json"}, b"{}", 415, "multipart/form-data"),
        ({"content-type": "multipart/form-data"}, b"", 400, "has no boundary"),
        ({"content-type": "multipart/form-data; boundary="}, b"", 400, "has no boundary"),
        ({"content-type": 'multipart/form-data; boundary=""'}, b"", 400, "has no boundary"),
        ({"content-type": f"multipart/form-data; boundary={'b' * 300}"}, b"", 400, "of 1 to 70"),
        ({"content-type": f"multipart/form-data; boundary={'b' * 71}"}, b"", 400, "of 1 to 70"),
        ({"content-type": "multipart/form-data; boundary=\xe9\xe9".encode("latin-1")}, b"", 400, "of 1 to 70"),
        ({"content-type": "multipart/form-data; boundary=\u20ac".encode()}, b"", 400, "of 1 to 70"),
        ({"content-type": 'multipart/form-data; boundary="b "'}, b"", 400, "of 1 to 70"),
        ({"content-type": "multipart/form-data; boundary*=utf-8''abc"}, b"", 400, "has no boundary"),
        ({"content-type": "multipart/mixed; boundary=abc"}, b"", 415, "multipart/form-data"),
        (FORM, PURPOSE + part("file", b"eA==").replace(b"\r\n\r\n", b"\r\n" + BASE64 + b"\r\n\r\n")
         + END, 400, "content-transfer-encoding"),
        ({**FORM, "content-encoding": "gzip"}, PURPOSE + END, 415, "compressed"),
        ({**FORM, "origin": "https://evil.example"}, PURPOSE + END, 403, "cors_origins"),
        (FORM, b"", 400, "closing boundary"),
        (FORM, b"nonsense", 400, "not a valid multipart form"),
        (FORM, PURPOSE + part("file", b"x", "a"), 400, "closing boundary"),
        (FORM, PURPOSE + END, 400, "has no file"),
        (FORM, part("file", b"x", "a") + END, 400, "purpose must be 'batch'"),
        (FORM, part("purpose", b"assistants") + part("file", b"x", "a") + END, 400, "got 'assistants'"),
        (FORM, PURPOSE + part("file", b"", "a") + END, 400, "empty"),
        (FORM, PURPOSE + part("file", b"x") + part("file", b"x") + END, 400, "two parts named file"),
        (FORM, part("purpose", b"x" * 2000) + END, 400, "longer than 1024"),
        (FORM, part("x", b"") * 20 + END, 400, "more than 16 parts"),
        (FORM, PURPOSE + part("file", b"x" * 5000) + END, 413, "files.max_file_bytes"),
        ({**FORM, "content-length": "999999"}, b"", 413, "files.max_file_bytes"),
        (FORM, PURPOSE + part("expires_after[seconds]", b"7200") + part("file", b"x") + END, 400, "anchor"),
        (FORM, PURPOSE + part("expires_after[anchor]", b"created_at") + part("expires_after[seconds]", b"9")
         + part("file", b"x") + END, 400, "expires_after.seconds"),
    ],
)  # fmt: skip
def test_a_form_that_is_wrong_is_refused_and_leaves_nothing(
    office: Office, headers: dict[str, str], body: bytes, status: int, message: str
) -> None:
    async def scene(ingress: Ingress) -> None:
        refused = await ingress.http.post("/v1/files", content=_in_pieces(body), headers=headers)
        assert refused.status_code == status, refused.text
        assert message in refused.json()["error"]["message"]

    office.play(scene, max_file_bytes=4096)
    assert left(office) == []


@pytest.mark.parametrize("named", ['"in two words"', "b" * 70, "----WebKitFormBoundary'()+_,-./:=?"])
def test_a_boundary_may_be_quoted_and_as_long_as_rfc_2046_has_it(office: Office, named: str) -> None:
    body = (PURPOSE + part("file", b"{}", "a") + END).replace(BOUNDARY.encode(), named.strip('"').encode())
    headers = {"content-type": f"multipart/form-data; boundary={named}"}

    async def scene(ingress: Ingress) -> None:
        answer = await ingress.http.post("/v1/files", content=body, headers=headers)
        assert answer.status_code == 200, answer.text

    office.play(scene)


async def _in_pieces(body: bytes) -> AsyncIterator[bytes]:
    for start in range(0, len(body), 700):
        yield body[start : start + 700]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=examples(25), deadline=None)
@given(
    st.lists(st.sampled_from([PURPOSE, part("file", b"x", "a"), END, b"\r\n", b"--", b"\x00", BOUNDARY.encode()]))
)
def test_no_form_is_a_defect(office: Office, pieces: list[bytes]) -> None:
    async def scene(ingress: Ingress) -> None:
        answer = await ingress.http.post("/v1/files", content=b"".join(pieces), headers=FORM)
        assert answer.status_code in (200, 400) and answer.json()

    office.play(scene)


def test_the_files_that_a_tenant_may_keep_are_bounded(office: Office) -> None:
    async def scene(ingress: Ingress) -> None:
        await ingress.upload(b"x" * 700)
        for content, setting in ((b"x" * 700, "files.max_total_bytes"), (b"x", ""), (b"x", "files.max_files")):
            try:
                file = await ingress.upload(content)
            except openai.BadRequestError as error:
                assert setting and setting in str(error) and error.code == "storage_full"
            else:
                assert not setting
        await ingress.ai.files.delete(file.id)
        await ingress.upload(b"x")

    office.play(scene, max_total_bytes=1500, max_files=2)


def test_a_client_that_stops_or_leaves_leaves_nothing(office: Office) -> None:
    service = replace(office.service, limits=Limits.model_validate({"body_timeout_s": 0.05}))

    async def stuck() -> AsyncIterator[bytes]:
        yield PURPOSE + part("file", b"x" * 1000, "a")
        await asyncio.sleep(3600)

    async def scene(ingress: Ingress) -> None:
        refused = await ingress.http.post("/v1/files", content=stuck(), headers=FORM)
        assert refused.status_code == 408 and "limits.body_timeout_s" in refused.json()["error"]["message"]

    replace(office, service=service).play(scene)
    assert left(office) == []


def test_without_a_directory_there_are_none(client: Any) -> None:
    for method, path in (
        ("POST", "/v1/files"), ("GET", "/v1/files"), ("GET", "/v1/files/x/content"), ("POST", "/v1/batches"),
        ("GET", "/v1/batches"), ("POST", "/v1/batches/x/cancel"),
    ):  # fmt: skip
        answer = client.request(method, path, json={})
        assert answer.status_code == 404 and "files.directory" in answer.json()["error"]["message"]


def test_a_directory_is_the_same_for_all_ingresses() -> None:
    with pytest.raises(ValueError, match="absolute path"):
        FileSettings(directory="files")
    assert FileSettings(directory="~/files").directory == str(Path.home() / "files")


def test_tenants_see_only_their_own_files_and_batches(office: Office) -> None:
    tenants = [TenantSettings(name=name, key_hashes=(hash_key(f"key-of-{name}"),)) for name in ("a", "A")]
    service = replace(office.service, access=AccessControl(KeyRing(tenants)))

    async def scene(ingress: Ingress) -> None:
        mine, other = ingress.client("key-of-a"), ingress.client("key-of-A")
        file = await ingress.upload(lines("x"), mine)
        batch = await mine.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h")
        assert (await other.files.list()).data == [] and (await other.batches.list()).data == []
        asks: list[Any] = [
            other.files.retrieve(file.id),
            other.files.content(file.id),
            other.files.delete(file.id),
            other.batches.retrieve(batch.id),
            other.batches.cancel(batch.id),
            other.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h"),
        ]
        for ask in asks:
            with pytest.raises(openai.NotFoundError):
                await ask
        ingress.ai = mine
        done = await ingress.until(batch, "completed")
        with pytest.raises(openai.NotFoundError):
            await other.files.content(done.output_file_id)
        assert {request.tenant for request in office.engine.requests} == {"a"}

    replace(office, service=service).play(scene)


def test_a_batch_of_a_tenant_without_a_key_waits_and_can_be_cancelled(office: Office) -> None:
    async def leave() -> Any:
        ingress = office.ingress()
        return await ingress.begin(lines("a"))

    batch = asyncio.run(leave())
    key = TenantSettings(name="t", key_hashes=(hash_key("key"),))
    closed = replace(office.service, access=AccessControl(KeyRing([key])))

    async def scene(ingress: Ingress) -> None:
        found = ingress.spool.of("anonymous")
        async with asyncio.timeout(60):
            while StoredBatches(found).find(batch.id).status != "in_progress":  # type: ignore[union-attr]
                await asyncio.sleep(0.005)
            StoredBatches(found).cancel(batch.id)
            while StoredBatches(found).find(batch.id).status != "cancelled":  # type: ignore[union-attr]
                await asyncio.sleep(0.005)

    replace(office, service=closed).play(scene)
    assert not office.engine.requests


def test_the_framework_gets_no_key(office: Office) -> None:
    """Without a key, nothing is read or written."""
    key = TenantSettings(name="t", key_hashes=(hash_key("key"),))
    service = replace(office.service, access=AccessControl(KeyRing([key])))

    async def scene(ingress: Ingress) -> None:
        answers: list[httpx.Response] = [
            await ingress.http.post("/v1/files", content=PURPOSE + END, headers=FORM),
            await ingress.http.get("/v1/files"),
            await ingress.http.get("/v1/batches"),
        ]
        assert [answer.status_code for answer in answers] == [401, 401, 401]

    replace(office, service=service).play(scene)
    assert left(office) == []
