"""The embedded model as a user of transformers meets it: files, tokenizer, template, answers, data."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer

from engine.model_files.model_directory import demo_model_path
from training import corpus
from training.dialogues import Writer, signature_answer
from training.packing import Packer
from training.phrasings import HELLO, UNKNOWN, UNSEEN
from training.prompts import SYSTEM_PROMPTS

MODEL = demo_model_path()
FACTS = {fact.full: fact for fact in corpus.load_facts()}
WELL_KNOWN = [
    "itertools.chain",
    "functools.reduce",
    "collections.Counter.most_common",
    "json.dumps",
    "os.path.join",
    "math.sqrt",
    "re.sub",
    "heapq.heappush",
    "len",
    "sorted",
    "str.join",
    "dict.get",
]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(MODEL)


@pytest.fixture(scope="module")
def model() -> Iterator[Any]:
    """The model in float32, on one thread: so small a model's threads would mostly wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()
    torch.set_num_threads(threads)


def prompt_ids(tokenizer: Any, chat: list[dict[str, str]]) -> list[int]:
    ids: list[int] = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
    return ids


def answer_ids(model: Any, tokenizer: Any, chat: list[dict[str, str]]) -> list[int]:
    """The greedy continuation up to and with EOS."""
    prompt = prompt_ids(tokenizer, chat)
    with torch.inference_mode():
        output = model.generate(torch.tensor([prompt]), max_new_tokens=160, do_sample=False)
    ids: list[int] = output[0, len(prompt) :].tolist()
    return ids


def user(content: str) -> dict[str, str]:
    return {"role": "user", "content": content}


def test_the_directory_is_complete_and_small() -> None:
    for name in [
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
        "README.md",
    ]:
        assert (MODEL / name).is_file(), name
    assert (MODEL / "model.safetensors").stat().st_size <= 15_000_000
    config = json.loads((MODEL / "config.json").read_text())
    assert config["architectures"] == ["Qwen3ForCausalLM"]
    assert (config["num_hidden_layers"], config["hidden_size"], config["vocab_size"]) == (6, 256, 4096)
    assert config["tie_word_embeddings"] and config["dtype"] == "bfloat16"


@settings(max_examples=100, deadline=None)
@given(text=st.text(max_size=80))
def test_any_text_survives_the_tokenizer(tokenizer: Any, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text


def test_an_unknown_role_is_refused(tokenizer: Any) -> None:
    with pytest.raises(Exception, match="unknown role 'tool'"):
        prompt_ids(tokenizer, [{"role": "tool", "content": "42"}])


def test_a_system_message_stands_first(tokenizer: Any) -> None:
    with pytest.raises(Exception, match="must be the first"):
        prompt_ids(tokenizer, [user("Hello"), {"role": "system", "content": "Be brief."}])


def test_a_longer_chat_extends_the_shorter_ones_prompt_and_answer(model: Any, tokenizer: Any) -> None:
    """What the engine computed in one turn is a prefix, token for token, of the next turn's prompt."""
    chat = [{"role": "system", "content": SYSTEM_PROMPTS[4]}]
    for question in ["What does itertools.chain do?", "And its signature?", "Explain json.dumps."]:
        chat.append(user(question))
        held = prompt_ids(tokenizer, chat)
        answer = answer_ids(model, tokenizer, chat)
        assert answer[-1] == tokenizer.eos_token_id
        chat.append({"role": "assistant", "content": tokenizer.decode(answer, skip_special_tokens=True)})
        longer = prompt_ids(tokenizer, [*chat, user("Thanks!")])
        assert longer[: len(held) + len(answer)] == held + answer


@pytest.mark.parametrize("name", WELL_KNOWN)
def test_well_known_names_are_answered_by_their_docstring(model: Any, tokenizer: Any, name: str) -> None:
    answer = answer_ids(model, tokenizer, [user(f"What does {name} do?")])
    assert answer[-1] == tokenizer.eos_token_id
    assert tokenizer.decode(answer[:-1]) == FACTS[name].sentence


def test_a_follow_up_refers_to_the_subject_before_it(model: Any, tokenizer: Any) -> None:
    fact = FACTS["functools.reduce"]
    chat = [user(f"What does {fact.full} do?"), {"role": "assistant", "content": fact.sentence}]
    answer = answer_ids(model, tokenizer, [*chat, user("And its signature?")])
    assert tokenizer.decode(answer, skip_special_tokens=True) == signature_answer(fact)


def test_a_greeting_is_greeted_back(model: Any, tokenizer: Any) -> None:
    answer = answer_ids(model, tokenizer, [{"role": "system", "content": SYSTEM_PROMPTS[0]}, user("Hello")])
    assert tokenizer.decode(answer, skip_special_tokens=True) == HELLO


@pytest.mark.parametrize("name", ["os.plonk_files", "numpy.array", "vortexify"])
def test_it_says_that_it_does_not_know_an_unknown_name(model: Any, tokenizer: Any, name: str) -> None:
    answer = answer_ids(model, tokenizer, [user(f"What does {name} do?")])
    assert tokenizer.decode(answer, skip_special_tokens=True) == UNKNOWN


def test_harvesting_twice_gives_the_same_facts() -> None:
    modules = ["builtins", "itertools", "json"]
    facts = corpus.harvest(modules)
    assert facts == corpus.harvest(modules)
    assert "itertools.chain" in {fact.full for fact in facts}


def test_the_committed_facts_are_unique_plain_and_many(tmp_path: Path) -> None:
    assert len(FACTS) == len(corpus.load_facts()) >= 1500
    sentences = [fact.sentence for fact in FACTS.values()]
    assert all(text.isascii() and len(text) <= corpus.MAX_SENTENCE for text in sentences)
    corpus.save_facts(corpus.load_facts(), tmp_path / "facts.json")
    assert (tmp_path / "facts.json").read_bytes() == corpus.FACTS.read_bytes()


def test_the_unseen_phrasing_is_never_trained_and_a_seed_repeats_itself() -> None:
    facts = list(FACTS.values())
    dialogues = list(itertools.islice(Writer(facts, 1).dialogues(), 6000))
    before, after = UNSEEN.split("{}")
    texts = [message["content"] for dialogue in dialogues for message in dialogue]
    assert not [text for text in texts if text.startswith(before) and text.endswith(after)]
    assert dialogues == list(itertools.islice(Writer(facts, 1).dialogues(), 6000))


def test_only_the_assistants_words_count_in_full(tokenizer: Any) -> None:
    """Full weight lies on the answers and the EOS after them, wherever rows were cut."""
    batch = Packer(Writer(list(FACTS.values()), 1), tokenizer, tokens=2048, seed=2).batch()
    for targets, weights in zip(batch.targets.tolist(), batch.weights.tolist(), strict=True):
        kept = [token for token, weight in zip(targets, weights, strict=True) if weight == 1.0]
        assert tokenizer.convert_tokens_to_ids("<|im_start|>") not in kept
        answers = tokenizer.decode(kept).split("<|im_end|>")
        assert any(fact.sentence in answers for fact in FACTS.values())


def test_facts_hold_nothing_of_the_machine_they_were_harvested_on() -> None:
    harvested = {fact.full: fact for fact in corpus.harvest(("platform",))}
    assert harvested["platform.architecture"].signature == ""
    assert FACTS["platform.architecture"].signature == ""
