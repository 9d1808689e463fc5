"""Scratch: where a tier is measured, so that nothing of anybody's is touched and nothing stays."""

from __future__ import annotations

import shutil
import tempfile
import urllib.parse
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from zinf_core.errors import BudgetError, ConfigError
from zinf_core.registry import TierUrl, tier_schemes
from zinf_core.tier import Tier
from zinf_core.units import format_nbytes
from zinf_storage.machine import read_memory

_FILE_PREFIX = "file://"
"""Object stores of local folders write theirs as a URL in the URL."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scratch:
    """What to open instead of the URL that was asked for."""

    url: str
    candidates: tuple[Path, ...]
    """Paths in the URL. Which of them are local shows once the tier is open, see `local_paths`."""

    def local_paths(self) -> tuple[Path, ...]:
        """Return the files and folders of the opened tier, as far as its URL names them."""
        return tuple(path for path in self.candidates if path.exists())

    def drives(self) -> tuple[Path, ...]:
        """Return existing folders on the drives that the tier will write to."""
        local = (path for path in self.candidates if path.is_absolute() or path.exists())
        return tuple(dict.fromkeys(existing_folder(path) for path in local))


def require_scheme(url: str) -> TierUrl:
    """Return the parts of `url`. Raises ConfigError unless it, and every URL inside it, is of a
    scheme that an installed package offers."""
    parsed = TierUrl.parse(url)
    known = tier_schemes()
    if parsed.scheme not in known:
        raise ConfigError(
            f"no installed package offers {parsed.scheme}:// tiers; available: {', '.join(known)}"
        )
    for inner in parsed.inner:
        require_scheme(inner)
    return parsed


def format_url(url: TierUrl) -> str:
    """Return the text that `TierUrl.parse` makes `url` from."""
    inner = "".join(f"[{text}]" for text in url.inner)
    query = urllib.parse.urlencode(url.options, safe=":/", quote_via=urllib.parse.quote)
    path = urllib.parse.quote(url.path, safe="/:.")
    return f"{url.scheme}://{inner}{path}{'?' if query else ''}{query}"


@contextmanager
def scratch_of(url: str) -> Iterator[Scratch]:
    """Return a place to measure `url` in, and delete it on leaving.

    A folder that exists is not touched: a new one inside it is used. What does not exist yet is
    created by the tier and deleted afterwards, and so are parents that were created with it and
    are empty; a file that exists (a data base) is used as it is. Raises ConfigError if a folder
    cannot be written.
    """
    made: list[Path] = []
    paths: list[Path] = []
    absent: list[Path] = []
    try:
        moved = _moved(url, made, paths)
        absent += map(_first_absent, made)
        yield Scratch(url=moved, candidates=tuple(paths))
    finally:
        for path in made:
            _delete(path)
        for path, top in zip(made, absent, strict=False):
            _delete_empty_parents(path, top)


def existing_folder(path: Path) -> Path:
    """Return `path`, or the deepest of its parents that is a folder."""
    path = path.absolute()
    while not path.is_dir():
        path = path.parent
    return path


def require_disk(scratch: Scratch, nbytes: int, *, url: str) -> None:
    """Raise BudgetError unless each drive has `nbytes` free, or does not count its blocks."""
    for folder in scratch.drives():
        usage = shutil.disk_usage(folder)
        free = usage.free
        if usage.total and free < nbytes:
            raise BudgetError(
                f"{url}: measuring needs {nbytes} bytes ({format_nbytes(nbytes)}), {folder} has "
                f"{free} ({format_nbytes(free)}); free some, name another folder or lower --size"
            )


def require_memory(nbytes: int, *, url: str) -> None:
    """Raise BudgetError unless the machine has `nbytes` of memory available."""
    memory = read_memory()
    limit = memory.cgroup_limit_nbytes or memory.available_nbytes
    available = min(memory.available_nbytes, limit)
    if available < nbytes:
        raise BudgetError(
            f"{url}: measuring needs {nbytes} bytes ({format_nbytes(nbytes)}) of memory, "
            f"{available} ({format_nbytes(available)}) are available; lower --size"
        )


def require_capacity(tier: Tier, nbytes: int, *, url: str) -> None:
    """Raise BudgetError unless `tier` says it has room for `nbytes`, or does not say."""
    usage = tier.usage()
    if usage.capacity_nbytes is None:
        return
    free = usage.capacity_nbytes - usage.allocated_nbytes
    if free < nbytes:
        raise BudgetError(
            f"{url}: measuring needs {nbytes} bytes ({format_nbytes(nbytes)}), the tier has "
            f"{free} ({format_nbytes(free)}); raise its capacity or lower --size"
        )


def _moved(url: str, made: list[Path], paths: list[Path]) -> str:
    """Return `url` with fresh places; add them to `made` and all places to `paths`."""
    parsed = TierUrl.parse(url)
    if parsed.inner:
        inner = tuple(_moved(text, made, paths) for text in parsed.inner)
        return format_url(replace(parsed, inner=inner))
    if not parsed.path:
        return url
    prefix = _FILE_PREFIX if parsed.path.startswith(_FILE_PREFIX) else ""
    path = Path(parsed.path.removeprefix(prefix))
    if path.is_dir():
        path = _fresh_folder(path, url)
        made.append(path)
        url = format_url(replace(parsed, path=f"{prefix}{path.absolute()}"))
    elif not path.exists():
        top = _first_absent(path)
        if top.is_symlink():
            raise ConfigError(
                f"{url}: {top} is a link to {top.readlink()}, which does not exist; mount the "
                "drive, or name another folder"
            )
        made.append(path.absolute())
        if path.is_absolute():
            _require_writable(existing_folder(path), url)
    paths.append(path)
    return url


def _delete(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    elif path.exists():
        path.unlink()


def _delete_empty_parents(path: Path, top: Path) -> None:
    """Remove folders from above `path` up to `top`, as far as nobody put anything in them."""
    for parent in path.parents:
        if not parent.is_relative_to(top):
            return
        with suppress(OSError):
            parent.rmdir()


def _fresh_folder(folder: Path, url: str) -> Path:
    try:
        return Path(tempfile.mkdtemp(prefix=".zinf-bench-", dir=folder))
    except OSError as exc:
        raise ConfigError(
            f"{url}: cannot write in {folder}: {exc.strerror}; name a folder you may write to"
        ) from exc


def _require_writable(folder: Path, url: str) -> None:
    """Raise ConfigError unless a folder can be made in `folder`; permissions do not tell all."""
    _fresh_folder(folder, url).rmdir()


def _first_absent(path: Path) -> Path:
    path = path.absolute()
    while not path.parent.exists():
        path = path.parent
    return path
