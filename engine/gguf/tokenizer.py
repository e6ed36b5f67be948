"""Makes the tokenizer that a GGUF file describes: the same as its model had before conversion.

    gpt2      words, split as the file says ─▶ bytes ─▶ merges                       Llama 3, Qwen and most others
    gemma4    spaces as "▁" ─▶ merges; bytes of unknown characters
    llama     the same, with the merges that follow from the tokens' scores          Llama 2, Gemma 1 to 3, Phi 3
    t5        spaces as "▁" ─▶ the likeliest sequence of tokens (Unigram)

llama.cpp and transformers interpret some files differently; we then follow the model's own tokenizer.
"""

from __future__ import annotations

import logging
from typing import Any

from engine.base.errors import ModelLoadError
from engine.gguf.pre_tokenizers import pre_tokenizer, splitter
from engine.gguf.vocabulary import GGUFVocabulary, TokenType

logger = logging.getLogger(__name__)

_SPACE = "▁"
_ROLES = ("bos", "eos", "unk", "pad", "sep", "mask")
"""The special tokens that transformers and templates know by such names ("bos_token")."""
_MISTRAL_TURN = "[INST]"


def made_of(vocabulary: GGUFVocabulary) -> Any:
    """Return the tokenizer as a `TokenizersBackend` of transformers. Raises ModelLoadError."""
    from transformers.tokenization_utils_tokenizers import TokenizersBackend  # The import takes half a second.

    build = {"gpt2": _byte_level, "gemma4": _pieces, "llama": _pieces, "t5": _unigram}[vocabulary.model]
    try:
        backend = build(vocabulary)
        _add_tokens(backend, vocabulary)
    except ModelLoadError:
        raise
    except Exception as error:  # The library raises no narrower class.
        raise ModelLoadError(
            f"the file's tokens make no tokenizer: {' '.join(str(error).split())[:300]}"
        ) from error
    named = {f"{role}_token": vocabulary.tokens[vocabulary.ids[role]] for role in _ROLES if role in vocabulary.ids}
    templates = dict(vocabulary.templates)
    return TokenizersBackend(
        tokenizer_object=backend,
        add_bos_token=_adds_bos(vocabulary),
        add_eos_token=vocabulary.flags.get("add_eos_token", vocabulary.model == "t5" and "eos" in vocabulary.ids),
        clean_up_tokenization_spaces=False,
        chat_template=templates["default"] if templates.keys() == {"default"} else templates or None,
        **named,
    )


def _adds_bos(vocabulary: GGUFVocabulary) -> bool:
    if vocabulary.model == "gemma4":  # The template writes the token, so the model's own tokenizer does not.
        return False
    usual = vocabulary.model == "llama"
    if vocabulary.model == "gpt2":
        usual = pre_tokenizer(vocabulary.pre).adds_bos
    return vocabulary.flags.get("add_bos_token", usual and "bos" in vocabulary.ids)


def _vocab(vocabulary: GGUFVocabulary) -> dict[str, int]:
    """Return the ids of the tokens. Unused ones only fill the rows of the embeddings."""
    named = set(vocabulary.ids.values())
    return {
        token: number
        for number, (token, kind) in enumerate(zip(vocabulary.tokens, vocabulary.types, strict=True))
        if kind is not TokenType.UNUSED or number in named
    }


def _add_tokens(backend: Any, vocabulary: GGUFVocabulary) -> None:
    """Make the tokenizer find special and user-defined tokens in texts first."""
    from tokenizers import AddedToken

    special = vocabulary.special_ids()
    strips = _stripping(vocabulary)
    added = []
    for number, (token, kind) in enumerate(zip(vocabulary.tokens, vocabulary.types, strict=True)):
        if number in special or kind is TokenType.USER_DEFINED:
            is_special = number in special
            added.append(AddedToken(token, special=is_special, normalized=False, rstrip=number in strips))
    backend.add_tokens(added)


def _stripping(vocabulary: GGUFVocabulary) -> frozenset[int]:
    """Return the tokens that absorb the spaces after them: Phi 3's marks of turns. No key says so."""
    if vocabulary.model != "llama" or vocabulary.architecture != "phi3":
        return frozenset()
    kept = {vocabulary.ids.get("bos"), vocabulary.ids.get("unk")}
    return frozenset(
        number for number in vocabulary.special_ids() - kept if vocabulary.tokens[number] != "<|endoftext|>"
    )


def _byte_level(vocabulary: GGUFVocabulary) -> Any:
    """Return a tokenizer whose tokens are runs of bytes, each byte written as a letter."""
    from tokenizers import Tokenizer, decoders, normalizers
    from tokenizers.models import BPE

    words = pre_tokenizer(vocabulary.pre)
    adds_space = vocabulary.flags.get("add_space_prefix", False)
    if adds_space and words.patterns:
        logger.warning(
            "tokenizer.ggml.add_space_prefix is true, which means nothing for texts split as %s: no space is put "
            "before them",
            vocabulary.pre,
        )
        adds_space = False
    assert vocabulary.merges is not None, "the vocabulary was checked"
    model = BPE(_vocab(vocabulary), list(vocabulary.merges), ignore_merges=words.ignores_merges)
    backend = Tokenizer(model)
    if words.normalizes:
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = splitter(words, adds_space=adds_space)
    backend.decoder = decoders.ByteLevel()
    return backend


def _pieces(vocabulary: GGUFVocabulary) -> Any:
    """Return a tokenizer of SentencePiece's kind: spaces are letters, and unknown letters become their bytes."""
    from tokenizers import Tokenizer, decoders, normalizers, pre_tokenizers
    from tokenizers.models import BPE

    merges = vocabulary.merges if vocabulary.merges is not None else _merges(vocabulary)
    unknown = vocabulary.ids.get("unk")
    backend = Tokenizer(
        BPE(
            _vocab(vocabulary),
            list(merges),
            unk_token=None if unknown is None else vocabulary.tokens[unknown],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    steps = _single_spaces(vocabulary)
    adds_space = vocabulary.flags.get("add_space_prefix", vocabulary.model == "llama")
    if adds_space and _begins_once(vocabulary):
        backend.pre_tokenizer = pre_tokenizers.Metaspace(_SPACE, "first", split=False)
    else:
        steps += [normalizers.Prepend(_SPACE)] if adds_space else []
        steps.append(normalizers.Replace(" ", _SPACE))
    if steps:
        backend.normalizer = normalizers.Sequence(steps) if len(steps) > 1 else steps[0]
    read = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*read, decoders.Strip(" ", 1, 0)] if adds_space else read)
    return backend


def _begins_once(vocabulary: GGUFVocabulary) -> bool:
    """Whether only a whole text begins with a space, and not also the text after each special token.

    This is so in Mistral's tokenizers whose marks of turns are special tokens. No key says so.
    """
    return any(
        token == _MISTRAL_TURN and kind is TokenType.CONTROL
        for token, kind in zip(vocabulary.tokens, vocabulary.types, strict=True)
    )


def _merges(vocabulary: GGUFVocabulary) -> list[tuple[str, str]]:
    """Return the merges that form each token from any two others, best first.

    SentencePiece merges the neighbours whose token has the highest score. Gemma's own merges are in the order of
    the tokens; its scores are not.
    """
    usable = (TokenType.NORMAL, TokenType.USER_DEFINED)
    ids = {
        token: number
        for number, (token, kind) in enumerate(zip(vocabulary.tokens, vocabulary.types, strict=True))
        if kind in usable
    }
    found: list[tuple[int, str, str]] = []
    for token, number in ids.items():
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in ids and right in ids:
                found.append((number, left, right))
    if vocabulary.architecture.startswith("gemma"):
        found.sort(key=lambda each: (each[0], len(each[1])))
    elif (scores := vocabulary.scores) is None:
        raise ModelLoadError("the file has neither tokenizer.ggml.scores nor tokenizer.ggml.merges: expected one")
    else:
        found.sort(key=lambda each: (-scores[each[0]], -len(each[1]), -len(each[2]), each[0], ids[each[1]]))
    return [(left, right) for _, left, right in found]


def _single_spaces(vocabulary: GGUFVocabulary) -> list[Any]:
    """Return the steps that strip a text and reduce several spaces to one, if the file says so."""
    from tokenizers import Regex, normalizers

    if not vocabulary.flags.get("remove_extra_whitespaces", False):
        return []
    return [normalizers.Strip(), normalizers.Replace(Regex(" {2,}"), " ")]


def _unigram(vocabulary: GGUFVocabulary) -> Any:
    """Return a tokenizer that splits a text into the tokens with the highest sum of scores."""
    from tokenizers import Tokenizer, decoders, normalizers, pre_tokenizers
    from tokenizers.models import Unigram

    if "unk" not in vocabulary.ids:
        raise ModelLoadError("the file has no token for unknown text: expected tokenizer.ggml.unknown_token_id")
    assert vocabulary.scores is not None, "the vocabulary was checked"
    kinds = vocabulary.types
    normal = [score for score, kind in zip(vocabulary.scores, kinds, strict=True) if kind is TokenType.NORMAL]
    # Unknown characters score below all tokens; scores of unused tokens would lower theirs.
    filling = min(normal, default=0.0)
    pieces = [
        (token, filling if kind is TokenType.UNUSED else float(score))
        for token, score, kind in zip(vocabulary.tokens, vocabulary.scores, kinds, strict=True)
    ]
    named = max(vocabulary.ids.values())
    while len(pieces) > named + 1 and kinds[len(pieces) - 1] is TokenType.UNUSED:
        pieces.pop()
    has_bytes = TokenType.BYTE in kinds
    backend = Tokenizer(Unigram(pieces, unk_id=vocabulary.ids["unk"], byte_fallback=has_bytes))
    adds_space = vocabulary.flags.get("add_space_prefix", True)
    steps: list[Any] = [normalizers.Precompiled(vocabulary.charsmap)] if vocabulary.charsmap else []
    steps += _single_spaces(vocabulary)
    steps += [normalizers.Prepend(_SPACE)] if adds_space else []
    steps.append(normalizers.Replace(" ", _SPACE))
    backend.normalizer = normalizers.Sequence(steps)
    backend.pre_tokenizer = pre_tokenizers.Metaspace(_SPACE, "never", split=True)
    read = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*read, decoders.Strip(" ", 1, 0)] if adds_space else read)
    return backend
