"""Factories of the chunked tiers, for `zinf_core.registry.open_tier`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from typing import Final

from zinf_core.errors import ConfigError
from zinf_core.registry import TierUrl, open_tier
from zinf_core.tier import remove_tier
from zinf_core.units import PAGE_NBYTES, parse_nbytes
from zinf_storage.chunked.codecs import codec_named
from zinf_storage.chunked.options import ChunkedOptions
from zinf_storage.chunked.placement import split
from zinf_storage.chunked.rates import measured_rate, shares_of
from zinf_storage.chunked.shuffle import WIDTHS
from zinf_storage.chunked.tier import ChunkedTier

_COMMON: Final = frozenset({"chunk_nbytes", "num_threads"})
_MAX_SHARE_DIGITS: Final = 18
_MAX_THREADS: Final = 4


def open_striped(url: TierUrl, *, capacity_nbytes: int | None) -> ChunkedTier:
    """Open ``striped://[nvme:///a][nvme:///b]?shares=2,1&chunk_nbytes=1MiB&num_threads=4``.

    Without ``shares`` each tier is tried for about a quarter of a second and gets its part of the
    bandwidth, or the part it has once something is stored; `capacity_nbytes` is split in the same
    proportion. Blocks. Raises ConfigError for an option that is unknown or mistyped, and what the
    inner tiers raise.
    """
    url.refuse_unknown(_COMMON | {"shares"})
    _require_inner(url, "striped://[nvme:///a][nvme:///b]", exactly_one=False)
    if "shares" in url.options:
        shares = _parse_shares(url)
    else:
        shares = _measured_shares(url.inner, capacity_nbytes)
    options = ChunkedOptions(
        scheme=url.scheme,
        chunk_nbytes=_parse_chunk_nbytes(url),
        shares=shares,
        num_threads=url.number("num_threads", _MAX_THREADS),
    )
    capacities: Sequence[int | None] = [None] * len(url.inner)
    if capacity_nbytes is not None:
        capacities = split(capacity_nbytes, shares, unit=PAGE_NBYTES)
    return _opened(url, capacities, options)


def open_compressed(url: TierUrl, *, capacity_nbytes: int | None) -> ChunkedTier:
    """Open ``compressed://[nvme:///a]?codec=zstd&level=1&shuffle=auto&chunk_nbytes=1MiB``.

    Codecs are zstd (the default), lz4 and blosc2; ``shuffle`` is the width of the elements in
    bytes, 1 for none, ``auto`` to try. `capacity_nbytes` counts stored bytes. Raises ConfigError
    for an option that is unknown or mistyped, or a package that is missing.
    """
    url.refuse_unknown(_COMMON | {"codec", "level", "shuffle"})
    _require_inner(url, "compressed://[nvme:///folder]", exactly_one=True)
    level = url.number("level", 0, is_signed=True) if "level" in url.options else None
    codec = codec_named(url.options.get("codec", "zstd"), level=level)
    options = ChunkedOptions(
        scheme=url.scheme,
        chunk_nbytes=_parse_chunk_nbytes(url),
        codec=codec,
        shuffle=_parse_shuffle(url),
        num_threads=url.number("num_threads", min(_MAX_THREADS, os.cpu_count() or 1)),
    )
    return _opened(url, [capacity_nbytes], options)


def open_checksummed(url: TierUrl, *, capacity_nbytes: int | None) -> ChunkedTier:
    """Open ``checksummed://[nvme:///a]?chunk_nbytes=1MiB``: every read is verified.

    Raises ConfigError for an option that is unknown or mistyped.
    """
    url.refuse_unknown(_COMMON)
    _require_inner(url, "checksummed://[nvme:///folder]", exactly_one=True)
    options = ChunkedOptions(
        scheme=url.scheme,
        chunk_nbytes=_parse_chunk_nbytes(url),
        checksums=True,
        num_threads=url.number("num_threads", _MAX_THREADS),
    )
    return _opened(url, [capacity_nbytes], options)


def _opened(url: TierUrl, capacities: Sequence[int | None], options: ChunkedOptions) -> ChunkedTier:
    with ExitStack() as stack:
        inner = []
        for inner_url, capacity in zip(url.inner, capacities, strict=True):
            inner.append(open_tier(inner_url, capacity_nbytes=capacity))
            stack.callback(inner[-1].close)
        # `open` closes them if it fails; closing twice is fine.
        tier = ChunkedTier.open(inner, options=options, labels=[_label(text) for text in url.inner])
        stack.pop_all()
    return tier


def _label(inner_url: str) -> str:
    """Return `inner_url` without its options, for messages."""
    return inner_url if "[" in inner_url else inner_url.partition("?")[0]


def _measured_shares(urls: Sequence[str], capacity_nbytes: int | None) -> tuple[int, ...]:
    """Return the shares of the tiers at `urls`, which are opened for it one after the other: their
    capacities depend on what is measured, and are given when a tier opens."""
    if len(urls) == 1:
        return (1,)
    rates: list[float | None] = []
    held = []
    for url in urls:
        with ExitStack() as stack:
            tier = open_tier(url, capacity_nbytes=capacity_nbytes)
            usage = tier.usage()
            stack.callback(tier.close if usage.num_keys else partial(remove_tier, tier))
            held.append(usage.allocated_nbytes if usage.num_keys else 0)
            rates.append(measured_rate(tier))
    return tuple(max(1, nbytes) for nbytes in held) if any(held) else shares_of(rates)


def _require_inner(url: TierUrl, example: str, *, exactly_one: bool) -> None:
    if not url.inner or url.path or (exactly_one and len(url.inner) > 1):
        what = "one tier" if exactly_one else "tiers"
        raise ConfigError(f"{url.scheme} names {what} in brackets: {example}")


def _parse_chunk_nbytes(url: TierUrl) -> int | None:
    text = url.options.get("chunk_nbytes")
    return None if text is None else parse_nbytes(text, what="chunk_nbytes")


def _parse_shares(url: TierUrl) -> tuple[int, ...]:
    texts = url.options["shares"].split(",")
    if not all(text.isdecimal() and len(text) <= _MAX_SHARE_DIGITS and int(text) for text in texts):
        raise ConfigError(
            f"{url.scheme}: shares = {url.options['shares']!r} is not a list like 2,1 of numbers"
        )
    if len(texts) != len(url.inner):
        raise ConfigError(f"{url.scheme}: {len(texts)} shares for {len(url.inner)} tiers")
    return tuple(int(text) for text in texts)


def _parse_shuffle(url: TierUrl) -> int | None:
    text = url.options.get("shuffle", "auto")
    if text == "auto":
        return None
    if text not in map(str, WIDTHS):
        raise ConfigError(f"{url.scheme}: shuffle = {text!r} is not auto or one of {WIDTHS}")
    return int(text)
