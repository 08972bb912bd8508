import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxinfer.page_allocator import OutOfPages, PageAllocator


def keys_of(allocator: PageAllocator, token_ids: list[int], cache_salt: str = "") -> list[bytes]:
    keys: list[bytes] = []
    allocator.extend_keys(keys, token_ids, cache_salt)
    return keys


def test_null_page_is_never_handed_out_and_a_full_pool_refuses_without_change():
    allocator = PageAllocator(num_pages=4, page_size=2)
    assert allocator.allocate(2) == [1, 2]
    with pytest.raises(OutOfPages, match="2 pages asked for, 1 of 3 free"):
        allocator.allocate(2)
    assert allocator.allocate(1) == [3]
    allocator.check_invariants()


def test_shared_page_is_free_only_after_its_last_holder():
    allocator = PageAllocator(num_pages=3, page_size=2)
    pages = allocator.allocate(2)
    allocator.share(pages[:1])
    allocator.free(pages)
    assert allocator.num_free == 1
    allocator.free(pages[:1])
    assert allocator.num_free == 2
    with pytest.raises(ValueError, match="more often than it is held"):
        allocator.free(pages[:1])
    with pytest.raises(ValueError, match="only a held or cached page"):
        allocator.share(pages[:1])


def test_longest_registered_prefix_is_found_and_survives_its_holder():
    allocator = PageAllocator(num_pages=6, page_size=2)
    pages = allocator.allocate(3)
    for page, key in zip(pages, keys_of(allocator, [1, 2, 3, 4, 5, 6]), strict=True):
        allocator.register(page, key)
    allocator.free(pages)
    assert allocator.num_free == 5 and allocator.num_cached == 3
    assert allocator.lookup(keys_of(allocator, [1, 2, 3, 4, 9, 9])) == pages[:2]
    assert allocator.lookup(keys_of(allocator, [3, 4])) == [], (
        "same page content at another position is no hit"
    )


def test_keys_differ_with_the_salt_of_engine_and_request_and_cover_full_pages_only():
    a, b = PageAllocator(4, 2, salt="model a"), PageAllocator(4, 2, salt="model b")
    assert keys_of(a, [1, 2, 3]) == keys_of(a, [1, 2])
    assert keys_of(a, [1, 2]) != keys_of(b, [1, 2])
    assert keys_of(a, [1, 2]) != keys_of(a, [1, 2], cache_salt="adapter")
    grown = keys_of(a, [1, 2])
    a.extend_keys(grown, [1, 2, 3, 4])
    assert grown == keys_of(a, [1, 2, 3, 4])


def test_cached_pages_are_reclaimed_last_and_least_recently_used_first():
    allocator = PageAllocator(num_pages=5, page_size=1)
    old, new = allocator.allocate(1), allocator.allocate(1)
    key_old, key_new = keys_of(allocator, [1]), keys_of(allocator, [2])
    allocator.register(old[0], key_old[0])
    allocator.register(new[0], key_new[0])
    allocator.free(old)
    allocator.free(new)
    allocator.allocate(2)  # the two that were never used
    assert allocator.lookup(key_old) == old and allocator.lookup(key_new) == new
    allocator.allocate(1)
    assert allocator.lookup(key_old) == [] and allocator.lookup(key_new) == new


def test_prefix_is_reclaimed_from_its_tail():
    allocator = PageAllocator(num_pages=4, page_size=1)
    pages = allocator.allocate(3)
    keys = keys_of(allocator, [1, 2, 3])
    for page, key in zip(pages, keys, strict=True):
        allocator.register(page, key)
    allocator.free(pages)
    allocator.allocate(1)
    assert allocator.lookup(keys) == pages[:2]


def test_reset_forgets_prefixes_but_not_holders():
    allocator = PageAllocator(num_pages=4, page_size=1)
    held, gone = allocator.allocate(1), allocator.allocate(1)
    keys = keys_of(allocator, [1, 2])
    allocator.register(held[0], keys[0])
    allocator.register(gone[0], keys[1])
    allocator.free(gone)
    allocator.reset_prefix_cache()
    allocator.check_invariants()
    assert allocator.lookup(keys) == [] and allocator.num_used == 1
    allocator.free(held)
    assert allocator.num_free == 3 and allocator.num_cached == 0


def test_nothing_is_registered_with_prefix_caching_off():
    allocator = PageAllocator(num_pages=3, page_size=1, enable_prefix_caching=False)
    page = allocator.allocate(1)[0]
    key = keys_of(allocator, [1])[0]
    allocator.register(page, key)
    assert allocator.lookup([key]) == []


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_fuzz_every_page_is_always_in_exactly_one_state(data):
    """Random walks against a model that only counts holders per page."""
    allocator = PageAllocator(num_pages=data.draw(st.integers(2, 12)), page_size=1)
    holders: list[list[int]] = []  # one list of pages per holder
    for _ in range(data.draw(st.integers(1, 30))):
        action = data.draw(st.sampled_from(["allocate", "share", "free", "register", "hit", "reset"]))
        if action == "allocate":
            n, free = data.draw(st.integers(0, 6)), allocator.num_free
            if n <= free:
                holders.append(allocator.allocate(n))
            else:
                with pytest.raises(OutOfPages):
                    allocator.allocate(n)
                assert allocator.num_free == free
        elif action == "hit":
            tokens = data.draw(st.lists(st.integers(0, 1), max_size=3))
            pages = allocator.lookup(keys_of(allocator, tokens))
            allocator.share(pages)
            holders.append(pages)
        elif action == "reset":
            allocator.reset_prefix_cache()
        elif holders:
            chosen = data.draw(st.integers(0, len(holders) - 1))
            if action == "share":
                allocator.share(holders[chosen])
                holders.append(list(holders[chosen]))
            elif action == "free":
                allocator.free(holders.pop(chosen))
            else:
                tokens = data.draw(st.lists(st.integers(0, 1), min_size=6, max_size=6))
                for page, key in zip(holders[chosen], keys_of(allocator, tokens), strict=False):
                    allocator.register(page, key)
        allocator.check_invariants()
        held = [page for pages in holders for page in pages]
        for page in range(1, allocator.num_pages):
            assert allocator.ref_count(page) == held.count(page)
        assert allocator.num_used == len(set(held))


def test_cost_per_page_does_not_grow_with_the_pool():
    def seconds(num_pages: int) -> float:
        allocator = PageAllocator(num_pages + 1, 16)
        start = time.perf_counter()
        pages = [allocator.allocate(1)[0] for _ in range(num_pages)]
        for number, page in enumerate(pages):
            allocator.register(page, number.to_bytes(16))
        for page in pages:
            allocator.free([page])
        allocator.allocate(num_pages)  # reclaims all of them
        return time.perf_counter() - start

    small = min(seconds(5_000) for _ in range(3))
    assert seconds(50_000) < 40 * small, "ten times the pages; a quadratic step would take 100 times as long"
