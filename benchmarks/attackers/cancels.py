"""Clients that leave: at any moment of a request, politely or not, from requests of all kinds."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import struct
from collections.abc import Mapping
from typing import Any

from benchmarks.attackers.base import Attacker, Kind
from benchmarks.private_ray import HOST
from benchmarks.siege_app import authorization

AT_ONCE = 12
_ANSWERS = {"type": "array", "items": {"enum": [3, 17, 256]}, "minItems": 40, "maxItems": 60}
_SCHEMA = {"type": "json_schema", "json_schema": {"name": "numbers", "schema": _ANSWERS}}


class Cancels(Attacker):
    """Sends requests of all kinds at once, and leaves each of them at a moment of its own."""

    name = "cancels"

    def kinds(self) -> Mapping[str, Kind]:
        """Return the only kind."""
        return {f"{AT_ONCE} requests": self._leave_all}

    async def _leave_all(self) -> None:
        await asyncio.gather(*(self._leave() for _ in range(AT_ONCE)))

    async def _leave(self) -> None:
        kind, path, body = self._request()
        moment = self.draw.choice(["in the headers", "in the body", "at once", "soon", "while it is answered"])
        data = json.dumps({"model": "demo", "max_tokens": 2000, "ignore_eos": True, **body}).encode()
        head = (
            f"POST {path} HTTP/1.1\r\nhost: {HOST}\r\ncontent-type: application/json\r\n"
            f"authorization: {authorization('hostile')['authorization']}\r\ncontent-length: {len(data)}\r\n\r\n"
        ).encode()
        wait_s, num_reads = self.draw.uniform(0, 0.5), self.draw.randint(1, 40)
        sent = {"in the headers": head[: len(head) // 2], "in the body": head + data[: len(data) // 2]}
        with contextlib.suppress(OSError):
            reader, writer = await asyncio.open_connection(HOST, self.target.port)
            try:
                writer.write(sent.get(moment, head + data))
                await writer.drain()
                if moment == "soon":
                    await asyncio.sleep(wait_s)
                elif moment == "while it is answered":
                    await _read_some(reader, num_reads)
                self._hang_up(writer)
            finally:
                writer.close()
        self.counts[f"{kind} left"] += 1
        self.counts[f"left {moment}"] += 1

    def _request(self) -> tuple[str, str, dict[str, Any]]:
        messages = [{"role": "user", "content": f"Tell me all about the number {self.draw.randrange(10**6)}."}]
        kinds: list[tuple[str, str, dict[str, Any]]] = [
            ("stream", "/v1/chat/completions", {"messages": messages, "stream": True}),
            ("whole answer", "/v1/chat/completions", {"messages": messages}),
            ("4 choices", "/v1/completions", {"prompt": "Return the", "n": 4, "stream": True}),
            ("8 prompts", "/v1/completions", {"prompt": [f"{n} is" for n in range(8)]}),
            ("beam search", "/v1/completions", {"prompt": "Return the", "n": 3, "use_beam_search": True}),
            ("best of 4", "/v1/completions", {"prompt": "Return the", "best_of": 4}),
            ("grammar", "/v1/chat/completions",
             {"messages": messages, "stream": True, "ignore_eos": False, "response_format": _SCHEMA}),
            ("scored prompt", "/v1/completions", {"prompt": "word " * 400, "prompt_logprobs": 2}),
        ]  # fmt: skip
        return self.draw.choice(kinds)

    def _hang_up(self, writer: asyncio.StreamWriter) -> None:
        """Reset the connection, or end one direction of it only, or neither: then it is closed."""
        how = self.draw.choice(["reset", "half", "close"])
        connection: socket.socket = writer.get_extra_info("socket")
        if how == "reset":
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        elif how == "half":
            writer.write_eof()


async def _read_some(reader: asyncio.StreamReader, num_reads: int) -> None:
    for _ in range(num_reads):
        if not await reader.read(4096):
            return
