"""Have a response generated in the background, and read its stream across broken connections.

    python examples/background_response.py "What does itertools.chain do?" [--url http://127.0.0.1:8000]

Needs `pip install openai` and a server: `raydix serve`. Whichever ingress is asked continues the stream, even if
the one that began it is gone.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator

import httpx
import openai


def main() -> None:
    """Read the options and print the answer as it comes."""
    parser = argparse.ArgumentParser()
    parser.add_argument("question")
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    options = parser.parse_args()
    client = openai.OpenAI(base_url=f"{options.url}/v1", api_key="none")
    for text in respond(client, client.models.list().data[0].id, options.question):
        print(text, end="", flush=True)
    print()


def respond(client: openai.OpenAI, model: str, question: str) -> Iterator[str]:
    """Yield a response's text, over as many connections as it takes."""
    name, last = "", -1
    while True:
        try:
            if name:
                stream = client.responses.retrieve(name, stream=True, starting_after=last)
            else:
                stream = client.responses.create(
                    model=model, input=question, temperature=0, background=True, stream=True
                )
            for event in stream:
                if event.type == "error":
                    if event.code != "server_stopped":
                        raise RuntimeError(event.message)
                    break  # another ingress continues the response
                if event.type == "response.created":
                    name = event.response.id
                last = event.sequence_number
                if event.type == "response.output_text.delta":
                    yield event.delta
                if event.type in ("response.completed", "response.incomplete"):
                    return
        except (httpx.TransportError, openai.APIConnectionError, openai.InternalServerError):
            if not name:
                raise
        time.sleep(0.5)


if __name__ == "__main__":
    main()
