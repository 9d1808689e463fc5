"""Errors of transfers, as completions keep them."""

from __future__ import annotations

import errno

from zinf_core.errors import TransferError


def without_frames(error: Exception) -> Exception:
    """Return `error` without tracebacks, whose frames would keep the caller's memory (law 6)."""
    link: BaseException | None = error
    while link is not None:
        link.__traceback__ = None
        link = link.__cause__ or link.__context__
    return error


def exiting(what: str) -> TransferError:
    """Return the error of something that no worker takes any more."""
    return TransferError(errno.ESHUTDOWN, f"{what} was dropped: the interpreter is exiting")
