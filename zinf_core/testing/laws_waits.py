"""Checks of laws 4, 6 and 13 on waiting: for a short time, on other threads, several at once."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Final

from zinf_core.completion import Completion
from zinf_core.errors import TransferTimeoutError
from zinf_core.testing.bench import Bench, data_of, expect_bytes, key_of
from zinf_core.testing.limits import run_limited, run_together

_LARGE: Final = (1 << 20) + 5
_TIMEOUTS_S: Final = (0.0, 1e-4, 0.0, 1e-3)


def a_short_wait_tells_the_truth(bench: Bench) -> None:
    """Catches a wait that returns because its time is over, or raises although all is done."""
    data = data_of(_LARGE)
    bench.store(key_of(0), data)
    for i, timeout_s in enumerate(_TIMEOUTS_S):
        dst = bench.blank(_LARGE)
        read = bench.tier.read_into(key_of(0), dst)
        if _is_over(read, timeout_s):
            what = f"law 6: read whose wait(timeout_s={timeout_s}) returned"
            expect_bytes(bench.hooks.contents(dst), data, what)
        bench.wait(read)
        expect_bytes(bench.hooks.contents(dst), data, "law 6: read after a short wait")
        data = data_of(_LARGE, 1 + i)
        write = bench.tier.write_from(key_of(0), bench.buffer(data))
        if _is_over(write, timeout_s):
            what = f"law 4: write whose wait(timeout_s={timeout_s}) returned"
            bench.expect(key_of(0), data, what)
        bench.wait(write)
        bench.expect(key_of(0), data, "law 4: write after a short wait")
        flush = bench.tier.flush()
        _is_over(flush, timeout_s)
        bench.wait(flush)


def another_thread_may_wait(bench: Bench) -> None:
    """Catches completions tied to the thread that submitted them, or that serve one waiter only.

    Three threads wait for a transfer of a fourth at the same time, then once more, and one of
    them with little patience. A wait that does not end with its timeout fails.
    """
    bench.store(key_of(0), data_of(_LARGE))
    patience_s = bench.hooks.timeout_s
    for timeout_s in _TIMEOUTS_S:
        dst = bench.blank(_LARGE)
        submitted: list[Completion] = []

        def submit() -> None:
            submitted.append(bench.tier.read_into(key_of(0), dst))  # noqa: B023 - ends in the loop

        run_limited(submit, limit_s=2 * patience_s, what="read_into")
        (completion,) = submitted
        calls: list[Callable[[], object]] = [functools.partial(bench.wait, completion)] * 3
        calls.append(functools.partial(_is_over, completion, timeout_s))
        for _ in range(2):
            run_together(
                calls, limit_s=2 * patience_s, what=f"law 13: wait(timeout_s={patience_s})"
            )
        expect_bytes(bench.hooks.contents(dst), data_of(_LARGE), "law 13: wait elsewhere")


def _is_over(completion: Completion, timeout_s: float) -> bool:
    """Wait for `timeout_s`; return whether the transfer ended. It must say the same."""
    was_done = completion.done()
    try:
        completion.wait(timeout_s=timeout_s)
    except TransferTimeoutError as exc:
        if was_done:
            raise AssertionError(
                f"law 6: done() was True, and wait(timeout_s={timeout_s}) raised"
            ) from exc
        return False
    assert completion.done(), f"law 6: wait(timeout_s={timeout_s}) returned, and done() is False"
    return True
