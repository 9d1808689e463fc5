"""Time limits: what a broken tier makes hang fails, and the failure says where it stands."""

from __future__ import annotations

import functools
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Concatenate, Final, ParamSpec, TypeVar, cast

from zinf_core.completion import Completion

if TYPE_CHECKING:
    from zinf_core.testing.bench import Bench

_P = ParamSpec("_P")
_T = TypeVar("_T")
_NUM_FRAMES: Final = 6
THREAD_NAME: Final = "kit: "
"""What the names of the kit's own threads begin with."""


def within_limit(
    check: Callable[Concatenate[Bench, _P], None],
) -> Callable[Concatenate[Bench, _P], None]:
    """Return `check`, on a thread of its own that may take `Bench.limit_s` seconds."""

    @functools.wraps(check)
    def limited(bench: Bench, *args: _P.args, **kwargs: _P.kwargs) -> None:
        call = functools.partial(check, bench, *args, **kwargs)
        run_limited(call, limit_s=bench.limit_s, what=f"the check {check.__name__}")

    return cast("Callable[Concatenate[Bench, _P], None]", limited)  # pytest names all arguments


def wait_limited(completion: Completion, *, timeout_s: float) -> None:
    """Wait for `completion`. Raises as its `wait`; AssertionError if that ignores `timeout_s`."""
    call = functools.partial(completion.wait, timeout_s=timeout_s)
    run_limited(call, limit_s=2 * timeout_s, what=f"wait(timeout_s={timeout_s})")


def run_limited(call: Callable[[], _T], *, limit_s: float, what: str) -> _T:
    """Run `call` on a thread of its own; return what it returned, or raise what it raised.

    Raises AssertionError, with the place where the thread stands, if that takes longer than
    `limit_s` seconds. The thread is left behind: nothing can end it but what it waits for.
    """
    results: list[_T] = []
    run_together([lambda: results.append(call())], limit_s=limit_s, what=what)
    return results[0]


def run_together(calls: Sequence[Callable[[], object]], *, limit_s: float, what: str) -> None:
    """Run `calls` on a thread each, begun together; raise what failed first.

    Raises AssertionError as `run_limited` if that takes longer than `limit_s` seconds in all.
    """
    start = threading.Barrier(len(calls))
    failures: list[BaseException] = []
    threads = [
        threading.Thread(target=_run, args=(call, start, failures), name=f"{THREAD_NAME}{what}")
        for call in calls
    ]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + limit_s
    for thread in threads:
        thread.join(max(deadline - time.monotonic(), 0.0))
    if failures:
        raise failures[0]
    for thread in threads:
        if thread.is_alive():
            raise AssertionError(
                f"{what} has not ended after {limit_s} s; it stands here:\n{_place_of(thread)}"
            )


def _run(
    call: Callable[[], object], start: threading.Barrier, failures: list[BaseException]
) -> None:
    try:
        start.wait()
        call()
    except BaseException as exc:  # noqa: BLE001 - raised by who started the thread
        failures.append(exc)


def _place_of(thread: threading.Thread) -> str:
    """Return the innermost calls of `thread`."""
    frame = sys._current_frames().get(thread.ident or 0)  # noqa: SLF001 - the documented way
    return "".join(traceback.format_stack(frame)[-_NUM_FRAMES:]) if frame is not None else "?"
