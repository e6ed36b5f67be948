"""What the two scripted models answer: a script for each question, with a line for each of the model's turns.

`{tool}` is the offered function whose name ends with the script's, as some clients put a prefix before it.
`{result}` is what the last call returned, and `{results}` what the last turn's calls returned, so that an answer
shows whether the client has run the functions and sent back what they gave.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_RESULT = re.compile(r"(?:<tool_response>|Observation:)\s*(.*?)\s*(?:</tool_response>|<\|im_end\|>)", re.DOTALL)
_PARIS = '{"name": "Paris", "population": 2100000, "rivers": ["Seine"]}'
_TURN = "<|im_start|>assistant\n"


@dataclass(frozen=True)
class Script:
    """The answers to a question, in the order of the model's turns after it; the last one is repeated."""

    question: str
    answers: tuple[str, ...]
    tool: str = ""

    def answer(self, prompt: str) -> str:
        """Return what the model says after `prompt`, which has the question."""
        since = prompt[prompt.rindex(self.question) :]
        turn = since.count(_TURN) - since.endswith(_TURN)
        answer = self.answers[min(turn, len(self.answers) - 1)]
        results = _RESULT.findall(since.rpartition("</tool_call>")[2])
        offered = re.search(rf'"([\w-]*{self.tool})"', prompt) if self.tool else None
        answer = answer.replace("{tool}", offered[1] if offered else "no_such_tool")
        answer = answer.replace("{results}", " and ".join(results))
        return answer.replace("{result}", results[-1] if results else "nothing")


def _calls(thought: str, *calls: str) -> str:
    return f"<think>\n{thought}\n</think>\n\n" + "\n".join(f"<tool_call>\n{call}\n</tool_call>" for call in calls)


def _weather(city: str) -> str:
    return f'{{"name": "{{tool}}", "arguments": {{"city": "{city}"}}}}'


SCRIPTS = (
    Script(
        "What is the weather in Paris?",
        (
            _calls("The station knows.", _weather("Paris")),
            "<think>\nNow I know.\n</think>\n\nIn Paris it is {result}.",
        ),
        tool="get_weather",
    ),
    Script(
        "Compare the weather in Paris and Rome.",
        (
            _calls("I ask for both.", _weather("Paris"), _weather("Rome")),
            "<think>\nNow I know both.\n</think>\n\nIt is {results}.",
        ),
        tool="get_weather",
    ),
    Script(
        "Who are you?",
        ("I replay a script. Grüße, 世界 🌍!", "I have told you before."),
    ),
    Script(
        "Describe Paris as JSON.",
        (_PARIS,),
    ),
    Script(
        "Call with a description of Paris.",
        (_calls("I fill in the form.", f'{{"name": "{{tool}}", "arguments": {_PARIS}}}'),),
        tool="City",
    ),
    Script(
        "Find out the weather in Paris.",
        (
            _calls("The station knows.", _weather("Paris")),
            _calls("Now I know.", '{"name": "final_answer", "arguments": {"answer": "{result}"}}'),
        ),
        tool="get_weather",
    ),
    Script(
        "Compute the weather in Paris.",
        ('Thought: I ask.\n<code>\nfinal_answer(get_weather(city="Paris"))\n</code>',),
    ),
    Script(
        "Who wrote the Aeneid?",
        ("[[ ## answer ## ]]\nVirgil\n\n[[ ## completed ## ]]",),
    ),
    Script(
        "Who wrote the Iliad?",
        ('{"answer": "Homer"}',),
    ),
)  # fmt: skip
"""All scripts; the one whose question comes last in the prompt is the one that is replayed."""


def answer(prompt: str) -> str:
    """Return what the scripted models say after `prompt`."""
    asked = max(SCRIPTS, key=lambda script: prompt.rfind(script.question))
    return asked.answer(prompt) if asked.question in prompt else "There is no script for this."
