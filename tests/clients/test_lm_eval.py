"""lm-eval: its `local-completions` model gives the log-likelihoods of its `hf` model, which runs transformers."""

from __future__ import annotations

import json
import subprocess
from typing import Any

import pytest

from tests.clients.conftest import PYTHON, ROOT

pytest.importorskip("lm_eval", reason="`make clients` installs lm-eval")
MODEL = ROOT / "deployments/demo_model"
PAIRS = [
    ("<|im_start|>user\nWhat does bisect.insort do?<|im_end|>\n<|im_start|>assistant\n", "It inserts an item."),
    ("The function returns", " the number of items"),
    ("The function returns", " True if the path exists."),  # the model's end is likely after it
    ("Return the", " absolute value of the argument."),
    ("a", " b"),
    ("Grüße, 世界", " 🌍!"),
    *((f"heapq.nlargest({count}, numbers)", " returns a list" + " of numbers" * count) for count in range(1, 20)),
]


@pytest.fixture(scope="module")
def model(embedded_url: str) -> Any:
    """lm-eval's model, which asks the server to tokenize, too."""
    from lm_eval.api.registry import get_model

    return get_model("local-completions").create_from_arg_string(
        f"model=demo,base_url={embedded_url}/v1/completions,tokenizer_backend=remote,num_concurrent=4"
    )


def instances(kind: str, arguments: list[tuple[Any, ...]]) -> list[Any]:
    from lm_eval.api.instance import Instance

    return [Instance(request_type=kind, doc={}, arguments=given, idx=at) for at, given in enumerate(arguments)]


def test_log_likelihoods_are_those_of_transformers(model: Any) -> None:
    found = model.loglikelihood(instances("loglikelihood", PAIRS))
    encoded = [model._encode_pair(*pair) for pair in PAIRS]
    command = [str(PYTHON), str(ROOT / "tests/clients/support/transformers_scores.py"), str(MODEL)]
    result = subprocess.run(command, input=json.dumps(encoded), capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    expected = json.loads(result.stdout)
    assert len(found) == len(expected) == len(PAIRS)
    differences = [abs(ours[0] - theirs[0]) for ours, theirs in zip(found, expected, strict=True)]
    assert max(differences) < 1e-3
    assert [ours[1] for ours in found] == [theirs[1] for theirs in expected]
    assert min(theirs[0] for theirs in expected) < -1


def test_texts_are_generated_up_to_their_stop_strings(model: Any) -> None:
    options = {"until": ["<|im_end|>", "."], "max_gen_toks": 16, "temperature": 0}
    texts = model.generate_until(instances("generate_until", [(PAIRS[0][0], options)]))
    assert len(texts) == 1 and texts[0] and "." not in texts[0]
