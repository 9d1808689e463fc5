"""Opening chunked tiers: what is found again, what is refused, and that nothing is destroyed."""

from __future__ import annotations

import copy
import threading
from collections.abc import Sequence

import pytest
from chunked_helpers import (
    CHECKED,
    CHUNK,
    SMALL,
    Medium,
    contents,
    dicts,
    flush,
    key,
    noise,
    opened,
    read,
    store,
)

from zinf_core.capabilities import MemorySpace, TierCapabilities
from zinf_core.errors import (
    ConfigError,
    TierClosedError,
    TierError,
    TierFullError,
    TransferError,
)
from zinf_core.keys import StateKind, TensorKey
from zinf_core.testing import DictTier, FaultyTier, Operation, Phase
from zinf_core.tier import Tier
from zinf_core.units import MiB
from zinf_storage.chunked import ChunkedOptions, ChunkedTier, codec_named
from zinf_storage.chunked.derived import derived_capabilities
from zinf_storage.chunked.names import PROBE_KEY, ChunkName

NBYTES = 5 * CHUNK + 1
NUM_HELPERS = 2
"""Threads besides those asked for: one for commits, one that waits for the end."""
ZSTD = ChunkedOptions(
    scheme="compressed", chunk_nbytes=CHUNK, codec=codec_named("zstd"), num_threads=2
)
LZ4 = ChunkedOptions(
    scheme="compressed", chunk_nbytes=CHUNK, codec=codec_named("lz4"), num_threads=2
)


def written(options: ChunkedOptions = SMALL, count: int = 2) -> list[Medium]:
    """Return the media of a tier that holds one key."""
    media: list[Medium] = [{} for _ in range(count)]
    with opened(dicts(media), options) as tier:
        store(tier, key(0), noise(NBYTES))
        flush(tier)
    return media


def refused(inner: Sequence[Tier], options: ChunkedOptions, match: str) -> None:
    """Check that opening raises ConfigError and closes the inner tiers."""
    with pytest.raises(ConfigError, match=match):
        ChunkedTier.open(inner, options=options)
    for tier in inner:
        with pytest.raises(TierClosedError):
            tier.usage()


def test_other_orders_and_sets_are_refused() -> None:
    """Catches drives in another order, missing or foreign, whose chunks would be given back as
    left over, or found to be missing one by one."""
    media, others = written(), written()
    before = copy.deepcopy([media, others])
    refused(dicts(media[::-1]), SMALL, "in the order they had before")
    refused(dicts([media[0], {}, media[1]]), SMALL, "number of inner tiers 2, not 3")
    refused(dicts([media[0]]), SMALL, "number of inner tiers 2, not 1")
    with pytest.raises(TierError):
        ChunkedTier.open(dicts([media[0], others[1]]), options=SMALL)
    refused(
        dicts([{}, media[1]]),
        SMALL,
        r"dict1 \(inner tier 2\) holds .*which this tier did not write",
    )
    assert [media, others] == before
    with opened(dicts(media)) as tier:
        assert contents(tier) == {key(0): noise(NBYTES)}


def test_another_tiers_chunks_are_not_garbage() -> None:
    """Catches chunks of another striped tier that are given back because no index names them."""
    media: list[Medium] = [{}, {}]
    with opened(dicts(media)) as tier:
        flush(tier)
    others = written()
    before = copy.deepcopy([media, others])
    refused(dicts([media[0], others[1]]), SMALL, "which this tier did not write")
    assert [media, others] == before


def test_other_settings_are_refused() -> None:
    """Catches bytes read as what they are not, and a setting that is silently ignored."""
    media = written()
    refused(dicts(media), ChunkedOptions(chunk_nbytes=8192), "chunk_nbytes 4096, not 8192")
    refused(dicts(media), CHECKED, "scheme striped, not checksummed")
    with opened(dicts(media), ChunkedOptions(shares=(5, 1))) as tier:
        assert contents(tier) == {key(0): noise(NBYTES)}
        assert tier._parts.table.chunk_nbytes == CHUNK


def test_plain_keys_are_refused() -> None:
    """Catches a wrapper put over a tier in use, whose keys would seem to be lost."""
    medium: Medium = {}
    plain = DictTier(medium=medium)
    store(plain, key(0), noise(10))
    flush(plain)
    plain.close()
    before = dict(medium)
    refused(dicts([medium]), CHECKED, "layers.0.weight/param, which this tier did not write")
    assert medium == before


def test_a_codec_may_change() -> None:
    """Catches chunks decoded with today's codec instead of the one that wrote them."""
    media: list[Medium] = [{}]
    for i, options in enumerate((ZSTD, LZ4)):
        with opened(dicts(media), options) as tier:
            store(tier, key(i), b"abcd" * CHUNK)
            for old in range(i + 1):
                assert read(tier, key(old)) == b"abcd" * CHUNK
            flush(tier)


def test_left_over_chunks_are_given_back() -> None:
    """Catches room that a killed process takes for ever, and generations used twice."""
    media = written()
    name = next(name for name in media[1] if ChunkName.parse(name))
    mark = ChunkName.parse(name).mark
    stray = [
        ChunkName(key=key(index), index=index, generation=1000, mark=mark).inner_key
        for index in range(2)
    ]
    for medium, left in zip(media, stray, strict=True):
        medium[left] = b"left over"
    media[0][PROBE_KEY] = b"probe"
    with opened(dicts(media)) as tier:
        assert contents(tier) == {key(0): noise(NBYTES)}
        assert tier._parts.inners.next_generation > 1000
        flush(tier)
        assert not {*stray, PROBE_KEY} & {*media[0], *media[1]}


def test_a_set_with_a_volatile_tier_is_volatile() -> None:
    """Catches an index without half of its chunks, and drives left full after a close."""
    medium: Medium = {}

    class Prompt(DictTier):
        def close(self) -> None:
            self.flush()
            super().close()

    with opened([DictTier("memory"), Prompt(medium=medium)]) as tier:
        assert not tier.capabilities.persistent
        store(tier, key(0), noise(NBYTES))
        flush(tier)
        assert read(tier, key(0)) == noise(NBYTES)
    assert medium == {}


def capabilities(**changes: object) -> TierCapabilities:
    return TierCapabilities(**{"memory_spaces": frozenset({MemorySpace.HOST}), **changes})


@pytest.mark.parametrize(
    ("inner", "expected"),
    [
        ([{}], (1, 1, 1)),
        ([{"offset_align": 4096, "address_align": 4096}], (4096, 1, 4096)),
        ([{"address_align": 64}, {"offset_align": 512, "length_align": 16}], (512, 16, 64)),
        ([{"length_align": 3 * 512}, {"offset_align": 1024}], (3072, 1536, 1)),
    ],
)
def test_alignments_are_those_of_all(inner: list[dict], expected: tuple[int, int, int]) -> None:
    """Catches a chunk handed on at an address or offset its tier cannot use."""
    tiers = [DictTier(capabilities=capabilities(**changes)) for changes in inner]
    found = derived_capabilities(tiers, tier_name="t", chunk_nbytes=12288, needs_host=False)
    assert (found.offset_align, found.length_align, found.address_align) == expected
    assert found.max_in_flight == len(inner)
    with pytest.raises(ConfigError, match="chunk_nbytes = 4100"):
        derived_capabilities(
            [DictTier(capabilities=capabilities(offset_align=8))],
            tier_name="t", chunk_nbytes=4100, needs_host=False,
        )  # fmt: skip


HOST, PINNED, DEVICE = MemorySpace.HOST, MemorySpace.HOST_PINNED, MemorySpace.DEVICE


@pytest.mark.parametrize(
    ("spaces", "needs_host", "expected"),
    [
        ([{HOST}, {HOST, DEVICE}], False, {HOST, PINNED}),
        ([{HOST, DEVICE}, {HOST, DEVICE}], False, {HOST, PINNED, DEVICE}),
        ([{HOST, DEVICE}], True, {HOST}),
        ([{PINNED, DEVICE}, {HOST}], False, {PINNED}),
        ([{DEVICE}], True, None),
        ([{DEVICE}, {HOST}], False, None),
    ],
)
def test_spaces_are_those_of_all(
    spaces: list[set[MemorySpace]], needs_host: bool, expected: set[MemorySpace] | None
) -> None:
    """Catches buffers accepted that some chunk's tier cannot reach."""
    tiers = [DictTier(capabilities=capabilities(memory_spaces=frozenset(s))) for s in spaces]
    if expected is None:
        with pytest.raises(ConfigError, match="memory"):
            derived_capabilities(tiers, tier_name="t", chunk_nbytes=CHUNK, needs_host=needs_host)
    else:
        found = derived_capabilities(
            tiers, tier_name="t", chunk_nbytes=CHUNK, needs_host=needs_host
        )
        assert found.memory_spaces == expected


@pytest.mark.parametrize(
    "options",
    [
        {"chunk_nbytes": 0},
        {"chunk_nbytes": 4097},
        {"chunk_nbytes": 2 << 30},
        {"shares": ()},
        {"shares": (1, 0)},
        {"shuffle": 3},
        {"num_threads": 0},
    ],
)
def test_settings_that_cannot_work(options: dict) -> None:
    """Catches numbers that fail at the first transfer."""
    with pytest.raises(ConfigError):
        ChunkedOptions(**options)


def test_no_tiers_and_wrong_shares_are_refused() -> None:
    """Catches a tier over nothing, and shares that do not match."""
    refused([], SMALL, "at least one")
    refused([DictTier(), DictTier()], ChunkedOptions(shares=(1, 2, 3)), "3 shares for 2")


@pytest.mark.parametrize("operation", [Operation.RESERVE, Operation.WRITE, Operation.FLUSH])
def test_a_failed_open_leaves_nothing_running(operation: Operation) -> None:
    """Catches threads and inner tiers left open when opening fails half way."""
    inner = [FaultyTier(DictTier(medium={})), FaultyTier(DictTier(medium={}))]
    inner[0].fail_next(operation, phase=Phase.WAIT)
    threads = threading.active_count()
    with pytest.raises(TransferError):
        ChunkedTier.open(inner, options=SMALL)
    assert threading.active_count() == threads
    for tier in inner:
        with pytest.raises(TierClosedError):
            tier.usage()


def test_threads_are_those_that_were_asked_for() -> None:
    """Catches threads that come and go with transfers."""
    before = threading.active_count()
    with opened([DictTier()], ChunkedOptions(chunk_nbytes=CHUNK, num_threads=3)) as tier:
        assert threading.active_count() == before + 3 + NUM_HELPERS
        store(tier, key(0), noise(NBYTES))
        assert threading.active_count() == before + 3 + NUM_HELPERS
    assert threading.active_count() == before


def test_an_impossible_size_is_refused_at_once() -> None:
    """Catches a reserve that goes on chunk by chunk until the machine is full."""
    with opened([DictTier()]) as tier:
        with pytest.raises(TierFullError, match="chunks"):
            tier.reserve(key(0), 1 << 60)
        assert tier._parts.inners.usage().num_keys == 0
    with opened([DictTier(capacity_nbytes=MiB), DictTier(capacity_nbytes=MiB)]) as tier:
        assert tier.usage().capacity_nbytes == 2 * MiB
        with pytest.raises(TierFullError, match="capacity"):
            tier.reserve(key(0), 2 * MiB + 1)


def test_a_tier_that_is_full_leaves_the_rest_to_others() -> None:
    """Catches a striped tier that is full while one of its drives is not."""
    tiers = [DictTier(capacity_nbytes=2 * CHUNK), DictTier(capacity_nbytes=8 * CHUNK)]
    with opened(tiers) as tier:
        store(tier, key(0), noise(10 * CHUNK))
        assert read(tier, key(0)) == noise(10 * CHUNK)
        assert [one.usage().nbytes for one in tiers] == [2 * CHUNK, 8 * CHUNK]


def test_names_and_paths_tell_the_nesting() -> None:
    """Catches a name from which one cannot tell what lies where."""
    striped = ChunkedTier.open(
        [DictTier("a"), DictTier("b")], options=ChunkedOptions(chunk_nbytes=CHUNK, shares=(3, 1))
    )
    with opened([striped], ZSTD) as tier:
        assert tier.name == "compressed(striped(a,b))"
        assert striped.path_taken == "75 % a: direct call; 25 % b: direct call"
        assert "75 % a" in tier.path_taken


def test_any_key_can_be_stored() -> None:
    """Catches names of chunks mixed up with keys that look like them."""
    media: list[Medium] = [{}, {}]
    keys = [
        TensorKey("w", "param", "#0.0.00000000"),
        TensorKey("w", "param"),
        TensorKey("zinf.index", "param", "1"),
        TensorKey("zinf.probe", "param"),
        TensorKey.of("ü \ud800", StateKind.GRAD, "#"),
    ]
    with opened(dicts(media)) as tier:
        for i, which in enumerate(keys):
            store(tier, which, noise(CHUNK + 1, i))
        flush(tier)
    with opened(dicts(media)) as tier:
        assert contents(tier) == {which: noise(CHUNK + 1, i) for i, which in enumerate(keys)}
