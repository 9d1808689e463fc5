"""`python -O`, and folders with every kind of path, good and bad."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

import zinf_torch as zt
from robustness.support import num_fds, run_python, train_on, train_plain
from zinf_core.errors import TierError, TransferError
from zinf_core.units import KiB

TRAINED = """
import sys
from robustness.support import train_on
import zinf_torch as zt

if __debug__:
    raise SystemExit("not optimized")
with zt.Runtime(device=32768, host=65536, nvme=sys.argv[1]) as runtime:
    print(*(loss.hex() for loss in train_on(runtime)))
"""


def open_runtime(folder: str | Path) -> zt.Runtime:
    """Return a runtime in which the model does not fit the device."""
    return zt.Runtime(device=32 * KiB, host=64 * KiB, nvme=folder)


@pytest.mark.slow
def test_optimized_python_gives_the_same_losses(tmp_path: Path) -> None:
    """Catches work that is done inside an `assert`."""
    done = run_python(TRAINED, tmp_path / "z", flags=("-O",))
    assert (done.returncode, done.stderr) == (0, "")
    assert [float.fromhex(loss) for loss in done.stdout.split()] == train_plain()
    assert not (tmp_path / "z").exists()


@pytest.mark.parametrize(
    "name",
    [
        "with spaces and 'quotes\"",
        "ñandú-学習-🦩",
        "a/b/c",
        "%s {0} \\n",
        "new\nline",
        "-rf",
        "x" * 200,
    ],
    ids=["spaces", "unicode", "nested", "placeholders", "newline", "dash", "long"],
)
def test_names_that_are_easily_mishandled(tmp_path: Path, name: str) -> None:
    """Catches a path that is formatted, split, quoted or encoded on its way to the system."""
    with open_runtime(tmp_path / name) as runtime:
        assert (tmp_path / name).is_dir()
        assert train_on(runtime) == train_plain()
    assert not (tmp_path / name).exists()


def test_relative_path_and_another_working_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a relative path that is resolved anew after the program changed its folder."""
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    with open_runtime("z") as runtime:
        monkeypatch.chdir(tmp_path / "elsewhere")
        assert train_on(runtime) == train_plain()
        assert (tmp_path / "z").is_dir()
    assert [path.name for path in tmp_path.iterdir()] == ["elsewhere"]
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_symlink_to_a_folder(tmp_path: Path) -> None:
    """Catches a link that is replaced or deleted instead of followed."""
    (tmp_path / "drive").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "drive", target_is_directory=True)
    with open_runtime(tmp_path / "link") as runtime:
        assert train_on(runtime) == train_plain()
        assert any((tmp_path / "drive").iterdir())
    assert (tmp_path / "link").is_symlink()
    assert list((tmp_path / "drive").iterdir()) == []


def file_in_the_way(tmp_path: Path) -> Path:
    """Return a path at which there is a file."""
    (tmp_path / "z").write_text("mine")
    return tmp_path / "z"


def below_a_file(tmp_path: Path) -> Path:
    """Return a path below a file."""
    return file_in_the_way(tmp_path) / "below"


def dangling_link(tmp_path: Path) -> Path:
    """Return a link whose target cannot be made."""
    (tmp_path / "z").symlink_to("/proc/zinf/nowhere")
    return tmp_path / "z"


def read_only(tmp_path: Path) -> Path:
    """Return a folder where nothing can be made, whoever asks."""
    del tmp_path
    return Path("/proc/self/task")


def below_read_only(tmp_path: Path) -> Path:
    """Return a missing folder where none can be made."""
    del tmp_path
    return Path("/proc/self/task/zinf")


def name_too_long(tmp_path: Path) -> Path:
    """Return a path no file system takes."""
    return tmp_path / ("x" * 300)


def lock_is_a_folder(tmp_path: Path) -> Path:
    """Return a folder in which something has the name of our lock."""
    (tmp_path / "z" / "lock.zinf").mkdir(parents=True)
    return tmp_path / "z"


@pytest.mark.parametrize(
    "place",
    [
        file_in_the_way, below_a_file, dangling_link, read_only, below_read_only, name_too_long,
        lock_is_a_folder,
    ],
)  # fmt: skip
def test_unusable_folders_are_one_clear_error(tmp_path: Path, place: object) -> None:
    """Catches an error that does not name the folder, or that comes after something was opened or
    made; the next run with a good folder is not affected."""
    folder: Path = place(tmp_path)  # type: ignore[operator]
    before = num_fds(), threading.active_count()
    listed = sorted(tmp_path.rglob("*"))
    with pytest.raises(TransferError) as refusal:
        open_runtime(folder)
    assert str(folder.resolve()) in str(refusal.value)
    assert isinstance(refusal.value, OSError)
    assert isinstance(refusal.value, TierError)
    assert refusal.value.errno
    assert sorted(tmp_path.rglob("*")) == listed
    assert (num_fds(), threading.active_count()) == before
    with open_runtime(tmp_path / "good") as runtime:
        assert train_on(runtime) == train_plain()
