"""Back doors to an object store tier: they read its manifest by themselves and its objects with
other code than the tier's."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any, Protocol

import msgpack
from s3_server import S3Server

from zinf_core.keys import TensorKey

HEADER_NBYTES = struct.calcsize("<8sIQ")
DIGEST_NBYTES = 16


class Door(Protocol):
    """The objects below one prefix."""

    def names(self) -> list[str]: ...

    def get(self, name: str) -> bytes: ...

    def put(self, name: str, data: bytes) -> None: ...


class FolderDoor:
    """The file system."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def names(self) -> list[str]:
        files = [path for path in self.folder.rglob("*") if path.is_file()]
        return [str(path.relative_to(self.folder)) for path in files]

    def get(self, name: str) -> bytes:
        return (self.folder / name).read_bytes()

    def put(self, name: str, data: bytes) -> None:
        (self.folder / name).write_bytes(data)


class S3Door:
    """boto3."""

    def __init__(self, server: S3Server, bucket: str, prefix: str) -> None:
        self.server, self.bucket, self.prefix = server, bucket, prefix + "/"

    def names(self) -> list[str]:
        found = self.server.names(self.bucket, self.prefix)
        return [name.removeprefix(self.prefix) for name in found]

    def get(self, name: str) -> bytes:
        return self.server.get(self.bucket, self.prefix + name)

    def put(self, name: str, data: bytes) -> None:
        self.server.client.put_object(Bucket=self.bucket, Key=self.prefix + name, Body=data)


def manifest_of(door: Door) -> dict[TensorKey, list[Any]]:
    """Return key -> its parts, each ``[object name, bytes, checksum]``, as of the last flush."""
    last = max(name for name in door.names() if name.startswith("manifests/"))
    body = door.get(last)[HEADER_NBYTES:-DIGEST_NBYTES]
    _, entries = msgpack.unpackb(body, unicode_errors="surrogatepass")
    return {TensorKey(*entry[:3]): entry[5] for entry in entries}


def peek(door: Door, key: TensorKey) -> bytes:
    """Return the bytes of `key` as of the last flush."""
    return b"".join(door.get(name) for name, _, _ in manifest_of(door)[key])


def poke(door: Door, key: TensorKey, data: bytes) -> None:
    """Replace the bytes of `key`, but not their checksums."""
    for name, nbytes, _ in manifest_of(door)[key]:
        door.put(name, data[:nbytes])
        data = data[nbytes:]
