"""Damage below a chunked tier: it is named, wherever it is, and never passed on as data."""

from __future__ import annotations

import errno

import pytest
from chunked_helpers import (
    CHECKED,
    CHUNK,
    SMALL,
    dicts,
    flush,
    key,
    noise,
    opened,
    read,
    store,
    write,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from zinf_core.completion import CompletedTransfer, Completion
from zinf_core.errors import CorruptDataError, TierError, TierFullError, TransferError
from zinf_core.testing import DictTier, FaultyTier, Operation
from zinf_storage.chunked import ChunkedOptions, ChunkedTier, codec_named
from zinf_storage.chunked.names import ChunkName

NBYTES = 3 * CHUNK + 100
ZSTD = ChunkedOptions(
    scheme="compressed", chunk_nbytes=CHUNK, codec=codec_named("zstd"), num_threads=2
)


def data_of(options: ChunkedOptions) -> bytes:
    return noise(NBYTES) if options is CHECKED else (b"weights " * NBYTES)[:NBYTES]


def flip_bit(inner: DictTier, chunk: int, at: int) -> None:
    """Flip one bit of what the inner tier stores for a chunk."""
    for name, stored in inner._stored.items():
        parsed = ChunkName.parse(name)
        if parsed is not None and parsed.index == chunk:
            at %= len(stored)
            inner._stored[name] = stored[:at] + bytes([stored[at] ^ 4]) + stored[at + 1 :]


@pytest.mark.parametrize("options", [CHECKED, ZSTD], ids=["checksummed", "compressed"])
@given(chunk=st.integers(0, 3), at=st.integers(0, CHUNK - 1))
@settings(max_examples=25, deadline=None)
def test_damage_is_noticed_and_named(options: ChunkedOptions, chunk: int, at: int) -> None:
    """Catches chunks that are not checked on every read, or checked after they were decoded, and
    messages that leave open what to restore."""
    inner = DictTier("drive")
    data = data_of(options)
    with opened([inner], options) as tier:
        store(tier, key(0), data)
        assert read(tier, key(0)) == data
        start, end = chunk * CHUNK, min((chunk + 1) * CHUNK, NBYTES)
        assert read(tier, key(0), start + 5, 7) == data[start + 5 : start + 12]
        flip_bit(inner, chunk, at)
        message = rf"layers.0.weight/param, bytes {start} to {end} on drive"
        for offset, nbytes in ((0, NBYTES), (start, end - start), (start + 5, 7)):
            with pytest.raises(CorruptDataError, match=message):
                read(tier, key(0), offset, nbytes)
        for other in set(range(4)) - {chunk}:
            low, high = other * CHUNK, min((other + 1) * CHUNK, NBYTES)
            assert read(tier, key(0), low, high - low) == data[low:high]
        write(tier, key(0), data)
        assert read(tier, key(0)) == data


def test_damage_is_noticed_before_it_is_merged() -> None:
    """Catches a partial write that gives damaged old bytes a new, right checksum."""
    inner = DictTier()
    with opened([inner], CHECKED) as tier:
        store(tier, key(0), noise(NBYTES))
        flip_bit(inner, 1, 9)
        with pytest.raises(CorruptDataError, match="bytes 4096 to 8192"):
            write(tier, key(0), b"new", offset=CHUNK + 50)
        with pytest.raises(CorruptDataError):
            read(tier, key(0))
        write(tier, key(0), noise(CHUNK, 5), offset=CHUNK)
        assert read(tier, key(0), CHUNK, CHUNK) == noise(CHUNK, 5)


def test_chunks_do_not_pass_for_each_other() -> None:
    """Catches a checksum of which every chunk of a key is as good as another."""
    inner = DictTier()
    with opened([inner], CHECKED) as tier:
        store(tier, key(0), noise(NBYTES))
        names = sorted(inner._stored)
        first, second = inner._stored[names[0]], inner._stored[names[1]]
        inner._stored[names[0]], inner._stored[names[1]] = second, first
        with pytest.raises(CorruptDataError):
            read(tier, key(0))


@pytest.mark.parametrize("how", ["gone", "shorter"])
def test_lost_chunks_are_damage(how: str) -> None:
    """Catches a KeyAbsentError or RangeError of an inner tier passed on as if the caller had named
    a wrong key."""
    inner = DictTier("drive")
    with opened([inner]) as tier:
        store(tier, key(0), noise(NBYTES))
        name = min(inner._stored)
        if how == "gone":
            del inner._stored[name]
        else:
            inner._stored[name] = b"short"
        with pytest.raises(CorruptDataError, match="bytes 0 to 4096 on drive"):
            read(tier, key(0))


def test_lost_chunks_are_noticed_at_open() -> None:
    """Catches an open that finds out when the key is needed, after it gave other chunks back."""
    media = [{}, {}]
    with opened(dicts(media)) as tier:
        store(tier, key(0), noise(NBYTES))
        flush(tier)
    lost = {name: media[1].pop(name) for name in list(media[1])[:1]}
    before = [dict(medium) for medium in media]
    with pytest.raises(CorruptDataError, match=r"dict1 \(inner tier 2\) holds no chunk"):
        ChunkedTier.open(dicts(media), options=SMALL)
    assert media == before
    media[1].update(lost)
    with opened(dicts(media)) as tier:
        assert read(tier, key(0)) == noise(NBYTES)


@pytest.mark.parametrize("operation", [Operation.READ, Operation.WRITE])
def test_failures_name_the_whole_way(operation: Operation) -> None:
    """Catches messages from which one cannot tell which of several drives failed, or for what."""
    drives = [FaultyTier(DictTier("drive0")), FaultyTier(DictTier("drive1"))]
    striped = ChunkedTier.open(drives, options=SMALL)
    with opened([striped], ZSTD) as tier:
        store(tier, key(0), noise(NBYTES))
        drives[1].fail_next(operation)
        submit = {
            Operation.READ: lambda: read(tier, key(0)),
            Operation.WRITE: lambda: write(tier, key(0), noise(NBYTES, 1)),
        }[operation]
        with pytest.raises(TransferError) as caught:
            submit()
        message = str(caught.value)
        for word in (
            "compressed(striped(drive0,drive1)): ",
            "layers.0.weight/param",
            "on striped(drive0,drive1)",
            "on drive1 (inner tier 2)",
        ):
            assert word in message, f"{word!r} is not in {message!r}"
        assert caught.value.errno == 5


class UnflushedTier(DictTier):
    """A persistent tier whose flushes fail with `number`, if it is not 0, at either moment."""

    number = 0
    at_submit = False

    def flush(self) -> Completion:
        error: TierError = TransferError(self.number, "planned")
        if self.number in {errno.ENOSPC, errno.EDQUOT}:
            error = TierFullError(self.number, "planned")
        if self.number and self.at_submit:
            raise error
        return CompletedTransfer(error) if self.number else super().flush()


@pytest.mark.parametrize("at_submit", [False, True])
@pytest.mark.parametrize(
    ("numbers", "expected", "kind"),
    [
        ((errno.ENOSPC, errno.ENOSPC), errno.ENOSPC, TierFullError),
        ((errno.EDQUOT, errno.EDQUOT), errno.EDQUOT, TierFullError),
        ((errno.ENOSPC, errno.EDQUOT), errno.ENOSPC, TierFullError),
        ((0, errno.ENOSPC), errno.ENOSPC, TierFullError),
        ((errno.EROFS, errno.EROFS), errno.EROFS, TransferError),
        ((0, errno.EROFS), errno.EROFS, TransferError),
        ((errno.EROFS, errno.EACCES), errno.EIO, TransferError),
        ((errno.ENOSPC, errno.EIO), errno.EIO, TransferError),
    ],
)
def test_what_all_drives_fail_with_is_told(
    numbers: tuple[int, int], expected: int, kind: type[TierError], *, at_submit: bool
) -> None:
    """Catches full drives reported as broken ones because there are two of them, and a failure
    that does not say whose it is."""
    inner = [UnflushedTier("drive0", medium={}), UnflushedTier("drive1", medium={})]
    with opened(inner) as tier:
        for one, number in zip(inner, numbers, strict=True):
            one.number, one.at_submit = number, at_submit
        with pytest.raises(kind) as caught:
            flush(tier)
        assert caught.value.errno == expected
        for name, number in zip(("drive0", "drive1"), numbers, strict=True):
            assert (f"{name} (inner tier" in str(caught.value)) == bool(number)
        for one in inner:
            one.number = 0
        flush(tier)


def test_an_inner_tier_closed_by_others() -> None:
    """Catches a TierClosedError that looks as if this tier had been closed."""
    inner = DictTier()
    with opened([inner]) as tier:
        store(tier, key(0), noise(10))
        inner.close()
        with pytest.raises(TransferError, match="dict"):
            read(tier, key(0))
        with pytest.raises(TierError):
            write(tier, key(0), noise(10))
