"""Committer: writes manifests and knows which versions the one on disk refers to."""

from __future__ import annotations

from collections.abc import Iterable

from zinf_core.runtime.manifest import Manifest, parse, publish, serialize, stage
from zinf_storage.nvme.folder import Folder
from zinf_storage.nvme.manifest_room import ManifestRoom
from zinf_storage.nvme.pages import Page, Snapshot, entry_of
from zinf_storage.nvme.posix import io_error
from zinf_storage.nvme.segments import SegmentStore
from zinf_storage.nvme.syscalls import SystemCalls

Captured = dict[Page, Snapshot]


class Committer:
    """Makes captured versions durable, one commit at a time.

    `write` runs in a worker without the tier's lock; everything else is called under it.
    """

    def __init__(
        self, folder: Folder, segments: SegmentStore, room: ManifestRoom, *, tier_name: str,
        calls: SystemCalls,
    ) -> None:  # fmt: skip
        """Start without a commit; see `adopt`."""
        self._folder = folder
        self._segments = segments
        self._room = room
        self._tier_name = tier_name
        self._calls = calls
        self._generation = 0
        self._segments_named: set[int] = set()
        self._pinned: list[Snapshot] = []
        """Versions that a manifest on disk may refer to."""
        self._in_doubt: set[int] | None = None
        """Segments named by the commit that runs, once it may have replaced the manifest."""

    def load(self) -> Manifest | None:
        """Return the manifest on disk, None if there is none. Blocks. Raises CorruptDataError."""
        path = self._folder.manifest_path
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as exc:
            what = f"{self._tier_name}: reading the manifest"
            raise io_error(exc, what, path, needed=0, calls=self._calls) from exc
        return parse(data, path=str(path))

    def adopt(self, manifest: Manifest, snapshots: Iterable[Snapshot]) -> None:
        """Go on from the manifest on disk, whose versions are pinned by `snapshots`."""
        self._generation = manifest.generation
        self._segments_named = {segment.number for segment in manifest.segments}
        self._pinned = list(snapshots)

    def write(self, captured: Captured) -> None:
        """Make `captured` durable and replace the manifest. Blocks.

        Raises TransferError, TierFullError; a crash then still leaves this or the last manifest,
        and the versions of both stay pinned until one is known to have gone.
        """
        self._in_doubt = None
        self._segments.sync()
        manifest = Manifest(
            generation=self._generation + 1,
            segments=self._segments.manifest_segments(),
            entries=tuple(entry_of(page.key, snapshot) for page, snapshot in captured.items()),
        )
        data = serialize(manifest)
        path = self._folder.manifest_path
        try:
            with self._room.in_use():
                staged = stage(path, data, calls=self._calls)
                self._in_doubt = {segment.number for segment in manifest.segments}
                publish(staged, path, calls=self._calls)
        except OSError as exc:
            what = f"{self._tier_name}: commit of {len(captured)} keys"
            raise io_error(exc, what, path, needed=len(data), calls=self._calls) from exc

    def conclude(self, captured: Captured, *, succeeded: bool) -> list[Snapshot]:
        """Take note of how `write` ended; return the snapshots whose pins are to be dropped."""
        snapshots = list(captured.values())
        if self._in_doubt is None:
            return snapshots
        self._generation += 1
        self._segments_named |= self._in_doubt
        if not succeeded:
            self._pinned += snapshots
            return []
        dropped, self._pinned = self._pinned, snapshots
        return dropped

    def named_segments(self) -> set[int]:
        """Return the segments that the manifest on disk may name."""
        return set(self._segments_named)
