"""Requests above the bound get a 429, and health still answers."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

from deployments.api.base.errors import ApiError
from deployments.api.http.access import AccessControl, Gate
from deployments.api.http.bounded import Bounded, OpenRequests
from deployments.api.http.error_response import error_response
from deployments.config.tenants import KeyRing, TenantSettings, hash_key


class Held:
    """An application whose answers wait for `go`."""

    def __init__(self) -> None:
        self.go = asyncio.Event()
        self.num_open = 0

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.num_open += 1
        if scope["method"] == "POST":
            await self.go.wait()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})


def test_one_request_more_than_the_bound_is_refused_until_one_has_ended() -> None:
    async def scenario() -> None:
        held = Held()
        transport = httpx.ASGITransport(Bounded(held, max_open=2))
        async with httpx.AsyncClient(transport=transport, base_url="http://a") as client:
            first = [asyncio.create_task(client.post("/")) for _ in range(2)]
            while held.num_open < 2:
                await asyncio.sleep(0)
            refused = await client.post("/")
            assert (refused.status_code, refused.headers["retry-after"]) == (429, "2")
            assert refused.json()["error"]["code"] == "too_many_open_requests"
            assert (await client.get("/health")).status_code == 200
            held.go.set()
            assert [answer.status_code for answer in await asyncio.gather(*first)] == [200, 200]
            assert (await client.post("/")).status_code == 200

    asyncio.run(scenario())


@pytest.mark.parametrize(("names", "places"), [(("a", "b"), 2), (("a",), 3)])
def test_each_of_several_tenants_may_have_half_of_the_places(names: tuple[str, ...], places: int) -> None:
    """And who has no key has none."""
    access = AccessControl(
        KeyRing([TenantSettings(name=name, key_hashes=(hash_key(f"key-of-{name}"),)) for name in names])
    )

    async def scenario() -> None:
        held = Held()
        transport = httpx.ASGITransport(Gate(Bounded(held, max_open=3, num_tenants=len(names)), access))
        async with httpx.AsyncClient(transport=transport, base_url="http://a") as client:

            async def post(name: str) -> httpx.Response:
                return await client.post("/", headers={"authorization": f"Bearer key-of-{name}"})

            assert (await post("nobody")).status_code == 401
            first = [asyncio.create_task(post("a")) for _ in range(places)]
            while held.num_open < places:
                await asyncio.sleep(0)
            refused = await post("a")
            assert refused.status_code == 429 and "ingresses.max_ongoing" in refused.json()["error"]["message"]
            if len(names) > 1:
                first.append(asyncio.create_task(post("b")))
                while held.num_open < 3:
                    await asyncio.sleep(0)
                assert (await post("b")).status_code == 429
            held.go.set()
            assert {answer.status_code for answer in await asyncio.gather(*first)} == {200}
            assert (await post("a")).status_code == 200

    asyncio.run(scenario())


class _Peer:
    """A client that sends a body piece by piece, and what it is answered."""

    def __init__(self, app: Any, address: str, headers: list[tuple[bytes, bytes]]) -> None:
        self._pieces: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self.statuses: list[int] = []
        self.scope = {
            "type": "http", "method": "POST", "path": "/v1/completions", "raw_path": b"/v1/completions",
            "query_string": b"", "root_path": "", "headers": headers, "client": (address, 1), "server": None,
            "scheme": "http", "http_version": "1.1",
        }  # fmt: skip
        self.task = asyncio.create_task(app(self.scope, self._pieces.get, self._send))

    async def _send(self, message: dict[str, Any]) -> None:
        if message["type"] == "http.response.start":
            self.statuses.append(message["status"])

    async def send(self, body: bytes, *, more_body: bool) -> None:
        self._pieces.put_nowait({"type": "http.request", "body": body, "more_body": more_body})
        for _ in range(5):
            await asyncio.sleep(0)

    async def leave(self) -> None:
        self._pieces.put_nowait({"type": "http.disconnect"})
        await self.task


class Reading:
    """An application that reads the body, and answers when it is told to."""

    def __init__(self) -> None:
        self.go = asyncio.Event()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        while (message := await receive())["type"] == "http.request" and message["more_body"]:
            pass
        if message["type"] == "http.disconnect":
            return
        await self.go.wait()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})


BODIES = pytest.mark.parametrize("header", [(b"content-length", b"9"), (b"transfer-encoding", b"chunked")])


@BODIES
def test_bodies_that_do_not_end_take_no_place(header: tuple[bytes, bytes]) -> None:
    async def scenario() -> None:
        reading = Reading()
        counts = OpenRequests()
        app = Bounded(reading, max_open=3, counts=counts)
        half = [_Peer(app, f"10.0.0.{n % 4}", [header]) for n in range(12)]
        for peer in half:
            await peer.send(b"{", more_body=True)
        whole = [_Peer(app, "10.0.1.1", [header]) for _ in range(3)]
        for peer in whole:
            await peer.send(b"{}", more_body=False)
        reading.go.set()
        await asyncio.gather(*(peer.task for peer in whole))
        assert [peer.statuses for peer in whole] == [[200]] * 3
        reading.go.clear()
        held = [_Peer(app, "10.0.1.1", [header]) for _ in range(3)]
        for peer in held:
            await peer.send(b"{}", more_body=False)
        for peer in half[:6]:  # a client that leaves needs no place
            await peer.leave()
        reading.go.set()
        await asyncio.gather(*(peer.task for peer in held))
        for peer in half[6:]:  # they end late, and have places then
            await peer.send(b"}", more_body=False)
            await peer.task
            assert peer.statuses == [200]
        assert counts.num_open == 0 and not counts.num_unfinished_of and not +counts.num_open_of

    asyncio.run(scenario())


@BODIES
def test_one_address_has_no_more_unfinished_bodies_than_there_are_places(header: tuple[bytes, bytes]) -> None:
    async def scenario() -> None:
        reading = Reading()
        reading.go.set()
        app = Bounded(reading, max_open=3)
        half = [_Peer(app, "10.0.0.1", [header]) for _ in range(3)]
        for peer in half:
            await peer.send(b"{", more_body=True)
        for address, status in (("10.0.0.1", 429), ("10.0.0.2", 200)):
            other = _Peer(app, address, [header])
            await other.send(b"{}", more_body=False)
            await other.task
            assert other.statuses == [status]
        for peer in half:
            await peer.leave()
        again = _Peer(app, "10.0.0.1", [header])
        await again.send(b"{}", more_body=False)
        await again.task
        assert again.statuses == [200]

    asyncio.run(scenario())


@BODIES
def test_unfinished_bodies_count_when_the_layers_are_made_again(header: tuple[bytes, bytes]) -> None:
    """They then end in the layer that they began in, and take places that the new one knows of."""

    async def scenario() -> None:
        reading, counts = Reading(), OpenRequests()
        before, after = Bounded(reading, max_open=2, counts=counts), Bounded(reading, max_open=2, counts=counts)
        half = [_Peer(before, "10.0.0.1", [header]) for _ in range(2)]
        for peer in half:
            await peer.send(b"{", more_body=True)
        refused = _Peer(after, "10.0.0.1", [header])
        await refused.task
        for peer in half:
            await peer.send(b"}", more_body=False)
        other = _Peer(after, "10.0.0.2", [header])
        await other.task
        reading.go.set()
        await asyncio.gather(*(peer.task for peer in half))
        assert [peer.statuses for peer in (refused, other, *half)] == [[429], [429], [200], [200]]
        assert counts.num_open == 0 and not counts.num_unfinished_of and not +counts.num_open_of

    asyncio.run(scenario())


def test_a_body_that_ends_while_all_places_are_taken_is_refused() -> None:
    async def scenario() -> None:
        reading = Reading()

        async def app(scope: Any, receive: Any, send: Any) -> None:
            try:
                await reading(scope, receive, send)
            except ApiError as error:
                await error_response(error, scope)(scope, receive, send)

        bounded, header = Bounded(app, max_open=1), (b"content-length", b"2")
        late = _Peer(bounded, "10.0.0.1", [header])
        await late.send(b"{", more_body=True)
        first = _Peer(bounded, "10.0.0.2", [header])
        await first.send(b"{}", more_body=False)
        await late.send(b"}", more_body=False)
        await late.task
        reading.go.set()
        await first.task
        assert (late.statuses, first.statuses) == ([429], [200])

    asyncio.run(scenario())
