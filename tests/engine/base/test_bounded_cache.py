"""What was used last is kept, as much as fits into so many bytes."""

from __future__ import annotations

from engine.base.bounded_cache import BoundedCache


def kept(cache: BoundedCache[str, str], keys: str) -> str:
    return "".join(key for key in keys if cache.get(key))


def test_the_least_recently_used_go_first_and_as_few_as_must() -> None:
    cache: BoundedCache[str, str] = BoundedCache(100)
    for key in "abcd":
        cache.put(key, key.upper(), 25)
    assert cache.get("a") == "A" and cache.num_bytes == 100
    cache.put("e", "E", 30)
    assert kept(cache, "abcde") == "ade" and cache.num_bytes == 80 and len(cache) == 3
    cache.put("f", "F", 20)
    assert kept(cache, "adef") == "adef" and cache.num_bytes == 100


def test_an_entry_larger_than_the_bound_is_not_kept_and_takes_no_other_s_place() -> None:
    cache: BoundedCache[str, str] = BoundedCache(100)
    cache.put("a", "A", 60)
    cache.put("b", "B", 101)
    assert kept(cache, "ab") == "a"
    cache.put("a", "A", 101)
    assert kept(cache, "ab") == "" and cache.num_bytes == 0
    nothing: BoundedCache[str, str] = BoundedCache(0)
    nothing.put("a", "A", 1)
    assert kept(nothing, "a") == "" and nothing.num_bytes == 0


def test_an_entry_that_is_put_again_counts_once_with_its_new_size() -> None:
    cache: BoundedCache[str, str] = BoundedCache(100)
    cache.put("a", "A", 80)
    cache.put("b", "B", 20)
    cache.put("a", "new", 30)
    assert (cache.get("a"), cache.get("b"), cache.num_bytes) == ("new", "B", 50)
    cache.drop("a")
    cache.drop("a")
    assert (cache.get("a"), cache.num_bytes) == (None, 20)
