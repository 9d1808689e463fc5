"""Committer: puts manifests and knows which versions the ones in the bucket refer to."""

from __future__ import annotations

import errno
from collections.abc import Iterable

from zinf_core.errors import TierLockedError
from zinf_storage.object_store.bucket import Bucket
from zinf_storage.object_store.manifest import (
    FOLDER,
    Manifest,
    generation_of,
    manifest_name,
    parse,
    serialize,
)
from zinf_storage.object_store.pages import Page, Version, entry_of

Captured = dict[Page, Version]


class Committer:
    """Makes captured versions what the next open finds, one commit at a time.

    Each manifest has a name of its own and the highest one counts, so a request that arrives late
    replaces nothing. `write` runs in a worker without the tier's lock; everything else is called
    under it, or before there are workers.
    """

    def __init__(self, bucket: Bucket, *, tier_name: str) -> None:
        """Start without a commit; see `load` and `adopt`."""
        self._bucket = bucket
        self._tier_name = tier_name
        self._generation = 0
        self._names: list[str] = []
        """Manifests that may be in the bucket."""
        self._pinned: list[Version] = []
        """Versions that those may name."""
        self._in_doubt: str | None = None
        """Manifest of the commit that runs, once it may be there."""

    def load(self) -> Manifest | None:
        """Return the last manifest, None if there is none. Blocks.

        Raises CorruptDataError, TransferError.
        """
        doing = f"{self._tier_name}: reading the manifest"
        found = {generation_of(name): name for name in self._bucket.names(FOLDER, doing=doing)}
        generations = [generation for generation in found if generation is not None]
        if not generations:
            return None
        self._generation = max(generations)
        self._names = [found[generation] for generation in generations]
        name = found[self._generation]
        return parse(self._bucket.get(name, doing=doing) or b"", url=self._bucket.url_of(name))

    def adopt(self, versions: Iterable[Version]) -> None:
        """Go on from the manifest in the bucket, whose versions are pinned."""
        self._pinned = list(versions)

    def write(self, captured: Captured) -> None:
        """Put a manifest of `captured`. Blocks.

        Raises TransferError, TierFullError; the next open then finds this or the last commit, and
        the versions of both stay pinned until a later one succeeds. Raises TierLockedError if
        another process committed since the tier was opened.
        """
        self._in_doubt = None
        doing = f"{self._tier_name}: flush"
        parts = [part for version in captured.values() for part in filter(None, version.parts)]
        fresh = [part for part in parts if not part.is_durable]
        self._bucket.make_durable((part.name for part in fresh), doing=doing)
        manifest = Manifest(
            generation=self._generation + 1,
            entries=tuple(entry_of(page.key, version) for page, version in captured.items()),
        )
        name = manifest_name(manifest.generation)
        self._in_doubt = name
        if not self._bucket.create(name, serialize(manifest), doing=doing):
            self._in_doubt = None
            raise TierLockedError(
                errno.EAGAIN,
                f"{doing} failed: {self._bucket.url_of(name)} was put by another process; this "
                "tier was taken for dead and evicted: close it",
            )
        self._bucket.make_durable([name], doing=doing)
        for part in fresh:
            part.is_durable = True

    def conclude(self, captured: Captured, *, succeeded: bool) -> tuple[list[Version], list[str]]:
        """Take note of how `write` ended; return the versions to unpin and the manifests to
        delete."""
        versions = list(captured.values())
        if self._in_doubt is None:
            return versions, []
        self._generation += 1
        if not succeeded:
            self._pinned += versions
            self._names.append(self._in_doubt)
            return [], []
        dropped, self._pinned = self._pinned, versions
        superseded, self._names = self._names, [self._in_doubt]
        return dropped, superseded
