"""Bucket: the objects below one prefix of a store. The only module that imports obstore."""

from __future__ import annotations

import contextlib
import datetime
import errno
import ipaddress
import os
import urllib.parse
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, Final

from zinf_core.errors import ConfigError, TransferError
from zinf_core.units import KiB
from zinf_storage.folders import folder_path, make_folder, remove_empty
from zinf_storage.object_store.failures import failure_of, is_no_bucket
from zinf_storage.object_store.names import is_ours
from zinf_storage.object_store.options import Connection

STREAM_NBYTES: Final = 256 * KiB
"""Bytes that are copied at a time from a response into the caller's memory."""

_ENDPOINT_KEYS: Final = {"s3": "endpoint", "gcs": "base_url", "azure": "endpoint"}
_MAX_DELETED: Final = 1000


class Bucket:
    """Objects by name, each written once, read whole or by range, and deleted. Every call blocks.

    Thread-safe, and safe to call from many threads at once. Raises TransferError for what the
    service, the network or the file system refuses, TierFullError when there is no room. Scratch
    memory: about four times `STREAM_NBYTES` for each call under way.
    """

    def __init__(
        self, client: ModuleType, store: Any, *, url: str, kind: str, folder: Path | None = None,
        made: tuple[Path, ...] = (),
    ) -> None:  # fmt: skip
        """Take over an obstore store, and the folders `made` for it; use `open_bucket`."""
        self._client = client
        self._store = store
        self.url = url
        """The prefix, for messages and for people who look at it with other tools."""
        self.kind = kind
        """``s3``, ``gcs``, ``azure``, ``local`` or ``memory``."""
        self._folder = folder
        self._made = made

    @property
    def is_persistent(self) -> bool:
        """Whether the objects outlive this object."""
        return self.kind != "memory"

    def url_of(self, name: str) -> str:
        """Return where an object lies, for messages."""
        return f"{self.url}/{name}"

    def put(self, name: str, data: memoryview | bytes, *, doing: str) -> None:
        """Store `data` under `name`, which no object has, from the memory it is in. Atomic."""
        with self._failures(doing, name):
            self._put(name, data, "overwrite")

    def create(self, name: str, data: bytes, *, doing: str) -> bool:
        """Store `data` under `name` unless there is an object of that name already; return
        whether that worked. Where the store has no such condition it always does."""
        try:
            with self._failures(doing, name):
                self._put(name, data, "create")
        except FileExistsError:
            # A repeated request meets what its first try stored.
            return self.get(name, doing=doing) == data
        return True

    def read_into(self, name: str, view: memoryview, *, offset: int, doing: str) -> int | None:
        """Fill `view` (not empty) from byte `offset` of an object; return the bytes the object
        has. None, or a number too small, mean that the view was not filled."""
        end = offset + len(view)
        try:
            with self._failures(doing, name):
                found = self._client.get(self._store, name, options={"range": (offset, end)})
                nbytes = int(found.meta["size"])
                if nbytes < end:
                    return nbytes
                filled = 0
                for chunk in found.stream(min_chunk_size=STREAM_NBYTES):
                    view[filled : filled + len(chunk)] = chunk
                    filled += len(chunk)
        except FileNotFoundError:
            return None
        if filled != len(view):
            raise TransferError(
                errno.EIO,
                f"{doing} failed: {self.url_of(name)}: {filled} bytes came for the range "
                f"[{offset}, {end})",
            )
        return nbytes

    def get(self, name: str, *, doing: str) -> bytes | None:
        """Return all bytes of a small object, None if there is none of that name."""
        try:
            with self._failures(doing, name):
                return bytes(self._client.get(self._store, name).bytes())
        except FileNotFoundError:
            return None

    def names(self, folder: str, *, doing: str) -> dict[str, int]:
        """Return name -> bytes of the objects in `folder` that have names a tier gives; those of
        somebody else do not exist for us."""
        with self._failures(doing, folder):
            pages = self._client.list(self._store, prefix=folder)
            sizes = {item["path"]: int(item["size"]) for page in pages for item in page}
        return {name: nbytes for name, nbytes in sizes.items() if is_ours(name)}

    def delete(self, names: Iterable[str], *, doing: str) -> None:
        """Delete objects; those that are not there are no matter."""
        rest = list(names)
        while rest:
            batch, rest = rest[:_MAX_DELETED], rest[_MAX_DELETED:]
            try:
                with self._failures(doing, batch[0]):
                    self._client.delete(self._store, batch)
            except FileNotFoundError:
                # Of several, some were deleted and the first missing one was reported.
                self._delete_one_by_one(batch, doing)

    def tidy(self, folders: Iterable[str]) -> None:
        """Remove what a local file system keeps of `folders` without objects, and of the folders
        that `open_bucket` made. Services keep none."""
        if self._folder is None:
            return
        for folder in folders:
            with contextlib.suppress(OSError):  # somebody's files are in it, or it never was
                (self._folder / folder).rmdir()
        remove_empty(self._made)

    def make_durable(self, names: Iterable[str], *, doing: str) -> None:
        """See that the objects survive a power cut. Services did so before they answered."""
        if self._folder is None:
            return
        folders = {self._folder}
        for name in names:
            path = self._folder / name
            with self._failures(doing, name):
                _sync(path)
            folders.add(path.parent)
        with self._failures(doing, ""):
            for folder in folders:
                _sync(folder)

    def _put(self, name: str, data: memoryview | bytes, mode: str) -> None:
        if self.kind == "memory":
            # That store keeps the very memory it is given.
            data = bytes(data)
        try:
            self._client.put(self._store, name, data, mode=mode, use_multipart=False)
        except self._client.exceptions.AlreadyExistsError as exc:
            raise FileExistsError(errno.EEXIST, self.url_of(name)) from exc
        except self._client.exceptions.NotSupportedError:
            self._client.put(self._store, name, data, use_multipart=False)

    def _delete_one_by_one(self, names: list[str], doing: str) -> None:
        for name in names:
            try:
                with self._failures(doing, name):
                    self._client.delete(self._store, name)
            except FileNotFoundError:
                continue

    @contextmanager
    def _failures(self, doing: str, name: str) -> Iterator[None]:
        """Let FileNotFoundError and FileExistsError of an object pass; map everything else."""
        try:
            yield
        except FileExistsError:
            raise
        except FileNotFoundError as exc:
            if not is_no_bucket(exc):
                raise
            raise failure_of(exc, doing=doing, url=self.url_of(name)) from exc
        except (self._client.exceptions.BaseError, OSError, ValueError) as exc:
            raise failure_of(exc, doing=doing, url=self.url_of(name)) from exc


def open_bucket(address: str, connection: Connection) -> Bucket:
    """Return the bucket at ``s3://bucket/prefix``, ``gs://bucket/prefix``,
    ``az://container/prefix``, ``file:///folder`` or ``memory:///prefix``.

    A folder is created if it is missing. Nothing is asked of a service yet. Raises ConfigError
    if obstore is missing or the address or a setting makes no sense, TransferError if a folder
    cannot be used.
    """
    client = _imported()
    scheme, separator, rest = address.partition("://")
    openers: dict[str, Callable[[ModuleType, str, Connection], Bucket]] = {
        "file": _opened_folder,
        "memory": _opened_memory,
    }
    if not separator or (scheme != "memory" and not rest.strip("/")):
        raise ConfigError(
            f"object://{address} names no store; write object://s3://bucket/prefix, gs://…, "
            "az://…, file:///folder or memory:///prefix"
        )
    opener = openers.get(scheme, _opened_service)
    return opener(client, address, connection)


def _imported() -> ModuleType:
    try:
        import obstore  # noqa: PLC0415 - optional
        import obstore.store  # noqa: PLC0415 - optional
    except ImportError as exc:
        raise ConfigError(f'object:// needs obstore; pip install "zinf[object]" ({exc})') from exc
    module: ModuleType = obstore
    return module


def _opened_folder(client: ModuleType, address: str, connection: Connection) -> Bucket:
    _refuse_service_settings(address, connection)
    folder = Path(address.removeprefix("file://"))
    if not folder.is_absolute():
        raise ConfigError(f"object://{address}: write file:///absolute/folder, three slashes")
    made: tuple[Path, ...] = ()
    try:
        folder_path(folder)
        made = make_folder(folder)
        store = client.store.LocalStore(folder)
    except (OSError, client.exceptions.BaseError) as exc:
        remove_empty(made)
        raise failure_of(exc, doing="open", url=address) from exc
    return Bucket(client, store, url=f"file://{folder}", kind="local", folder=folder, made=made)


def _opened_memory(client: ModuleType, address: str, connection: Connection) -> Bucket:
    _refuse_service_settings(address, connection)
    return Bucket(client, client.store.MemoryStore(), url=address.rstrip("/"), kind="memory")


def _opened_service(client: ModuleType, address: str, connection: Connection) -> Bucket:
    url = urllib.parse.quote(address.rstrip("/"), safe=":/@._-~")
    try:
        kind = client.parse_scheme(url)
    except (client.exceptions.BaseError, ValueError) as exc:
        raise ConfigError(f"object://{address}: {exc}") from exc
    if kind not in _ENDPOINT_KEYS:
        raise ConfigError(f"object://{address}: {kind} is no store that can be written")
    config: dict[str, object] = {}
    if connection.endpoint is not None:
        config[_ENDPOINT_KEYS[kind]] = connection.endpoint
    if connection.region is not None:
        if kind != "s3":
            raise ConfigError(f"object://{address}: region is a setting of s3:// only")
        config["region"] = connection.region
    timeout = datetime.timedelta(seconds=connection.timeout_s)
    try:
        store = client.store.from_url(
            url,
            config=config,
            client_options={"allow_http": _may_use_http(connection), "timeout": timeout},
            retry_config={
                "max_retries": connection.retries,
                "retry_timeout": timeout * (connection.retries + 1),
            },
        )
    except (client.exceptions.BaseError, ValueError) as exc:
        raise ConfigError(f"object://{address} cannot be opened: {exc}") from exc
    return Bucket(client, store, url=address.rstrip("/"), kind=kind)


def _refuse_service_settings(address: str, connection: Connection) -> None:
    default = Connection()
    for setting in ("endpoint", "region", "allow_http"):
        if getattr(connection, setting) != getattr(default, setting):
            raise ConfigError(f"object://{address}: {setting} is a setting of services only")


def _may_use_http(connection: Connection) -> bool:
    """Return whether plain HTTP may be used. Raises ConfigError where it would need to be, and
    nobody allowed it."""
    endpoint = connection.endpoint
    if endpoint is None or not endpoint.startswith("http://") or connection.allow_http:
        return connection.allow_http
    host = urllib.parse.urlsplit(endpoint).hostname or ""
    if _is_loopback(host):
        return True
    raise ConfigError(
        f"endpoint {endpoint} is not encrypted; write https:// or add allow_http=1 if bytes may "
        "be read on their way"
    )


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
