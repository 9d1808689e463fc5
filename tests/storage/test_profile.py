"""The hardware profile: kept, found again, and never believed when damaged."""

from __future__ import annotations

import dataclasses
import json
import warnings
from pathlib import Path

import pytest

from zinf_core.errors import ConfigError
from zinf_storage import profile as module
from zinf_storage.nvme import DirectIo, NvmeOptions
from zinf_storage.profile import (
    BestRequest,
    HardwareProfile,
    load_profile,
    profile_path,
    save_profile,
    tuned_options,
)

MiB = 1 << 20
READ = BestRequest(nbytes=MiB, depth=4, bytes_per_s=2.5e9, p50_s=0.001, p99_s=0.004)
WRITE = BestRequest(nbytes=4 * MiB, depth=2, bytes_per_s=2e9, p50_s=0.004, p99_s=0.004)
PROFILE = HardwareProfile(
    zinf="0.1.0",
    date="2026-01-02T03:04:05+00:00",
    filesystem="ext4",
    path_taken="posix-direct",
    io_nbytes=2 * MiB,
    num_threads=8,
    read=READ,
    write=WRITE,
    mixed=None,
    h2d_bytes_per_s=25e9,
)


def test_what_is_kept_is_found(tmp_path: Path) -> None:
    """Catches a field lost on the way, and a profile found for the folder measured only."""
    cache = tmp_path / "cache" / "deep"
    assert load_profile(tmp_path, cache=cache) is None
    path = save_profile(PROFILE, tmp_path, cache=cache)
    assert load_profile(tmp_path, cache=cache) == PROFILE
    assert load_profile(tmp_path / "not" / "there" / "yet", cache=cache) == PROFILE
    full = dataclasses.replace(PROFILE, mixed=READ, d2h_bytes_per_s=1.5)
    assert save_profile(full, tmp_path / "else", cache=cache) == path
    assert load_profile(tmp_path, cache=cache) == full
    assert list(cache.iterdir()) == [path]


def test_drives_have_their_own(tmp_path: Path, shm_folder: Path) -> None:
    """Catches one drive's options used on another."""
    save_profile(PROFILE, tmp_path, cache=tmp_path)
    assert profile_path(shm_folder, cache=tmp_path) != profile_path(tmp_path, cache=tmp_path)
    assert load_profile(shm_folder, cache=tmp_path) is None


def test_machines_have_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a home folder on a network drive that mixes the machines up; and a key that changes
    with the boot, or that gives the machine's id away."""
    ids = [tmp_path / "none", tmp_path / "id"]
    ids[1].write_text("secret1\n", encoding="ascii")
    monkeypatch.setattr(module, "_MACHINE_IDS", tuple(ids))
    first = profile_path(tmp_path, cache=tmp_path)
    assert first == profile_path(tmp_path, cache=tmp_path)
    assert "secret" not in str(first)
    ids[1].write_text("secret2\n", encoding="ascii")
    assert profile_path(tmp_path, cache=tmp_path) != first
    ids[1].unlink()
    assert profile_path(tmp_path, cache=tmp_path) is not None


def test_where_it_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a cache anywhere but where the user's settings put it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    found = profile_path(tmp_path)
    assert found is not None
    assert found.parent == tmp_path / "zinf" / "profiles"
    monkeypatch.setenv("XDG_CACHE_HOME", "not/absolute")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    found = profile_path(tmp_path)
    assert found is not None
    assert found.parent == tmp_path / "home" / ".cache" / "zinf" / "profiles"

    def no_home() -> Path:
        raise RuntimeError("no home")

    monkeypatch.setattr(Path, "home", no_home)
    assert load_profile(tmp_path) is None
    with pytest.raises(ConfigError, match="XDG_CACHE_HOME"):
        save_profile(PROFILE, tmp_path)


def damaged() -> dict[str, object]:
    data = {"schema": 1, **dataclasses.asdict(PROFILE)}
    return {
        "empty": "",
        "cut": json.dumps(data)[:-20],
        "list": "[]",
        "old": json.dumps({**data, "schema": 0}),
        "missing": json.dumps({k: v for k, v in data.items() if k != "io_nbytes"}),
        "odd size": json.dumps({**data, "io_nbytes": 1000}),
        "no size": json.dumps({**data, "io_nbytes": "1MiB"}),
        "flag": json.dumps({**data, "num_threads": True}),
        "threads": json.dumps({**data, "num_threads": 0}),
        "many threads": json.dumps({**data, "num_threads": 1 << 20}),
        "no request": json.dumps({**data, "read": None}),
        "strange request": json.dumps({**data, "read": {"nbytes": 1}}),
        "text in request": json.dumps(
            {**data, "read": {**dataclasses.asdict(READ), "nbytes": "x"}}
        ),
        "no rate": json.dumps({**data, "read": {**dataclasses.asdict(READ), "bytes_per_s": 0}}),
        "not a number": json.dumps(
            {**data, "write": {**dataclasses.asdict(READ), "bytes_per_s": float("nan")}}
        ),
    }


@pytest.mark.parametrize(("what", "text"), damaged().items())
def test_damaged_files_are_ignored(what: str, text: str, tmp_path: Path) -> None:
    """Catches a run that dies at its start, or takes nonsense for options, because of a cache."""
    del what
    path = profile_path(tmp_path, cache=tmp_path)
    assert path is not None
    path.write_text(text, encoding="utf-8")
    with pytest.warns(RuntimeWarning, match=r"is ignored: .*zinf bench tiers") as caught:
        assert load_profile(tmp_path, cache=tmp_path) is None
    assert len(caught) == 1
    with pytest.warns(RuntimeWarning, match="is ignored"):
        assert tuned_options(tmp_path, NvmeOptions(), cache=tmp_path) == NvmeOptions()


def test_files_that_cannot_be_read_or_written(tmp_path: Path) -> None:
    """Catches a traceback where one line is due."""
    path = profile_path(tmp_path, cache=tmp_path)
    assert path is not None
    path.mkdir()
    with pytest.warns(RuntimeWarning, match="is ignored"):
        assert load_profile(tmp_path, cache=tmp_path) is None
    with pytest.raises(ConfigError, match="cannot be kept at"):
        save_profile(PROFILE, tmp_path, cache=Path("/proc/zinf"))
    path.rmdir()
    path.write_bytes(b"\xff\xfe")
    with pytest.warns(RuntimeWarning, match="is ignored"):
        assert load_profile(tmp_path, cache=tmp_path) is None


def test_options_from_the_profile(tmp_path: Path) -> None:
    """Catches what the user chose replaced by what the tool found, and the other way round."""
    base = NvmeOptions(direct=DirectIo.NEVER, segment_nbytes=MiB)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert tuned_options(tmp_path, base, cache=tmp_path) == base
    save_profile(PROFILE, tmp_path, cache=tmp_path)
    tuned = tuned_options(tmp_path, base, cache=tmp_path)
    assert tuned == dataclasses.replace(base, io_nbytes=2 * MiB, num_threads=8)
    given = frozenset({"io_nbytes"})
    assert tuned_options(tmp_path, base, given=given, cache=tmp_path) == dataclasses.replace(
        base, num_threads=8
    )
    chosen = dataclasses.replace(base, num_threads=2)
    assert tuned_options(tmp_path, chosen, cache=tmp_path) == dataclasses.replace(
        base, num_threads=2, io_nbytes=2 * MiB
    )
    both = frozenset({"io_nbytes", "num_threads"})
    assert tuned_options(tmp_path, base, given=both, cache=tmp_path) is base
    with pytest.raises(ConfigError, match="no field 'nthreads'"):
        tuned_options(tmp_path, base, given=frozenset({"nthreads"}), cache=tmp_path)
