"""Stream a chat whose model may call a function of this program.

    python examples/streamed_tool_call.py "What is 6 times 7?" [--url http://127.0.0.1:8000] [--force]

Needs `pip install openai` and a server: `raydix serve`. The embedded model has not learnt when to call functions.
With `--force` it calls one, with arguments that match the function's schema but not the question.
"""

from __future__ import annotations

import argparse
from typing import Any

import openai
from pydantic import BaseModel, Field


class Multiply(BaseModel):
    """Multiply two whole numbers."""

    a: int = Field(ge=-1000, le=1000)
    b: int = Field(ge=-1000, le=1000)

    def run(self) -> str:
        """Return what the model is told."""
        return str(self.a * self.b)


def main() -> None:
    """Read the options and hold the chat."""
    parser = argparse.ArgumentParser()
    parser.add_argument("question")
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--force", action="store_true", help="have the model call a function at first")
    options = parser.parse_args()
    client = openai.OpenAI(base_url=f"{options.url}/v1", api_key="none")
    chat(client, options.question, "required" if options.force else "auto")


def chat(client: openai.OpenAI, question: str, tool_choice: Any = "auto", max_turns: int = 8) -> None:
    """Print the model's answers as they come, and run the functions that it calls, until it calls none."""
    model = client.models.list().data[0].id
    messages: list[Any] = [{"role": "user", "content": question}]
    for _ in range(max_turns):
        with client.chat.completions.stream(
            model=model,
            messages=messages,
            tools=[openai.pydantic_function_tool(Multiply)],
            tool_choice=tool_choice,
            temperature=0,
            max_completion_tokens=256,
        ) as stream:
            for event in stream:
                if event.type == "content.delta":
                    print(event.delta, end="", flush=True)
            answer: Any = stream.get_final_completion().choices[0].message
        if not answer.tool_calls:
            print()
            return
        fields = {"id": True, "type": True, "function": {"name", "arguments"}}
        calls = [call.model_dump(include=fields) for call in answer.tool_calls]
        messages.append({"role": "assistant", "content": answer.content, "tool_calls": calls})
        for call in answer.tool_calls:
            result = call.function.parsed_arguments.run()
            print(f"{call.function.name}({call.function.parsed_arguments}) = {result}")
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
        tool_choice = "auto"


if __name__ == "__main__":
    main()
