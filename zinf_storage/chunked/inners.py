"""InnerTiers: the tiers below a ChunkedTier, as room for cells."""

from __future__ import annotations

import errno
import threading
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Final

from zinf_core.capabilities import TierUsage
from zinf_core.errors import (
    KeyAbsentError,
    TierError,
    TierFullError,
    TransferError,
)
from zinf_core.keys import TensorKey
from zinf_core.tier import Tier, reclaim_tier, remove_tier
from zinf_core.units import format_nbytes
from zinf_storage.chunked.names import ChunkName
from zinf_storage.chunked.placement import Placed
from zinf_storage.chunked.table import Cell

_MAX_CHUNKS_PER_KEY: Final = 1 << 24
"""Keeps a wrong size from being reserved chunk by chunk for hours."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CellRequest:
    """Room wanted for one chunk."""

    key: TensorKey
    index: int
    """Number of the chunk within the key."""
    nbytes: int
    prefer: int | None = None
    """Inner tier to ask first; None: whichever is due by its share."""


class InnerTiers:
    """Reserves and discards cells, spread over the tiers by their shares.

    Thread-safe: `_lock` guards what was placed, the generations, and the cells that a tier refused
    to discard; those are tried again with the next ones. Owns the tiers and closes them.
    """

    def __init__(
        self, tiers: Sequence[Tier], *, names: Sequence[str], tier_name: str,
        shares: Sequence[int], mark: str, next_generation: int,
    ) -> None:  # fmt: skip
        """Place by `shares`, one for each of `tiers`, which messages call `names`; no cell has
        `next_generation` or a later one."""
        self.tiers = tuple(tiers)
        self.names = tuple(names)
        self.shares = tuple(shares)
        self.mark = mark
        self._tier_name = tier_name
        self._placed = Placed.nothing(len(self.tiers))
        self._next_generation = next_generation
        self._refused: list[Cell] = []
        self._lock = threading.Lock()

    @property
    def is_persistent(self) -> bool:
        """Whether all of them are."""
        return all(tier.capabilities.persistent for tier in self.tiers)

    @property
    def next_generation(self) -> int:
        """Generation that no cell has yet."""
        with self._lock:
            return self._next_generation

    def reserve(self, request: CellRequest) -> Cell:
        """Return room on the tier that is due, or on the next one that has any. May block.

        Raises TierFullError if none has, TransferError.
        """
        self.discard(())
        with self._lock:
            ranking = self._placed.ranking(request.nbytes, self.shares)
            generation = self._next_generation
            self._next_generation += 1
        if request.prefer is not None:
            ranking.sort(key=lambda inner: inner != request.prefer)
        name = ChunkName(
            key=request.key, index=request.index, generation=generation, mark=self.mark
        )
        refusals = []
        for inner in ranking:
            try:
                self.tiers[inner].reserve(name.inner_key, request.nbytes)
            except TierFullError as exc:
                refusals.append(f"{self.names[inner]}: {exc.strerror or exc}")
                continue
            with self._lock:
                self._placed = self._placed.after(inner, request.nbytes)
            return Cell(
                inner=inner,
                inner_key=name.inner_key,
                nbytes=request.nbytes,
                generation=generation,
            )
        raise TierFullError(
            errno.ENOSPC,
            f"{request.nbytes} bytes for chunk {request.index} of {request.key} were refused: "
            f"{'; '.join(refusals)}",
        )

    def reserve_key(self, key: TensorKey, nbytes: int, *, chunk_nbytes: int) -> list[Cell]:
        """Return room for every chunk of a key. May block. Raises as `reserve`, and then has
        taken nothing."""
        capacity = self.usage().capacity_nbytes
        if capacity is not None and nbytes > capacity:
            raise TierFullError(
                errno.ENOSPC,
                f"{self._tier_name}: {key} of {nbytes} bytes is larger than the capacity of "
                f"{capacity}; raise it",
            )
        if nbytes > _MAX_CHUNKS_PER_KEY * chunk_nbytes:
            raise TierFullError(
                errno.EFBIG,
                f"{self._tier_name}: {key} of {nbytes} bytes would be more than "
                f"{_MAX_CHUNKS_PER_KEY} chunks of {chunk_nbytes} bytes; use larger chunks",
            )
        cells: list[Cell] = []
        try:
            for index, start in enumerate(range(0, nbytes, chunk_nbytes)):
                size = min(chunk_nbytes, nbytes - start)
                cells.append(self.reserve(CellRequest(key=key, index=index, nbytes=size)))
        except TierFullError as exc:
            self.discard(cells)
            raise TierFullError(
                exc.errno,
                f"{self._tier_name}: no room for {key} of {nbytes} bytes "
                f"({format_nbytes(nbytes)}): {exc.strerror}",
            ) from exc
        except BaseException:
            self.discard(cells)
            raise
        return cells

    def discard(self, cells: Iterable[Cell]) -> None:
        """Give cells back, and those refused before. One that a tier refuses now is kept for the
        next call, so this raises nothing that the environment can cause. May block."""
        with self._lock:
            due, self._refused = [*self._refused, *cells], []
        refused = []
        for cell in due:
            try:
                self.tiers[cell.inner].discard(cell.inner_key)
            except KeyAbsentError:
                continue
            except TierError:
                refused.append(cell)
        if refused:
            with self._lock:
                self._refused += refused

    def usage(self) -> TierUsage:
        """Return what the tiers hold together, in their own keys."""
        usages = [tier.usage() for tier in self.tiers]
        capacities = [usage.capacity_nbytes for usage in usages]
        known = [capacity for capacity in capacities if capacity is not None]
        return TierUsage(
            num_keys=sum(usage.num_keys for usage in usages),
            nbytes=sum(usage.nbytes for usage in usages),
            allocated_nbytes=sum(usage.allocated_nbytes for usage in usages),
            capacity_nbytes=sum(known) if len(known) == len(capacities) else None,
        )

    def flush(self) -> None:
        """Make everything durable on every tier, side by side. Blocks.

        Raises TierFullError if none failed for anything but want of room, else TransferError.
        """
        errors: dict[str, TierError] = {}
        completions = []
        for name, tier in zip(self.names, self.tiers, strict=True):
            try:
                completions.append((name, tier.flush()))
            except TierError as exc:
                errors[name] = exc
        for name, completion in completions:
            try:
                completion.wait()
            except TierError as exc:
                errors[name] = exc
        if errors:
            raise _merged(self._tier_name, errors)

    def close(self) -> None:
        """Close every tier, also if one raises."""
        with ExitStack() as stack:
            for tier in reversed(self.tiers):
                stack.callback(tier.close)

    def reclaim(self) -> int:
        """Delete what killed processes left on the tiers; return its bytes."""
        return sum(map(reclaim_tier, self.tiers))

    def remove(self) -> None:
        """Remove every tier, also if one raises."""
        with ExitStack() as stack:
            for tier in reversed(self.tiers):
                stack.callback(remove_tier, tier)


def inner_names(labels: Sequence[str]) -> list[str]:
    """Return how messages call inner tiers that are labelled so: with their numbers, if several."""
    if len(labels) == 1:
        return list(labels)
    return [f"{label} (inner tier {number})" for number, label in enumerate(labels, start=1)]


def _merged(tier_name: str, errors: Mapping[str, TierError]) -> TierError:
    """Return one error of the tree for failures of several tiers, by their names."""
    numbers = {getattr(error, "errno", None) for error in errors.values()}
    number = next(iter(numbers)) if len(numbers) == 1 else None
    text = "; ".join(f"{name}: {error}" for name, error in errors.items())
    what = f"{tier_name}: flush failed on {text}"
    is_full = all(isinstance(error, TierFullError) for error in errors.values())
    merged: TierError = TransferError(number or errno.EIO, what)
    if is_full:
        merged = TierFullError(number or errno.ENOSPC, what)
    merged.__cause__ = ExceptionGroup("flush", list(errors.values()))
    return merged
