"""Which pages of the latent cache belong to which sequence."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from kdgen.errors import KdgenError


class CacheFullError(KdgenError):
    """The cache has fewer free pages than were asked for; nothing was taken."""


class PagePool:
    """The free pages of a cache; pages that were given back last are taken first.

    Args:
        pages: how many there are.
        rng: puts them in random order, for tests that must not depend on it.
    """

    def __init__(self, pages: int, rng: np.random.Generator | None = None):
        order = np.arange(pages) if rng is None else rng.permutation(pages)
        self._free = [int(page) for page in order[::-1]]
        self.pages = pages

    def __len__(self) -> int:
        """Free pages."""
        return len(self._free)

    def take(self, count: int) -> list[int]:
        """Take pages.

        Raises:
            CacheFullError: there are fewer.
        """
        if count > len(self._free):
            raise CacheFullError(
                f"{count} pages of the cache are needed and {len(self._free)} of {self.pages} are free: "
                "decode fewer sequences or tokens, or give the engine more pages"
            )
        return [self._free.pop() for _ in range(count)]

    def give(self, pages: Iterable[int]) -> None:
        """Give pages back."""
        self._free.extend(pages)
