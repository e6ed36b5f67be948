"""Have a model fill in a pydantic class.

    python examples/structured_output.py "Is itertools.chain a class? Rate it." [--url http://127.0.0.1:8000]

Needs `pip install openai` and a server: `raydix serve`. Every model's answer matches the class: tokens that would
not match are never sampled. Whether it is true is up to the model: the embedded one has not learnt to judge.
"""

from __future__ import annotations

import argparse
from typing import Annotated, Literal

import openai
from pydantic import BaseModel, Field


class Review(BaseModel):
    """What is wanted to know of a piece of Python's standard library."""

    kind: Literal["function", "class", "module"]
    summary: Annotated[str, Field(max_length=60)]
    stars: Annotated[int, Field(ge=1, le=5)]
    see_also: Annotated[list[Literal["itertools", "functools", "operator"]], Field(max_length=2)]


def main() -> None:
    """Read the options and print the filled-in class."""
    parser = argparse.ArgumentParser()
    parser.add_argument("question")
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    options = parser.parse_args()
    print(ask(options.url, options.question).model_dump_json(indent=2))


def ask(url: str, question: str) -> Review:
    """Ask the server's first model. Raises openai.LengthFinishReasonError when the answer is too long."""
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none")
    completion = client.chat.completions.parse(
        model=client.models.list().data[0].id,
        messages=[{"role": "user", "content": question}],
        response_format=Review,
        temperature=0,
        max_completion_tokens=512,
    )
    review = completion.choices[0].message.parsed
    assert review is not None
    return review


if __name__ == "__main__":
    main()
