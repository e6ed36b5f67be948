"""The cache of texts and their token ids: its bound, its order, and who shares it."""

from __future__ import annotations

import random
import threading
import tracemalloc

import pytest

from deployments.api.conversation.piece_cache import PieceCache


def ids_of(text: str) -> list[int]:
    return [ord(character) for character in text]


def keep(cache: PieceCache, *texts: str, salt: str = "") -> None:
    cache.keep(salt, [(text, ids_of(text)) for text in texts])


def test_it_finds_the_pieces_that_it_was_given_and_nothing_else() -> None:
    cache = PieceCache(100_000)
    keep(cache, "one", "two")
    assert cache.find("", ["two", "three", "one"]) == [tuple(ids_of("two")), None, tuple(ids_of("one"))]


def test_nothing_is_shared_between_salts() -> None:
    cache = PieceCache(100_000)
    keep(cache, "text", salt="tenant:a:")
    keep(cache, "", salt="text")
    assert cache.find("tenant:b:", ["text"]) == cache.find("", ["text"]) == [None]
    assert cache.find("tenant:a:", ["text"]) == [tuple(ids_of("text"))]


def test_the_least_recently_used_piece_is_forgotten_first() -> None:
    cache = PieceCache(100_000)
    keep(cache, "a", "b", "c")
    cache = PieceCache(cache.num_bytes)
    keep(cache, "a", "b", "c")
    cache.find("", ["a"])
    keep(cache, "d")
    assert [ids is not None for ids in cache.find("", ["a", "b", "c", "d"])] == [True, False, True, True]


def test_a_text_larger_than_the_bound_forgets_nothing() -> None:
    cache = PieceCache(2_000)
    keep(cache, "a")
    keep(cache, "long" * 1000)
    assert cache.find("", ["a", "long" * 1000]) == [tuple(ids_of("a")), None]


def test_no_memory_means_no_entries() -> None:
    cache = PieceCache(0)
    keep(cache, "a")
    assert cache.find("", ["a"]) == [None] and cache.num_bytes == 0


@pytest.mark.parametrize("num_chars", [80, 400, 4000])
def test_it_takes_no_more_memory_than_it_reports_and_little_less(num_chars: int) -> None:
    draw = random.Random(3)
    letters = draw.choices("abcdefgh", k=num_chars)
    texts = ["".join([*draw.sample(letters, 20), *letters]) for _ in range(3000)]
    limit = 1000 * (num_chars + 600)
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    cache = PieceCache(limit)
    for text in texts:
        own = text.upper().lower()  # lives as long as its entry
        cache.keep("", [(own, ids_of(own)[::4])])
    after, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert 0.7 * cache.num_bytes < after - before < cache.num_bytes <= limit


def test_threads_share_the_cache() -> None:
    cache = PieceCache(20_000)
    wrong: list[str] = []

    def work(seed: int) -> None:
        draw = random.Random(seed)
        for _ in range(3000):
            texts = [str(draw.randrange(60)) * 20 for _ in range(4)]
            for text, ids in zip(texts, cache.find("", texts), strict=True):
                if ids is not None and list(ids) != ids_of(text):
                    wrong.append(text)
            keep(cache, *texts)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = [text for number in range(60) if cache.find("", [text := str(number) * 20])[0] is not None]
    alone = PieceCache(20_000)
    keep(alone, *found)
    assert not wrong and found and cache.num_bytes == alone.num_bytes <= 20_000
