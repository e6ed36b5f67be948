"""A head that can be read in two ways is refused, before any endpoint sees the request."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployments.api.base.errors import ApiError
from deployments.http_server.request_head import check_framing, origin_form
from tests.deployments.support.served_api import Api, error_of, said, serving


@pytest.mark.parametrize(
    ("status", "line", "headers"),
    [
        (400, "GET / HTTP/1.1", ""),
        (400, "GET http://localhost/ HTTP/1.1", ""),
        (400, "GET / HTTP/1.1", "host: a\r\nhost: b\r\n"),
        (400, "GET / HTTP/1.1", "host: a\r\nHost: a\r\n"),
        (400, "GET / HTTP/1.0", "host: a\r\nhost: a\r\n"),
        (400, "GET / HTTP/1.1", "host:\r\n"),
        (400, "GET / HTTP/1.1", "host: localhost:x\r\n"),
        (400, "GET / HTTP/1.1", "host: localhost:-1\r\n"),
        (400, "GET / HTTP/1.1", "host: localhost:65536\r\n"),
        (400, "GET / HTTP/1.1", "host: localhost:80:80\r\n"),
        (400, "GET / HTTP/1.1", "host: :80\r\n"),
        (400, "GET / HTTP/1.1", "host: user@localhost\r\n"),
        (400, "GET / HTTP/1.1", "host: localhost/\r\n"),
        (400, "GET / HTTP/1.1", "host: http://localhost\r\n"),
        (400, "GET / HTTP/1.1", "host: a b\r\n"),
        (400, "GET / HTTP/1.1", "host: h\u00f6st\r\n"),
        (400, "GET / HTTP/1.1", "host: [::1].evil.example\r\n"),
        (400, "GET / HTTP/1.1", "host: [::1]evil\r\n"),
        (400, "GET / HTTP/1.1", "host: [::1\r\n"),
        (400, "GET / HTTP/1.1", "host: [:::1]\r\n"),
        (400, "GET / HTTP/1.1", "host: ::1\r\n"),
        (400, "GET / HTTP/1.1", f"host: {'a' * 400}\r\n"),
        (400, "GET http://evil.example/ HTTP/1.1", "host: localhost\r\n"),
        (400, "GET http://localhost:81/ HTTP/1.1", "host: localhost:82\r\n"),
        (400, "GET http://localhost:81/ HTTP/1.1", "host: localhost\r\n"),
        (400, "GET http://localhost@evil.example/ HTTP/1.1", "host: localhost\r\n"),
        (400, "GET http://user@localhost/ HTTP/1.1", "host: localhost\r\n"),
        (400, "GET http:///x HTTP/1.1", "host: localhost\r\n"),
        (400, "GET ftp://localhost/ HTTP/1.1", "host: localhost\r\n"),
        (400, "GET / HTTP/2.0", "host: a\r\n"),
        (400, "GET / HTTP/0.9", "host: a\r\n"),
        (400, "GET /", ""),
        (501, "POST / HTTP/1.1", "host: a\r\ntransfer-encoding: gzip, chunked\r\n"),
        (501, "POST / HTTP/1.1", "host: a\r\ntransfer-encoding: gzip\r\ntransfer-encoding: chunked\r\n"),
        (501, "POST / HTTP/1.1", "host: a\r\nTransfer-Encoding: identity, Chunked\r\n"),
        (400, "POST / HTTP/1.1", "host: a\r\ntransfer-encoding: chunked, chunked\r\n"),
        (400, "POST / HTTP/1.0", "host: a\r\ntransfer-encoding: chunked\r\n"),
        (400, "POST / HTTP/1.1", "host: a\r\ncontent-length: 3\r\ntransfer-encoding: chunked\r\n"),
        (400, "POST / HTTP/1.1", "host: a\r\ntransfer-encoding: chunked\r\ncontent-length: 3\r\n"),
    ],
)
@pytest.mark.parametrize(
    "asks", ["", "connection: upgrade\r\nupgrade: h2c\r\n"], ids=["plainly", "with an upgrade"]
)
def test_a_head_that_is_not_clear_is_refused(status: int, line: str, headers: str, asks: str) -> None:
    async def scenario() -> None:
        api = Api()
        async with serving(api) as (port, _):
            told = await said(port, f"{line}\r\n{headers}{asks}\r\n0\r\n\r\n".encode("latin-1"))
            assert error_of(told)[0] == status
        assert api.num_requests == 0

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("line", "headers"),
    [
        ("GET /x HTTP/1.1", "host: localhost"),
        ("GET /x HTTP/1.1", "HOST:\tLocalhost:8000 "),
        ("GET /x HTTP/1.1", "host: localhost:"),
        ("GET /x HTTP/1.1", "host: [::1]:8000"),
        ("GET /x HTTP/1.1", "host: my_service.namespace.svc"),
        ("GET /x HTTP/1.1", "host: xn--hst-sna.example."),
        ("GET /x HTTP/1.0", "x-no: host"),
        ("GET http://localhost/x HTTP/1.1", "host: LOCALHOST:80"),
        ("GET HTTP://LocalHost:080/x HTTP/1.1", "host: localhost"),
        ("GET https://localhost/x HTTP/1.1", "host: localhost:443"),
        ("GET http://[::1]:8000/x HTTP/1.1", "host: [::1]:8000"),
        ("GET http://localhost/x HTTP/1.0", "x-no: host"),
        ("POST /x HTTP/1.1", "host: a\r\nTransfer-Encoding:  Chunked"),
    ],
)
def test_a_clear_head_is_answered(line: str, headers: str) -> None:
    async def scenario() -> None:
        api = Api()
        async with serving(api) as (port, _):
            body = "0\r\n\r\n" if "POST" in line else ""
            told = await said(port, f"{line}\r\n{headers}\r\nconnection: close\r\n\r\n{body}".encode())
            assert told.startswith(b"HTTP/1.1 200")
        assert api.paths == ["/x"]

    asyncio.run(scenario())


def test_a_url_of_only_a_host_is_its_root() -> None:
    assert origin_form("1.1", b"http://a", [(b"host", b"a")]) == b"/"
    assert origin_form("1.1", b"http://a?b=c", [(b"host", b"a")]) == b"/?b=c"


@given(
    version=st.sampled_from(["0.9", "1.0", "1.1", "2.0"]),
    target=st.binary(max_size=20).map(lambda rest: b"http://" + rest) | st.binary(max_size=20),
    hosts=st.lists(st.binary(max_size=20), max_size=2),
    codings=st.lists(st.binary(max_size=20) | st.just(b"chunked"), max_size=2),
)
def test_any_head_is_taken_or_refused(
    version: str, target: bytes, hosts: list[bytes], codings: list[bytes]
) -> None:
    headers = [(b"host", host) for host in hosts] + [(b"transfer-encoding", coding) for coding in codings]
    try:
        check_framing(version, headers)
        origin_form(version, target, headers)
    except ApiError as error:
        assert error.status in (400, 501)
        assert error.message
    else:
        assert len(hosts) == 1 or (version, hosts) == ("1.0", [])
