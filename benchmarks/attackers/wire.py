"""Strangers at the engines' wires: floods of connections, and handshakes that are garbage or never end.

They have no key. What they say by hand is ZMTP 3.0 (ZeroMQ's RFC 23), with the mechanism CURVE (RFC 26).
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from functools import partial

import zmq

from benchmarks.attackers.base import Attacker, Kind
from benchmarks.attackers.connections import Stranger

Address = tuple[str, int]
_COMMAND, _MORE, _LONG = 4, 1, 2
_HELLO_BYTES = 192
"""Size of the rest of CURVE's hello, after the command's name."""


class WireStrangers(Attacker):
    """Connects to the engines' wires, each kind of stranger in turn; the engines must end each connection."""

    name = "wire"

    def kinds(self) -> Mapping[str, Kind]:
        """Return the kinds of strangers."""
        of: dict[str, Callable[[Address], Awaitable[None]]] = {
            "silent": self._silent, "garbage": self._garbage, "half a greeting": self._half_greeting,
            "without a key": self._without_key, "endless message": self._endless, "garbled hello": self._hello,
            "endless hello": self._endless_hello, "wrong keys": self._wrong_keys, "flood": self._flood,
        }  # fmt: skip
        return {kind: partial(self._at_all, attack) for kind, attack in of.items()}

    async def _at_all(self, attack: Callable[[Address], Awaitable[None]]) -> None:
        addresses = await asyncio.to_thread(self.target.wire_addresses)
        await asyncio.gather(*map(attack, addresses))

    async def _silent(self, address: Address) -> None:
        await self._said(address, b"")

    async def _garbage(self, address: Address) -> None:
        await self._said(address, self.draw.randbytes(5000))
        await self._said(address, b"GET /metrics HTTP/1.1\r\nhost: x\r\n\r\n")

    async def _half_greeting(self, address: Address) -> None:
        await self._said(address, _greeting(b"CURVE")[: self.draw.randint(1, 63)])

    async def _without_key(self, address: Address) -> None:
        for mechanism in (b"NULL", b"PLAIN", b"GSSAPI", b"\xff" * 20):
            await self._said(
                address, _greeting(mechanism) + _command(b"READY", b"\x0bSocket-Type\0\0\0\x06DEALER")
            )

    async def _endless(self, address: Address) -> None:
        """Parts of a message that never ends, where no message may come yet."""
        await self._said(address, _greeting(b"NULL") + _command(b"READY", b""), _frame(_MORE, bytes(65536)))

    async def _hello(self, address: Address) -> None:
        for size in (_HELLO_BYTES, 0, 10, 250):
            await self._said(address, _greeting(b"CURVE") + _command(b"HELLO", self.draw.randbytes(size)))

    async def _endless_hello(self, address: Address) -> None:
        announced = bytes([_COMMAND | _LONG]) + struct.pack(">Q", 2**62)
        await self._said(address, _greeting(b"CURVE") + announced, bytes(65536))

    async def _flood(self, address: Address) -> None:
        await asyncio.gather(*(self._said(address, _greeting(b"CURVE")) for _ in range(2 * self.target.num_flood)))

    async def _wrong_keys(self, address: Address) -> None:
        """ZeroMQ's own sockets, which connect again and again: without keys, and with keys that are not right."""
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        sockets = [context.socket(zmq.DEALER) for _ in range(16)]
        try:
            for number, socket in enumerate(sockets):
                socket.setsockopt(zmq.LINGER, 0)
                if number % 2:
                    public, secret = zmq.curve_keypair()
                    socket.setsockopt(zmq.CURVE_PUBLICKEY, public)
                    socket.setsockopt(zmq.CURVE_SECRETKEY, secret)
                    socket.setsockopt(zmq.CURVE_SERVERKEY, zmq.curve_keypair()[0])
                socket.connect(f"tcp://{address[0]}:{address[1]}")
                with suppress(zmq.Again):  # the engine has ended the connection already
                    for _ in range(100):
                        socket.send(self.draw.randbytes(100), zmq.NOBLOCK)
            await asyncio.sleep(3)
            if any(socket.poll(0) for socket in sockets):
                self.wrong.append("a stranger without the ingresses' key got a message")
        finally:
            context.destroy(linger=0)

    async def _said(self, address: Address, data: bytes, again: bytes = b"") -> None:
        """Say something, then `again` without end. The engine must end the connection, and tell nothing."""
        try:
            async with Stranger(*address, is_patient=False) as stranger:
                reading = asyncio.create_task(stranger.read_all())
                is_taken = await stranger.send(data)
                while again and is_taken and not reading.done():
                    is_taken = await stranger.send(again)
                heard = await reading
        except TimeoutError:
            self.wrong.append(f"a stranger's connection is not ended after {data[:80]!r}")
        except OSError:
            self.counts["refused"] += 1
        else:
            if len(heard) > 1000:
                self.wrong.append(f"a stranger heard {len(heard)} bytes: {heard[:200]!r}")


def _greeting(mechanism: bytes) -> bytes:
    return b"\xff" + bytes(8) + b"\x7f\x03\x00" + mechanism.ljust(20, b"\0") + bytes(32)


def _command(name: bytes, data: bytes) -> bytes:
    return _frame(_COMMAND, bytes([len(name)]) + name + data)


def _frame(flags: int, body: bytes) -> bytes:
    if len(body) < 256:
        return bytes([flags, len(body)]) + body
    return bytes([flags | _LONG]) + struct.pack(">Q", len(body)) + body
