"""The kit on its own tiers. Each suite must pass: a check that fails here is wrong itself."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from pathlib import Path

import pytest
from chip_memory import ChipBuffer, ChipTier, chip_contents, fill_chip

from zinf_core.buffers import Buffer
from zinf_core.capabilities import MemorySpace, TierCapabilities
from zinf_core.keys import TensorKey
from zinf_core.testing import (
    DeferredTier,
    DictTier,
    FaultPlan,
    FaultyTier,
    Operation,
    TierSuite,
    latest,
    machine_for,
    seeded_order,
)
from zinf_core.tier import Tier
from zinf_core.units import MiB

ALIGNED = TierCapabilities(
    memory_spaces=frozenset({MemorySpace.HOST}),
    offset_align=512,
    length_align=512,
    address_align=512,
    max_in_flight=4,
)


class DictMedia:
    """One dict per folder, which is what a persistent DictTier keeps its bytes in."""

    def __init__(self) -> None:
        self._media: dict[Path, dict[TensorKey, bytes]] = {}

    def open(self, folder: Path) -> DictTier:
        if not any(folder.iterdir()):
            self._media[folder] = {}
            (folder / "in-use").touch()
        return DictTier(medium=self._media[folder], capacity_nbytes=16 * MiB)

    def peek(self, folder: Path, key: TensorKey) -> bytes:
        return self._media[folder][key]


class DictSuite(TierSuite):
    """Suite of a tier around a DictTier, whose dict is the back door."""

    @abstractmethod
    def wrap(self, inner: DictTier) -> Tier: ...

    def open_inner(self) -> DictTier:
        return DictTier(capacity_nbytes=16 * MiB)

    def open_tier(self, folder: Path) -> Tier:
        self.inner = self.open_inner()
        return self.wrap(self.inner)

    def peek(self, tier: Tier, key: TensorKey) -> bytes:
        return self.inner._stored[key]

    def poke(self, tier: Tier, key: TensorKey, data: bytes) -> bool:
        self.inner._stored[key] = data
        return True


class TestDictTier(DictSuite):
    def wrap(self, inner: DictTier) -> Tier:
        return inner


class TestAlignedDictTier(TestDictTier):
    def open_inner(self) -> DictTier:
        return DictTier(capabilities=ALIGNED, capacity_nbytes=16 * MiB)


class TestChipTier(TierSuite):
    """No check may look into device memory other than through the hooks."""

    def open_tier(self, folder: Path) -> Tier:
        return ChipTier()

    def make_buffer(self, nbytes: int) -> Buffer:
        return ChipBuffer.make(nbytes)

    def fill(self, buffer: Buffer, data: bytes) -> None:
        fill_chip(buffer, data)

    def contents(self, buffer: Buffer) -> bytes:
        return chip_contents(buffer)


class TestDeferredChipTier(TestChipTier):
    def open_tier(self, folder: Path) -> Tier:
        return DeferredTier(ChipTier(), order=seeded_order(8), fill=fill_chip)


class TestFaultyChipTier(TestChipTier):
    """A failed read ruins nothing it cannot reach."""

    def open_tier(self, folder: Path) -> Tier:
        return FaultyTier(ChipTier())

    def fail_next(self, tier: FaultyTier, operation: Operation) -> bool:
        tier.fail_next(operation, damage=True)
        return True


class TestPersistentDictTier(TierSuite):
    @pytest.fixture(autouse=True)
    def _media(self) -> None:
        self.media = DictMedia()

    def open_tier(self, folder: Path) -> Tier:
        return self.media.open(folder)


class TestDeferredTier(DictSuite):
    def wrap(self, inner: DictTier) -> Tier:
        return DeferredTier(inner, order=latest)


class TestDeferredTierInDrawnOrder(TestAlignedDictTier):
    def wrap(self, inner: DictTier) -> Tier:
        return DeferredTier(inner, order=seeded_order(7))


class TestFaultyTier(DictSuite):
    def wrap(self, inner: DictTier) -> Tier:
        return FaultyTier(inner)

    def fail_next(self, tier: FaultyTier, operation: Operation) -> bool:
        tier.fail_next(operation)
        return True


class TestFaultyTierWithDamage(TestFaultyTier):
    def fail_next(self, tier: FaultyTier, operation: Operation) -> bool:
        tier.fail_next(operation, damage=True)
        return True


class TestFullDevice(DictSuite):
    """The room of the plan is the tier's capacity."""

    def open_inner(self) -> DictTier:
        return DictTier()

    def wrap(self, inner: DictTier) -> Tier:
        return FaultyTier(inner, plan=FaultPlan(room_nbytes=16 * MiB))


class TestDeferredFaultyTier(DictSuite):
    """A failure that is deferred comes out of wait, as law 10 asks."""

    def wrap(self, inner: DictTier) -> Tier:
        self.faulty = FaultyTier(inner)
        return DeferredTier(self.faulty, order=seeded_order(3))

    def fail_next(self, tier: Tier, operation: Operation) -> bool:
        self.faulty.fail_next(operation, damage=True)
        return True


def _open_deferred_media() -> Callable[[Path], Tier]:
    media = DictMedia()
    return lambda folder: DeferredTier(media.open(folder), order=seeded_order(5))


TestDictMachine = pytest.mark.slow(
    machine_for(lambda folder: DictTier(capacity_nbytes=MiB)).TestCase
)
TestPersistentDictMachine = pytest.mark.slow(machine_for(DictMedia().open).TestCase)
TestAlignedDictMachine = pytest.mark.slow(
    machine_for(lambda folder: DictTier(capabilities=ALIGNED)).TestCase
)
TestDeferredMachine = pytest.mark.slow(
    machine_for(lambda folder: DeferredTier(DictTier())).TestCase
)
TestDeferredDrawnMachine = pytest.mark.slow(
    machine_for(
        lambda folder: DeferredTier(DictTier(capabilities=ALIGNED), order=seeded_order(11))
    ).TestCase
)
TestDeferredPersistentMachine = pytest.mark.slow(machine_for(_open_deferred_media()).TestCase)
TestChipMachine = pytest.mark.slow(
    machine_for(
        lambda folder: DeferredTier(ChipTier(), fill=fill_chip),
        make_buffer=ChipBuffer.make,
        fill=fill_chip,
        contents=chip_contents,
    ).TestCase
)
