"""What an object store said when it refused, as our errors. Pure text work; imports no client."""

from __future__ import annotations

import errno
import re
from typing import Final

from zinf_core.errors import TierFullError, TransferError

_DEBUG: Final = "\n\nDebug source"
"""What obstore puts between the message and its internals."""
_STATUS: Final = re.compile(r"status code: (\d{3})")
_OS_ERROR: Final = re.compile(r"Os \{\s*code: (\d+)")
_XML_CODE: Final = re.compile(r"<Code>([^<]*)</Code>")
_XML_MESSAGE: Final = re.compile(r"<Message>([^<]*)</Message>")
_QUERY: Final = re.compile(r"\?\S+")
_MAX_CHARS: Final = 300

_ERRNO_OF_STATUS: Final = {
    401: errno.EACCES,
    403: errno.EACCES,
    404: errno.ENOENT,
    408: errno.ETIMEDOUT,
    429: errno.EAGAIN,
    503: errno.EAGAIN,
    504: errno.ETIMEDOUT,
    507: errno.ENOSPC,
}
_CREDENTIAL_SOURCES: Final = (
    "169.254.169.254",
    "169.254.170.2",
    "latest/api/token",
    "latest/meta-data",
    "metadata.google.internal",
)
_FOLDER_TROUBLES: Final = frozenset(
    {
        errno.EACCES, errno.EEXIST, errno.ELOOP, errno.ENAMETOOLONG, errno.ENOENT, errno.ENOTDIR,
        errno.EPERM, errno.EROFS,
    }
)  # fmt: skip
_FOLDER_REMEDY: Final = "name a folder on a mounted drive that this user may write"
_REMEDIES: Final = {
    errno.EACCES: "check the credentials in the environment and what they may do there",
    errno.ENOENT: "create the bucket or correct the URL",
    errno.ETIMEDOUT: "raise timeout_s or lower part_nbytes",
    errno.EAGAIN: "the service is busy: lower num_threads or raise retries",
    errno.ECONNREFUSED: "nothing listens there: correct the endpoint",
}


def failure_of(error: Exception, *, doing: str, url: str) -> TransferError | TierFullError:
    """Return the error to raise for `error`, met while `doing` something with the object at
    `url`: what the service said in one line, its status, and a remedy if there is one."""
    text = str(error)
    number = (error.errno if isinstance(error, OSError) else None) or _errno_of(text)
    message = f"{doing} failed: {url}: {_said(text)}"
    if number in {errno.ENOSPC, errno.EDQUOT}:
        return TierFullError(number, f"{message}; free some room there")
    if any(source in text for source in _CREDENTIAL_SOURCES):
        remedy = (
            "no credentials were found; put them into the environment (AWS_ACCESS_KEY_ID and "
            "AWS_SECRET_ACCESS_KEY, GOOGLE_APPLICATION_CREDENTIALS, AZURE_STORAGE_ACCOUNT_KEY)"
        )
        return TransferError(errno.EACCES, f"{message}; {remedy}")
    remedy = _REMEDIES.get(number, "")
    if url.startswith("file://"):
        remedy = _FOLDER_REMEDY if number in _FOLDER_TROUBLES else ""
    return TransferError(number, f"{message}; {remedy}" if remedy else message)


def is_no_bucket(error: Exception) -> bool:
    """Return whether a "not found" is about the bucket, not about one object in it."""
    code = _XML_CODE.search(str(error))
    return code is not None and code[1] in {"NoSuchBucket", "ContainerNotFound"}


def _errno_of(text: str) -> int:
    status = _STATUS.search(text)
    if status is not None:
        return _ERRNO_OF_STATUS.get(int(status[1]), errno.EIO)
    system = _OS_ERROR.search(text)
    if system is not None:
        return int(system[1])
    return errno.ETIMEDOUT if "TimedOut" in text or "timed out" in text else errno.EIO


def _said(text: str) -> str:
    """Return the message alone, in one line, without queries, which may hold signatures."""
    head = _QUERY.sub("?…", text.partition(_DEBUG)[0])
    code, message = _XML_CODE.search(head), _XML_MESSAGE.search(head)
    status = _STATUS.search(head)
    if code is not None:
        parts = (f"HTTP {status[1]}" if status else "", code[1], message[1] if message else "")
        return ": ".join(filter(None, parts))
    line = " ".join(head.split())
    return line if len(line) <= _MAX_CHARS else line[:_MAX_CHARS] + "…"
