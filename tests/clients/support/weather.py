"""What agents are asked, the function that they call, and what they say in the end (`scripts.py`)."""

from __future__ import annotations

from typing import Any

PARIS = "What is the weather in Paris?"
BOTH = "Compare the weather in Paris and Rome."
WHO = "Who are you?"
I_AM = "I replay a script. Grüße, 世界 🌍!"
DESCRIBE = "Describe Paris as JSON."
FORM = "Call with a description of Paris."
CITY: dict[str, Any] = {"name": "Paris", "population": 2_100_000, "rivers": ["Seine"]}
ANSWER = "In Paris it is 21 degrees and sunny."
ANSWER_TO_BOTH = "It is 21 degrees and sunny and 21 degrees and sunny."
_WEATHER = "21 degrees and sunny"

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {"name": "get_weather", "description": "The weather in a city.", "parameters": SCHEMA},
}
CITY_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "population": {"type": "integer"},
        "rivers": {"type": "array", "items": {"type": "string"}},
    },
    "required": ["name", "population", "rivers"],
    "additionalProperties": False,
}


class Station:
    """Knows the weather, and notes for which cities it was asked."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def get_weather(self, city: str) -> str:
        """The weather in a city."""
        self.asked.append(city)
        return _WEATHER
