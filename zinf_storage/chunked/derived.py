"""What a ChunkedTier can do, derived from what its inner tiers can do."""

from __future__ import annotations

import math
from collections.abc import Sequence

from zinf_core.capabilities import MemorySpace, TierCapabilities
from zinf_core.errors import ConfigError
from zinf_core.tier import Tier


def derived_capabilities(
    tiers: Sequence[Tier], *, tier_name: str, chunk_nbytes: int, needs_host: bool
) -> TierCapabilities:
    """Return what a ChunkedTier over `tiers` can do. Pure but for asking them.

    Whole chunks travel between the caller's memory and the inner tiers directly, so their
    alignments are the tier's own. Parts of chunks are merged in host memory: with device buffers
    this needs their edges aligned, and without host memory every transfer is whole chunks.
    Raises ConfigError if they have no memory space in common, or none that is needed.
    """
    inner = [tier.capabilities for tier in tiers]
    persistent = all(one.persistent for one in inner)
    spaces = _common_spaces(tiers, tier_name, needs_host=needs_host or persistent)
    length_align = math.lcm(*(one.length_align for one in inner))
    address_align = math.lcm(*(one.address_align for one in inner))
    offset_align = math.lcm(length_align, address_align, *(one.offset_align for one in inner))
    if chunk_nbytes % offset_align:
        raise ConfigError(
            f"{tier_name}: chunk_nbytes = {chunk_nbytes} is not a multiple of {offset_align}, the "
            "alignment of the inner tiers"
        )
    if needs_host:
        spaces = {MemorySpace.HOST}
    elif MemorySpace.HOST not in spaces:
        offset_align = length_align = chunk_nbytes
    elif MemorySpace.DEVICE in spaces:
        length_align = offset_align
    return TierCapabilities(
        memory_spaces=frozenset(spaces),
        offset_align=offset_align,
        length_align=length_align,
        address_align=address_align,
        preferred_io_nbytes=max(chunk_nbytes * len(inner), *(o.preferred_io_nbytes for o in inner)),
        max_in_flight=sum(one.max_in_flight for one in inner),
        persistent=persistent,
    )


def _common_spaces(tiers: Sequence[Tier], tier_name: str, *, needs_host: bool) -> set[MemorySpace]:
    """Return the spaces that all of `tiers` take. Raises ConfigError without a usable one."""
    spaces = {
        space for space in MemorySpace if all(tier.capabilities.takes(space) for tier in tiers)
    }
    if not spaces or (needs_host and MemorySpace.HOST not in spaces):
        names = ", ".join(tier.name for tier in tiers)
        wanted = "take host memory" if needs_host else "have a memory space in common"
        raise ConfigError(f"{tier_name} needs inner tiers that {wanted}; {names} do not")
    return spaces
