"""Stream a chat, and continue it where it stopped if the connection breaks off.

    python examples/reconnect.py "What does itertools.chain do?" [--url http://127.0.0.1:8000]

Needs `pip install httpx` and a server: `raydix serve`. Each event has an id, because the request accepts
text/event-stream. The same request with the header Last-Event-ID continues after that event.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from typing import Any

import httpx

PASSING = ("unavailable", "overloaded", "aborted", "engine_lost")
"""Codes of errors after which the same request may succeed."""


def main() -> None:
    """Read the options and print the answer as it comes."""
    parser = argparse.ArgumentParser()
    parser.add_argument("question")
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    options = parser.parse_args()
    model = httpx.get(f"{options.url}/v1/models").json()["data"][0]["id"]
    messages = [{"role": "user", "content": options.question}]
    body = {"model": model, "messages": messages, "temperature": 0, "stream": True}
    for text in chat(f"{options.url}/v1/chat/completions", body):
        print(text, end="", flush=True)
    print()


def chat(url: str, body: dict[str, Any]) -> Iterator[str]:
    """Yield an answer's text, over as many connections as it takes."""
    headers = {"accept": "text/event-stream"}
    while True:
        try:
            with httpx.stream("POST", url, json=body, headers=headers, timeout=300) as answer:
                answer.raise_for_status()
                for event in events(answer):
                    if event["data"] == "[DONE]":
                        return
                    data = json.loads(event["data"])
                    if "error" in data:
                        if data["error"]["code"] not in PASSING:
                            raise RuntimeError(data["error"]["message"])
                        break
                    headers["last-event-id"] = event["id"]
                    for choice in data["choices"]:
                        yield choice["delta"].get("content") or ""
        except httpx.HTTPStatusError as refusal:
            if refusal.response.status_code not in (429, 502, 503):
                raise
        except httpx.TransportError:
            pass  # the connection broke off
        time.sleep(0.5)


def events(answer: httpx.Response) -> Iterator[dict[str, str]]:
    """Yield the fields of each event that has arrived completely."""
    unread = ""
    for text in answer.iter_text():
        *complete, unread = (unread + text).split("\n\n")
        for event in complete:
            yield dict(line.split(": ", 1) for line in event.split("\n"))


if __name__ == "__main__":
    main()
