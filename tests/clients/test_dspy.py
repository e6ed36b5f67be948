"""DSPy: predictions in its own marked sections, and as JSON with a schema."""

from __future__ import annotations

import os
from typing import Any

import pytest

os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # it asks through LiteLLM
dspy = pytest.importorskip("dspy", reason="`make clients` installs dspy")


def predict(api: str, adapter: Any, question: str) -> str:
    model = dspy.LM("openai/plain", api_base=api, api_key="none", cache=False, num_retries=0)
    with dspy.context(lm=model, adapter=adapter):
        answer: str = dspy.Predict("question -> answer")(question=question).answer
        return answer


def test_a_prediction_is_read_from_marked_sections(api: str) -> None:
    assert predict(api, dspy.ChatAdapter(), "Who wrote the Aeneid?") == "Virgil"


def test_a_prediction_is_read_from_json(api: str) -> None:
    assert predict(api, dspy.JSONAdapter(), "Who wrote the Iliad?") == "Homer"
