"""Replacement policies: which resident page leaves next. Pure.

=============  =====================================================================================================
lru            the page used longest ago
mru            the page used last: the best order without bypass when every page is used once a pass
smallest       the page of the fewest bytes, the one used longest ago among equals
largest        the page of the most bytes, the one used longest ago among equals
byte_aware     the page worth least. Ours: a page's worth is the weight bytes it keeps per byte of budget it takes,
               ``nbytes / (granules x granule)``. Every weight is read once a pass, so use says nothing about worth.
               Among equals the smaller page leaves first, so that large tensors stay, then the one used last.
=============  =====================================================================================================

What is still equal leaves in load order (mru, byte_aware: in reverse), so a policy leaves nothing to chance.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Resident:
    """What a policy may know of a page.

    ``order`` is its place in load order, ``nbytes`` its weight bytes, ``held`` the bytes of budget it takes,
    ``last_use`` the number of the unit run that used it last (0: not since the load).
    """

    order: int
    nbytes: int
    held: int
    last_use: int


Rank = Callable[[Resident], tuple[float, ...]]

_RANKS: dict[str, Rank] = {
    "lru": lambda page: (page.last_use, page.order),
    "mru": lambda page: (-page.last_use, -page.order),
    "smallest": lambda page: (page.nbytes, page.last_use, page.order),
    "largest": lambda page: (-page.nbytes, page.last_use, page.order),
    "byte_aware": lambda page: (page.nbytes / page.held, page.nbytes, -page.last_use, -page.order),
}

DYNAMIC = tuple(_RANKS)
"""The names of the policies."""


def leaving(policy: str, pages: Iterable[Resident]) -> list[Resident]:
    """``pages`` in the order in which ``policy`` lets them go."""
    return sorted(pages, key=_RANKS[policy])
