"""Run a suite without pytest's command line: which of its tests does this tier fail, and how?"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from zinf_core.errors import ZinfError
from zinf_core.testing.bench import Bench
from zinf_core.testing.limits import run_limited
from zinf_core.testing.suite import TierSuite

_PREFIX = "test_"


def failures_of(suite: TierSuite, folder: Path, *, only: str = "") -> dict[str, str]:
    """Return the failed tests of `suite` and why, each run on a tier opened below `folder`.

    Names are those of the methods, with the parameter in brackets. `only` limits the run to names
    that start with it. Skipped tests count as passed. Needed where a tier is expected to fail:
    to try the suite itself, or a tier chosen at run time.
    """
    failures = {}
    for index, (name, check, arguments) in enumerate(_cases(suite, only)):
        place = folder / str(index)
        place.mkdir(parents=True)
        error = _run(suite, place, check, arguments)
        if error is not None:
            failures[name] = error
    return failures


def _cases(
    suite: TierSuite, only: str
) -> Iterator[tuple[str, Callable[..., None], dict[str, object]]]:
    for name in sorted(dir(suite)):
        if not name.startswith(_PREFIX + only.removeprefix(_PREFIX)):
            continue
        check = getattr(suite, name)
        marks = [mark for mark in getattr(check, "pytestmark", []) if mark.name == "parametrize"]
        if not marks:
            yield name, check, {}
        for mark in marks:
            for value in mark.args[1]:
                yield f"{name}[{value}]", check, {mark.args[0]: value}


def _run(
    suite: TierSuite, place: Path, check: Callable[..., None], arguments: dict[str, object]
) -> str | None:
    folder = place / "tier"
    folder.mkdir()
    try:
        bench = Bench(suite, folder, limit_s=suite.limit_s)
        if "tmp_path" in check.__annotations__:
            arguments = {**arguments, "tmp_path": place}
        try:
            check(bench, **arguments)
        finally:
            with contextlib.suppress(ZinfError):
                run_limited(bench.close, limit_s=suite.limit_s, what="close()")
    except pytest.skip.Exception:
        return None
    except (Exception, pytest.fail.Exception) as exc:  # noqa: BLE001 - the verdict names it
        return f"{type(exc).__name__}: {exc}"
    return None
