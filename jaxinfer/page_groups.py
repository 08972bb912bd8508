"""The pages of all KV groups of a model: what a sequence holds of each. Host integers only, no jax.

Layers that see the same tokens are a group, with pages and a page table of its own. A group without a window has pages
for every token of a sequence. One with a window has pages for the tokens that the next step still sees; `slide` gives
the others back while the sequence runs, and the null page stands in their place. Such a group sets aside at admission
the most that the sequence can ever hold there, so that it never runs out later and nobody is preempted for it.

A prefix of n tokens is cached if every group has the pages that the token behind it sees: all of them without a window,
else the last ones before n (the rule of vLLM's hybrid allocator). Pages that a long prompt has left behind before their
step was committed were never offered as a prefix; all others can be found until they are reclaimed.
"""

from collections.abc import Sequence

from jaxinfer.page_allocator import NULL_PAGE, PageAllocator

Pages = list[
    list[int]
]  # of each group the pages of a sequence in its order, NULL_PAGE for those it gave back


def most_pages(num_tokens: int, page_size: int, window: int | None, step_tokens: int) -> int:
    """Pages of a group that a sequence of `num_tokens` holds at the most.

    A step of `step_tokens` tokens sees window - 1 more in front of them, and may begin and end anywhere in a page.
    """
    whole = -(-num_tokens // page_size)
    if window is None:
        return whole
    seen = window - 1 + step_tokens
    return min(whole, (seen + page_size - 2) // page_size + 1)


class PageGroups:
    """Hands out pages of every group.

    Args:
      groups: an allocator for each, of one page size.
      windows: of each group, how many of the newest tokens a token sees, itself included; None: all.
      step_tokens: the most tokens of one sequence in one step.
    """

    def __init__(
        self, groups: Sequence[PageAllocator], windows: Sequence[int | None] = (None,), step_tokens: int = 1
    ) -> None:
        if len(groups) != len(windows):
            raise ValueError(f"{len(groups)} groups have {len(windows)} windows: give one for each, or None")
        self.groups, self.windows, self.step_tokens = tuple(groups), tuple(windows), step_tokens
        self.page_size = groups[0].page_size
        self.enable_prefix_caching = groups[0].enable_prefix_caching
        self._full = [group for group, window in zip(groups, windows, strict=True) if window is None]
        self._first_full = list(windows).index(None) if self._full else None
        self._windowed = [(g, window) for g, window in enumerate(windows) if window is not None]
        self._set_aside = [0] * len(groups)  # pages of running sequences, of groups with a window

    # Sizes

    @property
    def capacity(self) -> int:
        """Tokens of the longest sequence that the pools can hold."""
        sizes = [2**31]
        for allocator, window in zip(self.groups, self.windows, strict=True):
            usable = allocator.num_pages - 1
            if self._most(2**31, window) > usable:
                sizes.append(usable * self.page_size)
        return min(sizes)

    @property
    def num_usable(self) -> int:
        """Pages of all groups, their null pages left out."""
        return sum(group.num_pages - 1 for group in self.groups)

    @property
    def num_used(self) -> int:
        return sum(group.num_used for group in self.groups)

    @property
    def peak_used(self) -> int:
        return sum(group.peak_used for group in self.groups)

    @property
    def num_free(self) -> int:
        """Pages by which sequences can grow in every group without a window."""
        return min((group.num_free for group in self._full), default=2**31)

    def num_missing(self, pages: Pages, num_tokens: int) -> int:
        """Pages that a sequence lacks, in each group without a window, to hold `num_tokens`."""
        if self._first_full is None:
            return 0
        return max(0, self.groups[0].num_pages_for(num_tokens) - len(pages[self._first_full]))

    def _most(self, num_tokens: int, window: int | None) -> int:
        return most_pages(num_tokens, self.page_size, window, self.step_tokens)

    def _first_seen(self, position: int, window: int) -> int:
        """Index of the first page that the token at `position` sees."""
        return max(0, position + 1 - window) // self.page_size

    # A sequence comes, grows, slides and goes

    def admit(self, shared: Pages, num_tokens: int, max_tokens: int, headroom: int) -> Pages | None:
        """The pages of a sequence that is admitted, or None if there are too few now.

        Args:
          shared: from `lookup` or `shared_with`; the sequence becomes one more holder of them.
          num_tokens: that it has, for which the groups without a window have pages then.
          max_tokens: that it can have in the end.
          headroom: pages that are to stay free in each group without a window.
        """
        if any(
            self._set_aside[g] + self._most(max_tokens, window) > self.groups[g].num_pages - 1
            for g, window in self._windowed
        ):
            return None
        for group, held in zip(self.groups, shared, strict=True):
            group.share(page for page in held if page != NULL_PAGE)
        missing = self.num_missing(shared, num_tokens)
        if missing + headroom > self.num_free:
            self._free(shared)
            return None
        pages = [list(held) for held in shared]
        self.grow(pages, missing)
        for g, window in self._windowed:
            self._set_aside[g] += self._most(max_tokens, window)
        return pages

    def grow(self, pages: Pages, num_pages: int) -> None:
        """So many more pages in each group without a window; `num_free` must have them."""
        for group, window, held in zip(self.groups, self.windows, pages, strict=True):
            if window is None:
                held += group.allocate(num_pages)

    def slide(self, pages: Pages, start: int, end: int) -> None:
        """Prepares groups with a window for a step over positions [start, end): gives back what it does not see.

        A step in flight may still read those pages: it runs before any that another owner is in.
        """
        for g, window in self._windowed:
            group, held = self.groups[g], pages[g]
            first = last = min(self._first_seen(start, window), len(held))
            while first and held[first - 1] != NULL_PAGE:
                first -= 1
            group.free(held[first:last])
            held[first:last] = [NULL_PAGE] * (last - first)
            held += group.allocate(max(0, group.num_pages_for(end) - len(held)))

    def release(self, pages: Pages, max_tokens: int) -> None:
        """Gives back all that a sequence holds and had set aside."""
        self._free(pages)
        for g, window in self._windowed:
            self._set_aside[g] -= self._most(max_tokens, window)

    def _free(self, pages: Pages) -> None:
        for group, held in zip(self.groups, pages, strict=True):
            group.free([page for page in held if page != NULL_PAGE])

    # Shared prefixes

    def extend_keys(self, keys: list[bytes], token_ids: Sequence[int], cache_salt: str = "") -> None:
        """See PageAllocator; a key is the same in all groups."""
        self.groups[0].extend_keys(keys, token_ids, cache_salt)

    def lookup(self, keys: Sequence[bytes]) -> tuple[Pages, int]:
        """(pages of each group, number of pages) of the longest prefix of `keys` that is cached."""
        full = [group.lookup(keys) for group in self._full]
        count = min(map(len, full), default=len(keys))
        if not self._windowed:
            return [pages[:count] for pages in full], count
        before = -1
        while count != before:
            before = count
            for g, size in self._windowed:
                for i in range(count - 1, self._first_seen(count * self.page_size, size) - 1, -1):
                    if self.groups[g].page_of(keys[i]) is None:
                        count = i  # every longer prefix sees this page, or one that is not there either
                        break
        pages: Pages = []
        for group, window in zip(self.groups, self.windows, strict=True):
            first = 0 if window is None else min(self._first_seen(count * self.page_size, window), count)
            found = [group.page_of(key) for key in keys[first:count]] if window is not None else full.pop(0)
            pages.append([NULL_PAGE] * first + [page for page in found[: count - first] if page is not None])
        return pages, count

    def shared_with(self, pages: Pages, num_tokens: int) -> Pages | None:
        """The full pages of another sequence's first `num_tokens`, or None if it has given back what they need."""
        count, shared = num_tokens // self.page_size, []
        for held, window in zip(pages, self.windows, strict=True):
            first = 0 if window is None else min(self._first_seen(num_tokens, window), count)
            # the page behind the full ones too, if it has a part: it is copied
            needed = held[first : -(-num_tokens // self.page_size)]
            if NULL_PAGE in needed:
                return None
            shared.append([NULL_PAGE] * first + held[first:count])
        return shared

    def copy_of_part(self, source: Pages, pages: Pages, index: int) -> list[tuple[int, int, int]]:
        """(group, page, copy) of page `index` of another sequence, which this one goes on in."""
        copies = []
        for g, (theirs, ours) in enumerate(zip(source, pages, strict=True)):
            if len(ours) <= index:  # a group with a window has pages up to the prefix so far
                ours += self.groups[g].allocate(index + 1 - len(ours))
            copies.append((g, theirs[index], ours[index]))
        return copies

    def register(self, pages: Pages, index: int, key: bytes) -> None:
        """Offers page `index` of a sequence, full and computed, in every group that still has it."""
        for group, held in zip(self.groups, pages, strict=True):
            if held[index] != NULL_PAGE:
                group.register(held[index], key)

    def reset_prefix_cache(self) -> None:
        """Forgets every prefix (the weights changed). Held pages stay held."""
        for group in self.groups:
            group.reset_prefix_cache()

    def check_invariants(self) -> None:
        """Raises AssertionError unless every page of every group is in exactly one state. O(pages): for tests."""
        for g, group in enumerate(self.groups):
            group.check_invariants()
            if self.windows[g] is not None:
                assert group.num_used <= self._set_aside[g] < group.num_pages, (
                    "more is held than was set aside"
                )
            else:
                assert self._set_aside[g] == 0
