"""HardwareProfile: what was measured on a drive of this machine, kept for every later run.

One small JSON file per machine and file system, under the user's cache folder
(``$XDG_CACHE_HOME/zinf/profiles``). Its name is a hash of the machine's id and the file system's;
neither the name nor the contents tell a path, a host or a user.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import platform
import tempfile
import warnings
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Final

from zinf_core.errors import ConfigError
from zinf_storage.nvme import NvmeOptions

_SCHEMA: Final = 1
_MACHINE_IDS: Final = (Path("/etc/machine-id"), Path("/var/lib/dbus/machine-id"))
_MAX_THREADS: Final = 1024
_AGAIN: Final = "measure again with: zinf bench tiers"
TUNED_FIELDS: Final = frozenset({"io_nbytes", "num_threads"})


@dataclass(frozen=True, slots=True, kw_only=True)
class BestRequest:
    """The smallest way to use a tier that is about as fast as any."""

    nbytes: int
    """Bytes of a request."""
    depth: int
    """Requests in flight."""
    bytes_per_s: float
    p50_s: float
    """Median latency of a request."""
    p99_s: float

    def __post_init__(self) -> None:
        """Refuse what cannot have been measured."""
        if self.nbytes < 1 or self.depth < 1:
            raise ConfigError(f"a request of {self.nbytes} bytes at depth {self.depth}")
        if not 0 < self.bytes_per_s < 1e15 or not 0 <= self.p50_s <= self.p99_s:
            raise ConfigError(f"{self.bytes_per_s} bytes/s in {self.p50_s} to {self.p99_s} s")


@dataclass(frozen=True, slots=True, kw_only=True)
class HardwareProfile:
    """One drive of one machine."""

    zinf: str
    """Version that measured."""
    date: str
    """UTC, ISO 8601."""
    filesystem: str
    """Type, e.g. ``"ext4"``."""
    path_taken: str
    """How bytes travelled, e.g. ``"posix-direct"``."""
    io_nbytes: int
    """Best NvmeOptions.io_nbytes."""
    num_threads: int
    """Best NvmeOptions.num_threads."""
    read: BestRequest
    write: BestRequest
    mixed: BestRequest | None = None
    """None if not measured."""
    h2d_bytes_per_s: float | None = None
    """Host to device; None without a device, or if it was not measured."""
    d2h_bytes_per_s: float | None = None
    """Device to host."""

    def __post_init__(self) -> None:
        """Refuse options that NvmeOptions would refuse, so that a damaged file never gets there."""
        NvmeOptions(io_nbytes=self.io_nbytes, num_threads=self.num_threads)
        if self.num_threads > _MAX_THREADS:
            raise ConfigError(f"num_threads = {self.num_threads} is more than {_MAX_THREADS}")


def load_profile(folder: Path, *, cache: Path | None = None) -> HardwareProfile | None:
    """Return what was measured on the drive of `folder`, which need not exist yet; None if nothing.

    Reads one small file. A damaged file, or one of another schema, is ignored with a warning.
    `cache` is the folder of the profiles; None for the user's.
    """
    path = profile_path(folder, cache=cache)
    if path is None:
        return None
    try:
        text = path.read_text(encoding="utf-8")
    except (FileNotFoundError, NotADirectoryError):  # service users have /dev/null for a home
        return None
    except (OSError, UnicodeDecodeError) as exc:
        _warn_ignored(path, str(exc))
        return None
    try:
        return _decoded(json.loads(text))
    except (ValueError, TypeError, KeyError) as exc:
        _warn_ignored(path, str(exc))
        return None


def save_profile(profile: HardwareProfile, folder: Path, *, cache: Path | None = None) -> Path:
    """Keep `profile` for the drive of `folder`, replacing the one before; return its file.

    A reader sees the old or the new one, never a part. Raises ConfigError if it cannot be written.
    """
    path = profile_path(folder, cache=cache)
    if path is None:
        raise ConfigError("there is no home folder to keep a profile in; set XDG_CACHE_HOME")
    data = {"schema": _SCHEMA, **dataclasses.asdict(profile)}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(
            "w", encoding="utf-8", dir=path.parent, prefix=".profile-", delete=False
        ) as file:
            file.write(json.dumps(data, indent=1) + "\n")
        os.replace(file.name, path)  # noqa: PTH105 - Path.replace does the same to a str less clearly
    except OSError as exc:
        raise ConfigError(
            f"the profile cannot be kept at {path}: {exc.strerror}; set XDG_CACHE_HOME to a folder "
            "you may write to"
        ) from exc
    return path


def tuned_options(
    folder: Path,
    base: NvmeOptions,
    *,
    given: AbstractSet[str] = frozenset(),
    cache: Path | None = None,
) -> NvmeOptions:
    """Return `base` with the request size and threads that are best on the drive of `folder`.

    `given` names the fields that the user chose: they stay as they are, and so do those of `base`
    that are not the defaults. Without a profile that is all of them. Raises ConfigError for a name
    that is not a field.
    """
    unknown = sorted(given - {field.name for field in fields(NvmeOptions)})
    if unknown:
        raise ConfigError(f"NvmeOptions has no field {unknown[0]!r}")
    default = NvmeOptions()
    untouched = {
        name for name in TUNED_FIELDS - given if getattr(base, name) == getattr(default, name)
    }
    profile = load_profile(folder, cache=cache) if untouched else None
    if profile is None:
        return base
    return replace(base, **{name: getattr(profile, name) for name in untouched})


def profile_path(folder: Path, *, cache: Path | None = None) -> Path | None:
    """Return the file for the drive of `folder`; None if there is no home folder to keep it in.

    The same after a reboot, and for every folder of one file system.
    """
    cache = _user_cache() if cache is None else cache
    if cache is None:
        return None
    identity = f"zinf profile {_machine_id()} {_filesystem_id(folder)}"
    return cache / f"{hashlib.sha256(identity.encode()).hexdigest()[:32]}.json"


def _user_cache() -> Path | None:
    given = os.environ.get("XDG_CACHE_HOME", "")
    if given and Path(given).is_absolute():
        return Path(given) / "zinf" / "profiles"
    try:
        return Path.home() / ".cache" / "zinf" / "profiles"
    except RuntimeError:
        return None


def _machine_id() -> str:
    for path in _MACHINE_IDS:
        try:
            text = path.read_text(encoding="ascii").strip()
        except (OSError, UnicodeDecodeError):
            continue
        if text:
            return text
    return platform.node()


def _filesystem_id(folder: Path) -> str:
    """Return a number that the file system of `folder` keeps over reboots, where it has one."""
    folder = folder.absolute()
    while not _exists(folder) and folder != folder.parent:
        folder = folder.parent
    fsid = os.statvfs(folder).f_fsid
    return f"{fsid:x}" if fsid else f"device {folder.stat().st_dev:x}"


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:  # a name that is too long, or a parent that may not be looked into
        return False


def _decoded(data: Any) -> HardwareProfile:
    """Return the profile in `data`. Raises ConfigError, TypeError or KeyError if it is none."""
    if not isinstance(data, dict) or data.get("schema") != _SCHEMA:
        raise ConfigError("it is of another version")
    wanted = {field.name: field.type for field in fields(HardwareProfile)}
    values = {name: data[name] for name in wanted}
    for name, value in values.items():
        _require_type(name, value)
    for name in ("read", "write", "mixed"):
        if values[name] is not None:
            values[name] = BestRequest(**values[name])
    return HardwareProfile(**values)


def _require_type(name: str, value: object) -> None:
    kinds: dict[str, tuple[type, ...]] = {
        "io_nbytes": (int,),
        "num_threads": (int,),
        "read": (dict,),
        "write": (dict,),
        "mixed": (dict, type(None)),
        "h2d_bytes_per_s": (int, float, type(None)),
        "d2h_bytes_per_s": (int, float, type(None)),
    }
    if not isinstance(value, kinds.get(name, (str,))) or isinstance(value, bool):
        raise ConfigError(f"{name} = {value!r}")


def _warn_ignored(path: Path, reason: str) -> None:
    warnings.warn(
        f"hardware profile {path} is ignored: {reason}; {_AGAIN}", RuntimeWarning, stacklevel=3
    )
