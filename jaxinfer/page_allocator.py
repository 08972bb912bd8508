"""Pages of the KV cache: a free list, reference counts, and the prefix cache. Host integers only, no jax.

A page is in exactly one state: free (on the free list), held (ref count >= 1), or cached (ref count 0,
but its content is registered under a prefix key and can be shared again). Cached pages are reclaimed,
least recently used first, only when the free list is empty. Page 0 is the null page: padding writes
there, nobody ever holds it.
"""

from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from hashlib import blake2b

NULL_PAGE = 0


class OutOfPages(RuntimeError):
    """Fewer pages are free than were asked for."""


class PageAllocator:
    """Hands out pages 1 .. num_pages - 1, each of `page_size` tokens.

    `salt` names what changes K/V for equal tokens (model, dtype, cache dtype); every prefix key contains it.
    """

    def __init__(
        self, num_pages: int, page_size: int, enable_prefix_caching: bool = True, salt: bytes | str = b""
    ):
        if num_pages < 2:
            raise ValueError(f"num_pages={num_pages} must be at least 2: page 0 is the null page")
        if page_size < 1:
            raise ValueError(f"page_size={page_size} must be at least 1")
        self.num_pages = num_pages
        self.page_size = page_size
        self.enable_prefix_caching = enable_prefix_caching
        self._salt = salt.encode() if isinstance(salt, str) else salt
        self._free = list(range(num_pages - 1, NULL_PAGE, -1))  # a stack: low pages first
        self._ref_counts = [0] * num_pages
        self._page_of: dict[bytes, int] = {}  # prefix key -> page
        self._key_of: dict[int, bytes] = {}  # page -> prefix key
        self._cached: OrderedDict[int, None] = OrderedDict()  # registered pages nobody holds, oldest first
        self.peak_used = 0  # most pages that were held at a time

    @property
    def num_free(self) -> int:
        """Pages that `allocate` can hand out, cached ones included."""
        return len(self._free) + len(self._cached)

    @property
    def num_used(self) -> int:
        return self.num_pages - 1 - self.num_free

    @property
    def num_cached(self) -> int:
        """Pages that hold a registered prefix and are held by nobody."""
        return len(self._cached)

    def num_pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size)

    def ref_count(self, page: int) -> int:
        return self._ref_counts[page]

    def allocate(self, n: int) -> list[int]:
        """`n` pages with ref count 1, or OutOfPages with nothing changed."""
        if n > self.num_free:
            raise OutOfPages(f"{n} pages asked for, {self.num_free} of {self.num_pages - 1} free")
        pages = []
        for _ in range(n):
            if self._free:
                page = self._free.pop()
            else:
                page, _ = self._cached.popitem(last=False)
                del self._page_of[self._key_of.pop(page)]
            self._ref_counts[page] = 1
            pages.append(page)
        self.peak_used = max(self.peak_used, self.num_used)
        return pages

    def share(self, pages: Iterable[int]) -> None:
        """One more holder for each page; each must be held or cached."""
        for page in pages:
            if self._ref_counts[page] == 0:
                if page not in self._cached:
                    raise ValueError(f"page {page} is free: only a held or cached page can be shared")
                del self._cached[page]
            self._ref_counts[page] += 1
        self.peak_used = max(self.peak_used, self.num_used)

    def free(self, pages: Sequence[int]) -> None:
        """One holder fewer for each page, given in the order of the sequence: its tail is reclaimed first."""
        for page in reversed(pages):
            if self._ref_counts[page] == 0:
                raise ValueError(f"page {page} is freed more often than it is held")
            self._ref_counts[page] -= 1
            if self._ref_counts[page] == 0:
                if page in self._key_of:
                    self._cached[page] = None
                else:
                    self._free.append(page)

    def extend_keys(self, keys: list[bytes], token_ids: Sequence[int], cache_salt: str = "") -> None:
        """Appends to `keys` until it has the prefix key of every full page of `token_ids`.

        A key hashes the page's tokens with the key before it: equal keys mean equal prefixes and positions.
        """
        for start in range(len(keys) * self.page_size, len(token_ids) - self.page_size + 1, self.page_size):
            parent = keys[-1] if keys else self._salt + b"\0" + cache_salt.encode()
            page = array("q", token_ids[start : start + self.page_size]).tobytes()
            keys.append(blake2b(page, key=blake2b(parent, digest_size=16).digest(), digest_size=16).digest())

    def lookup(self, keys: Sequence[bytes]) -> list[int]:
        """Pages of the longest prefix of `keys` that is registered. They are not yet held: `share` them."""
        pages = []
        for key in keys:
            page = self._page_of.get(key)
            if page is None:
                break
            pages.append(page)
        return pages

    def page_of(self, key: bytes) -> int | None:
        """The page that is registered under `key`."""
        return self._page_of.get(key)

    def register(self, page: int, key: bytes) -> None:
        """Offers a held, full and computed page under `key`; the first page registered keeps the key."""
        if self._ref_counts[page] == 0:
            raise ValueError(f"page {page} is not held: it cannot be registered")
        if self.enable_prefix_caching and key not in self._page_of and page not in self._key_of:
            self._page_of[key] = page
            self._key_of[page] = key

    def reset_prefix_cache(self) -> None:
        """Forgets every prefix (the weights changed). Held pages stay held."""
        self._free.extend(self._cached)
        self._cached.clear()
        self._page_of.clear()
        self._key_of.clear()

    def check_invariants(self) -> None:
        """Raises AssertionError unless every page is in exactly one state. O(num_pages): for tests."""
        free, cached = set(self._free), set(self._cached)
        held = {page for page, count in enumerate(self._ref_counts) if count > 0}
        assert len(free) == len(self._free), "a page is twice on the free list"
        assert min(self._ref_counts) >= 0, "a ref count is negative"
        assert NULL_PAGE not in free | cached | held, "the null page was handed out"
        assert not (free & cached or free & held or cached & held), "a page is in two states"
        assert free | cached | held == set(range(1, self.num_pages)), "a page is lost"
        assert {page: key for key, page in self._page_of.items()} == self._key_of, "the prefix maps disagree"
        assert cached <= self._key_of.keys() <= cached | held, (
            "a free page is registered, or a cached one is not"
        )
