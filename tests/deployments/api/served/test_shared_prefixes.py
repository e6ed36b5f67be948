"""The ids of a shared prefix are those that all prompts with its text begin with."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
from pydantic import ValidationError

from deployments.api.served.shared_prefixes import shared_prefix_ids
from deployments.api.served.text_codec import TextCodec
from deployments.config.args import AppArgs
from deployments.config.shared_prefixes import SharedPrefixSettings
from tests.deployments.support.tokenizer_families import FAMILIES, tokenizer_of

TEXT = "You are a helpful assistant of a bank. Never speak of other banks, whatever you are asked.\n"
QUESTIONS = ("Hi", "hello there", "  what?", "\n\nx", "123", "あ", "</s>", "")


@pytest.mark.parametrize("family", [name for name in FAMILIES if name not in ("llama-2", "mistral-v3")])
def test_all_conversations_with_a_system_prompt_begin_with_its_ids(family: str) -> None:
    codec = TextCodec(tokenizer_of(family))
    (ids,) = shared_prefix_ids(codec, [SharedPrefixSettings(text=TEXT)])
    for question in QUESTIONS:
        prompt = codec.encode_chat([{"role": "system", "content": TEXT}, {"role": "user", "content": question}])
        assert prompt[: len(ids) - 1] == ids[:-1]
    assert TEXT.strip().replace(" ", "") in codec.decode(ids).replace(" ", "")


@pytest.mark.parametrize("family", FAMILIES)
def test_all_raw_prompts_that_begin_with_a_text_begin_with_its_ids(family: str) -> None:
    codec = TextCodec(tokenizer_of(family))
    (ids,) = shared_prefix_ids(codec, [SharedPrefixSettings(text=TEXT, kind="prompt")])
    for following in QUESTIONS:
        assert codec.encode(TEXT + following)[: len(ids) - 1] == ids[:-1]
    assert len(ids) >= len(codec.encode(TEXT)) - 2


def test_a_template_without_system_messages_refuses_one() -> None:
    tokenizer = copy.copy(tokenizer_of("gemma"))
    tokenizer.chat_template = "{{ raise_exception('no system') }}"
    codec = TextCodec(tokenizer)
    with pytest.raises(ValueError, match=r"cannot have .* as its system message .*kind: prompt"):
        shared_prefix_ids(codec, [SharedPrefixSettings(text=TEXT)])


def test_texts_come_from_the_configuration_or_from_files(tmp_path: Path) -> None:
    file = tmp_path / "system.txt"
    file.write_text(TEXT, encoding="utf-8")
    declared = [{"text": "Be brief."}, {"file": str(file), "kind": "prompt"}]
    prefixes = AppArgs.model_validate({"shared_prefixes": declared}).shared_prefixes
    assert [prefix.read().text for prefix in prefixes] == ["Be brief.", TEXT]
    assert [prefix.read().kind for prefix in prefixes] == ["system", "prompt"]
    with pytest.raises(ValueError, match=r"nowhere\.txt cannot be read"):
        SharedPrefixSettings(file=str(tmp_path / "nowhere.txt")).read()


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ({"shared_prefixes": [{}]}, "either text or file"),
        ({"shared_prefixes": [{"text": "a", "file": "b"}]}, "either text or file"),
        ({"shared_prefixes": [{"text": ""}]}, "at least 1 character"),
        ({"shared_prefixes": [{"text": "a"}], "engine": {"prefix_cache": False}}, "prefix_cache: false"),
    ],
)
def test_mistakes_are_reported(arguments: dict[str, object], complaint: str) -> None:
    with pytest.raises(ValidationError, match=complaint):
        AppArgs.model_validate(arguments)
