"""Texts that are far too long are refused before all of them is encoded, and no others are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployments.api.conversation import encoder
from deployments.api.conversation.encoder import LONG_TOKEN_BYTES, Encoder, TooManyTokens, UnencodedTexts
from engine.model_files.model_directory import demo_model_path
from engine.text.tokenizer import encoding_backend, load_tokenizer

TOKENIZER = load_tokenizer(demo_model_path())
PIECE_CHARS = 200


@pytest.fixture(autouse=True)
def short_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoder, "PIECE_CHARS", PIECE_CHARS)


class Backend:
    """Notes how long the texts are that the tokenizer is given."""

    def __init__(self, backend: Any) -> None:
        self.backend, self.sizes = backend, list[int]()

    def encode_batch_fast(self, texts: Sequence[str], **options: Any) -> Any:
        self.sizes += map(len, texts)
        return self.backend.encode_batch_fast(texts, **options)


def noting() -> tuple[Encoder, Backend]:
    backend = Backend(encoding_backend(TOKENIZER))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(encoder, "encoding_backend", lambda tokenizer: backend)
        return Encoder(TOKENIZER, "", 0), backend


@pytest.mark.parametrize("unit", ["a word, ", "7 ", "\U0001f469\u200d", "  \n"])
def test_only_the_beginning_of_a_text_that_is_far_too_long_is_encoded(unit: str) -> None:
    made, backend = noting()
    with pytest.raises(TooManyTokens) as refused:
        made.encode(unit * 20_000, max_tokens=500)
    assert 500 < refused.value.least <= len(TOKENIZER.encode(unit * 20_000))
    assert sum(backend.sizes) <= 500 * LONG_TOKEN_BYTES and max(backend.sizes) <= PIECE_CHARS


@given(st.text(alphabet="ab ,\n7\U0001f469é", min_size=1), st.integers(1, 60), st.integers(1, 40))
def test_a_text_that_fits_is_never_refused(unit: str, times: int, more: int) -> None:
    text = unit * times
    whole = TOKENIZER.encode(text, add_special_tokens=False)
    made, _ = noting()
    assert made.encode(text, add_special_tokens=False, max_tokens=len(whole) - 1 + more) == whole


def test_a_conversation_ends_where_it_has_too_many() -> None:
    made, backend = noting()
    texts = UnencodedTexts(made, None, "", ["a word, " * 100] * 50)
    with pytest.raises(TooManyTokens) as refused:
        texts.encode(600)
    assert 600 < refused.value.least <= 50 * len(TOKENIZER.encode("a word, " * 100))
    assert sum(backend.sizes) < 5000


def test_a_conversation_that_fits_is_encoded_whole() -> None:
    made, _ = noting()
    texts = ["a word, " * 100] * 50
    whole = [token for text in texts for token in TOKENIZER.encode(text, add_special_tokens=False)]
    assert UnencodedTexts(made, None, "", texts).encode(len(whole)) == whole
