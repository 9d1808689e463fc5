"""Opening: what the inner tiers hold becomes the parts of a ChunkedTier."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from zinf_core.capabilities import TierCapabilities
from zinf_core.errors import ConfigError, CorruptDataError
from zinf_core.keys import TensorKey
from zinf_core.tier import Tier
from zinf_storage.chunked.codecs import Codec, codec_named
from zinf_storage.chunked.commit import FIRST, Committer, load_index, remove_indexes
from zinf_storage.chunked.derived import derived_capabilities
from zinf_storage.chunked.failures import explained
from zinf_storage.chunked.index import Index
from zinf_storage.chunked.inners import InnerTiers
from zinf_storage.chunked.maker import ChunkMaker, Machinery
from zinf_storage.chunked.meter import CodecMeter
from zinf_storage.chunked.names import PROBE_KEY, ChunkName, index_key, index_number
from zinf_storage.chunked.options import DEFAULT_CHUNK_NBYTES, ChunkedOptions
from zinf_storage.chunked.reading import ChunkReader
from zinf_storage.chunked.scratch import WINDOW, Scratch
from zinf_storage.chunked.table import ChunkTable, Entry
from zinf_storage.chunked.writing import ChunkWriter
from zinf_storage.transfers.scheduler import TransferScheduler

_MAX_WINDOW = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenedParts:
    """What an open tier consists of."""

    tier_name: str
    capabilities: TierCapabilities
    machinery: Machinery
    scheduler: TransferScheduler[Entry]
    meter: CodecMeter

    @property
    def inners(self) -> InnerTiers:
        """The tiers below."""
        return self.machinery.inners

    @property
    def table(self) -> ChunkTable:
        """The keys; guarded by the scheduler's lock."""
        return self.machinery.table


def open_parts(
    tiers: Sequence[Tier], *, names: Sequence[str], options: ChunkedOptions, tier_name: str,
    new_mark: Callable[[], str],
) -> OpenedParts:  # fmt: skip
    """Return the parts of a tier over `tiers`, which messages call `names`. Blocks. Raises as
    `ChunkedTier.open`."""
    if not tiers:
        raise ConfigError(f"{options.scheme} needs at least one inner tier")
    shares = options.shares or (1,) * len(tiers)
    if len(shares) != len(tiers):
        raise ConfigError(f"{tier_name}: {len(shares)} shares for {len(tiers)} inner tiers")
    found = _found_index(tiers, names, tier_name)
    index = found or Index(
        number=0,
        mark=new_mark(),
        scheme=options.scheme,
        chunk_nbytes=options.chunk_nbytes or DEFAULT_CHUNK_NBYTES,
        num_inner=len(tiers),
        next_generation=0,
    )
    _require_same_settings(index, options, tiers, tier_name)
    capabilities = derived_capabilities(
        tiers,
        tier_name=tier_name,
        chunk_nbytes=index.chunk_nbytes,
        needs_host=options.is_checked,
    )
    next_generation = _reclaim(tiers, names, index, tier_name)
    inners = InnerTiers(
        tiers, names=names, tier_name=tier_name, shares=shares, mark=index.mark,
        next_generation=next_generation,
    )  # fmt: skip
    codecs = _codecs_for(index, options.codec)
    return _assembled(inners, index, options, codecs=codecs, tier_name=tier_name,
                      capabilities=capabilities)  # fmt: skip


def _assembled(
    inners: InnerTiers, index: Index, options: ChunkedOptions, *, codecs: Mapping[str, Codec],
    tier_name: str, capabilities: TierCapabilities,
) -> OpenedParts:  # fmt: skip
    meter = CodecMeter()
    table = ChunkTable(tier_name, chunk_nbytes=index.chunk_nbytes)
    committer = Committer(inners, tier_name=tier_name, committed=index)
    committer.adopt(table.restore(index))
    if not index.number:
        # From now on chunks without an index are another tier's, never garbage of ours.
        committer.write({})
        committer.conclude({}, succeeded=True)
    reader = ChunkReader(inners, codecs=codecs, meter=meter)
    scratch = Scratch(
        num_benches=options.num_threads, chunk_nbytes=index.chunk_nbytes, has_codec=bool(codecs)
    )
    machinery = Machinery(
        table=table,
        inners=inners,
        reader=reader,
        writer=ChunkWriter(inners, reader, options=options, meter=meter),
        committer=committer,
        scratch=scratch,
    )
    num_threads = options.num_threads
    scheduler = TransferScheduler(
        ChunkMaker(machinery),
        tier_name=tier_name,
        num_threads=num_threads,
        window=WINDOW if codecs else _window(capabilities.max_in_flight, num_threads),
        finds_room_late=True,
    )
    return OpenedParts(
        tier_name=tier_name,
        capabilities=capabilities,
        machinery=machinery,
        scheduler=scheduler,
        meter=meter,
    )


def _window(max_in_flight: int, num_threads: int) -> int:
    """Return how many chunks a worker keeps in flight: twice what keeps the tiers busy."""
    return min(max(2, -(-2 * max_in_flight // num_threads)), _MAX_WINDOW)


def _found_index(tiers: Sequence[Tier], names: Sequence[str], tier_name: str) -> Index | None:
    """Return the committed index, None if the tiers are new; discard what a probe left.

    Raises ConfigError if they hold something but no index, or are in another order.
    """
    with explained(f"{tier_name}: opening"):
        for tier in tiers:
            if PROBE_KEY in set(tier.keys()):
                tier.discard(PROBE_KEY)
    for name, tier in zip(names[1:], tiers[1:], strict=True):
        if any(index_number(key) is not None for key in set(tier.keys())):
            raise ConfigError(
                f"{tier_name}: {name} holds the index of a tier, which lies on its first one; name "
                "the inner tiers in the order they had before"
            )
    held = [(name, k) for name, tier in zip(names, tiers, strict=True) for k in set(tier.keys())]
    try:
        index = load_index(tiers[FIRST], what=f"{tier_name}: {names[FIRST]}")
    except CorruptDataError:
        if held != [(names[FIRST], index_key(1))]:
            raise
        # The first open was cut short while it wrote the index of an empty tier.
        tiers[FIRST].discard(index_key(1))
        return None
    if index is None and held:
        raise _foreign(f"{tier_name}: {held[0][0]}", held[0][1])
    return index


def _require_same_settings(
    index: Index, options: ChunkedOptions, tiers: Sequence[Tier], tier_name: str
) -> None:
    given = options.chunk_nbytes or index.chunk_nbytes
    for what, written, now in (
        ("scheme", index.scheme, options.scheme),
        ("number of inner tiers", index.num_inner, len(tiers)),
        ("chunk_nbytes", index.chunk_nbytes, given),
    ):
        if written != now:
            raise ConfigError(
                f"{tier_name}: was written with {what} {written}, not {now}; open it as it was "
                "written, or use empty inner tiers"
            )


def _reclaim(tiers: Sequence[Tier], names: Sequence[str], index: Index, tier_name: str) -> int:
    """Give back chunks that `index` does not name; return a generation later than all of them.

    Raises CorruptDataError if a chunk that it names is not there, ConfigError for another tier's;
    nothing was given back then.
    """
    wanted: list[dict[TensorKey, int]] = [{} for _ in tiers]
    for entry in index.entries:
        for number, chunk in enumerate(entry.chunks):
            chunk_name = ChunkName(
                key=entry.key, index=number, generation=chunk.generation, mark=index.mark
            )
            wanted[chunk.inner][chunk_name.inner_key] = chunk.room_nbytes
    left_over = []
    for name, tier, keys in zip(names, tiers, wanted, strict=True):
        surplus = _surplus(tier, keys, index=index, what=f"{tier_name}: {name}")
        left_over.append(surplus)
    with explained(f"{tier_name}: giving back what a killed process left"):
        for tier, chunk_names in zip(tiers, left_over, strict=True):
            for chunk_name in chunk_names:
                tier.discard(chunk_name.inner_key)
        if index.number and remove_indexes(tiers[FIRST], keep=index.number):
            tiers[FIRST].flush().wait()
    generations = [chunk_name.generation + 1 for found in left_over for chunk_name in found]
    return max([index.next_generation, *generations])


def _surplus(
    tier: Tier, wanted: Mapping[TensorKey, int], *, index: Index, what: str
) -> list[ChunkName]:
    """Return the chunks of ours on `tier` that are not `wanted`, after checking all that are;
    `what` names it. The index, which only the first tier can hold by now, is passed over."""
    found = set(tier.keys())
    for key, nbytes in wanted.items():
        if key not in found or tier.stat(key).nbytes != nbytes:
            raise CorruptDataError(
                f"{what} holds no chunk {key} of {nbytes} bytes, which the index of commit "
                f"{index.number} names; name the inner tiers it was written with, in their order, "
                "or restore them from a copy"
            )
    surplus = []
    for key in found - set(wanted):
        if index_number(key) is not None:
            continue
        name = ChunkName.parse(key)
        if name is None or name.mark != index.mark:
            raise _foreign(what, key)
        surplus.append(name)
    return surplus


def _foreign(what: str, key: TensorKey) -> ConfigError:
    return ConfigError(
        f"{what} holds {key}, which this tier did not write; open what wrote it, or use an empty "
        "inner tier"
    )


def _codecs_for(index: Index, own: Codec | None) -> dict[str, Codec]:
    """Return every codec that is needed to read what is stored."""
    names = {
        chunk.content.codec
        for entry in index.entries
        for chunk in entry.chunks
        if chunk.content is not None and chunk.content.codec
    }
    codecs = {} if own is None else {own.name: own}
    return codecs | {name: codec_named(name) for name in names - set(codecs)}
