"""Clients that ask for much and read nothing: streams, whole answers, and many of them."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from functools import partial
from typing import Any

from benchmarks.attackers.base import Attacker, Kind
from benchmarks.attackers.connections import Stranger, post
from benchmarks.private_ray import HOST

AT_ONCE = 8
_MUCH: dict[str, Any] = {"max_tokens": 1500, "ignore_eos": True, "temperature": 1}


class Readers(Attacker):
    """Asks for long answers and reads none of them, until the server has given each connection up."""

    name = "readers that never read"

    def kinds(self) -> Mapping[str, Kind]:
        """Return a kind for each kind of answer."""
        asks: dict[str, tuple[str, dict[str, Any]]] = {
            "streams": ("/v1/chat/completions",
                        {**_MUCH, "messages": [{"role": "user", "content": "Go on and on."}],
                         "stream": True, "n": 4, "logprobs": True, "top_logprobs": 20}),
            "whole answers": ("/v1/completions",
                              {"prompt": [[5 + n] * 1200 for n in range(4)], "max_tokens": 0, "echo": True,
                               "prompt_logprobs": 5}),
            "token ids": ("/tokenize", {"prompt": "word " * 200_000}),
        }  # fmt: skip
        return {kind: partial(self._ask_all, kind, post(*ask, connection="close")) for kind, ask in asks.items()}

    async def _ask_all(self, kind: str, data: bytes) -> None:
        await asyncio.gather(*(self._ask(data, kind) for _ in range(AT_ONCE)))

    async def _ask(self, data: bytes, kind: str) -> None:
        async with Stranger(HOST, self.target.port) as stranger:
            stranger.shrink()
            await stranger.send(data)
            if await stranger.until_given_up(self.target.app.ingresses()):
                self.counts[f"{kind}, given up"] += 1
            else:
                self.wrong.append(f"an ingress keeps the connection of a client that never reads ({kind})")
