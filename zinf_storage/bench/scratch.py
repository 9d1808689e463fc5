"""Scratch: where a tier is measured, so that nothing of anybody's is touched and nothing stays."""

from __future__ import annotations

import shutil
import urllib.parse
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from zinf_core.errors import BudgetError, ConfigError
from zinf_core.registry import TierUrl, tier_schemes
from zinf_core.tier import Tier
from zinf_core.units import format_nbytes
from zinf_storage.bench.fresh_folder import FreshFolder
from zinf_storage.folders import remove_empty
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

    A folder that exists is not touched: a new one inside it is used. In place of what does not
    exist yet, something of that name is used in a new folder inside the nearest parent that does.
    A file that exists (a data base) is used as it is. What killed runs left beside a new folder is
    deleted. Raises ConfigError if a folder cannot be written.
    """
    paths: list[Path] = []
    with ExitStack() as stack:
        moved = _moved(url, stack, paths)
        yield Scratch(url=moved, candidates=tuple(paths))


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


def _moved(url: str, stack: ExitStack, paths: list[Path]) -> str:
    """Return `url` with fresh places, which `stack` deletes; add all places to `paths`."""
    parsed = TierUrl.parse(url)
    if parsed.inner:
        inner = tuple(_moved(text, stack, paths) for text in parsed.inner)
        return format_url(replace(parsed, inner=inner))
    if not parsed.path:
        return url
    prefix = _FILE_PREFIX if parsed.path.startswith(_FILE_PREFIX) else ""
    path = Path(parsed.path.removeprefix(prefix))
    try:
        fresh = _fresh_place(path, url, stack)
    except OSError as exc:
        raise ConfigError(
            f"{url}: cannot write in {path}: {exc.strerror}; name a folder you may write to"
        ) from exc
    paths.append(fresh or path)
    return format_url(replace(parsed, path=f"{prefix}{fresh}")) if fresh else url


def _fresh_place(path: Path, url: str, stack: ExitStack) -> Path | None:
    """Return a place to use instead of `path`; None to use `path` itself, which may be none: then
    what comes to be there is deleted. Raises ConfigError, OSError."""
    if path.is_dir():
        return _fresh_folder(path, stack)
    if path.exists():
        return None
    missing = [path.absolute()]
    while not missing[-1].parent.exists():
        missing.append(missing[-1].parent)
    if missing[-1].is_symlink():
        raise ConfigError(
            f"{url}: {missing[-1]} is a link to {missing[-1].readlink()}, which does not exist; "
            "mount the drive, or name another folder"
        )
    if path.is_absolute():
        return _fresh_folder(existing_folder(path), stack) / path.name
    stack.callback(remove_empty, missing)
    stack.callback(_delete, path.absolute())
    return None


def _fresh_folder(parent: Path, stack: ExitStack) -> Path:
    fresh = FreshFolder(parent)
    stack.callback(fresh.remove)
    return fresh.path


def _delete(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    elif path.exists():
        path.unlink()
