"""A tiny OpenAI-compatible server for tests of clients: a token is a word, and prefixes of words are cached.

The words of the last message or of the prompt decide how it answers:
"refuse" -> 429, "break" -> an error in the stream, "cut" -> the connection closes, else it repeats its words.
Answers that are not streamed take one of `Server.permits` each, and wait while there is none.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import takewhile
from typing import Any

TOKEN_SECONDS = 0.002


class Server(ThreadingHTTPServer):
    """Serves, and keeps the bodies of requests."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.bodies: list[dict[str, Any]] = []
        self.open = 0
        self.most_open = 0
        self.lock = threading.Lock()
        self.permits = threading.Semaphore(1_000_000)
        self._seen: list[list[str]] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def cached(self, words: list[str]) -> int:
        """Number of words in the longest prefix seen before; remembers `words`."""
        with self.lock:
            lengths = [
                len(list(takewhile(lambda p: p[0] == p[1], zip(words, s, strict=False)))) for s in self._seen
            ]
            self._seen.append(words)
        return min(max(lengths, default=0), len(words) - 1)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log nothing when a client hangs up."""


class Handler(BaseHTTPRequestHandler):
    server: Server

    def log_message(self, *_: Any) -> None:
        pass

    def do_GET(self) -> None:
        self._json(200, {"object": "list", "data": [{"id": "fake"}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        with self.server.lock:
            self.server.bodies.append(body)
            self.server.open += 1
            self.server.most_open = max(self.server.most_open, self.server.open)
        self._is_open = True
        try:
            self._answer(body)
        finally:
            self._leave()

    def _leave(self) -> None:
        """Count the request as over, before its client can know and send the next."""
        with self.server.lock:
            self.server.open -= self._is_open
            self._is_open = False

    def _answer(self, body: dict[str, Any]) -> None:
        chat = "messages" in body
        prompt = body.get("prompt", "")
        given = prompt if isinstance(prompt, str) else " ".join(map(str, prompt))  # token ids are words too
        texts = [m["content"] for m in body["messages"]] if chat else [given]
        if "refuse" in texts[-1]:
            self._leave()
            return self._json(429, {"error": {"message": "queue full"}}, ("retry-after", "1"))
        if not body.get("stream"):
            return self._answer_whole(texts[-1], chat)
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.end_headers()
        words = " ".join(texts).split()
        answer = texts[-1].split()[: body.get("max_tokens", 1000)]
        for word in answer:
            time.sleep(TOKEN_SECONDS)
            choice = {"delta": {"content": word + " "}} if chat else {"text": word + " "}
            self._event({"choices": [choice]})
            if word in ("break", "cut"):
                self._leave()
            if word == "break":
                return self._event({"error": {"message": "the engine failed"}})
            if word == "cut":
                return None
        usage = {"prompt_tokens": len(words), "completion_tokens": len(answer)}
        self._event(
            {
                "choices": [],
                "usage": {**usage, "prompt_tokens_details": {"cached_tokens": self.server.cached(words)}},
            }
        )
        self._leave()
        self.wfile.write(b"data: [DONE]\n\n")
        return None

    def _answer_whole(self, text: str, chat: bool) -> None:
        self.server.permits.acquire()
        self._leave()
        if "cut" in text:
            self.close_connection = True
            return
        choice = {"message": {"content": text}} if chat else {"text": text}
        self._json(200, {"choices": [choice]}, ("x-request-id", "req-1"))

    def _event(self, event: dict[str, Any]) -> None:
        self.wfile.write(f"data: {json.dumps(event)}\n\n".encode())
        self.wfile.flush()

    def _json(self, status: int, value: Any, *headers: tuple[str, str]) -> None:
        body = json.dumps(value).encode()
        self.send_response(status)
        for name, text in (("content-length", str(len(body))), *headers):
            self.send_header(name, text)
        self.end_headers()
        self.wfile.write(body)


@contextmanager
def fake_openai() -> Iterator[Server]:
    """Run a server on a free port."""
    with Server() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
