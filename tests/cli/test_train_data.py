"""Training data: which files, in which order, cut how."""

import itertools
from pathlib import Path

import pytest
import torch

from zinf_core.errors import ConfigError
from zinf_torch.train.config import DataConfig
from zinf_torch.train.data import cycle_batches, find_text_files, read_batches
from zinf_torch.train.tokenizer import ByteTokenizer


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for number in range(10):
        (tmp_path / f"{number}.txt").write_text(f"file {number}\n" * 3, encoding="utf-8")
    (tmp_path / "deep er" / "ü").mkdir(parents=True)
    (tmp_path / "deep er" / "ü" / "x.md").write_text("deep", encoding="utf-8")
    (tmp_path / "picture.png").write_bytes(b"\x89PNG")
    return tmp_path


def test_folders_globs_and_files(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches files of other kinds, files counted twice, and globs that stop at the first level."""
    monkeypatch.chdir(folder)
    for entries, num_files in (
        ([str(folder)], 11),
        (["."], 11),
        (["*.txt"], 10),
        ([f"{folder}/**/*.md", "0.txt"], 2),
        (["0.txt", "0.txt", "./0.txt", "1.txt"], 2),
        (["picture.png", "0.txt"], 2),
    ):
        files = find_text_files(DataConfig(paths=tuple(entries)))
        assert len(files.training) + len(files.held_out) == num_files, entries


def test_held_out_files_are_never_trained_on(folder: Path) -> None:
    """Catches a held-out loss measured on training text, or another split for the same seed."""
    config = DataConfig(paths=(str(folder),), held_out_fraction=0.3, seed=5)
    files = find_text_files(config)
    assert len(files.held_out) == 3
    assert not set(files.held_out) & set(files.training)
    assert find_text_files(config) == files
    other = find_text_files(DataConfig(paths=(str(folder),), held_out_fraction=0.3, seed=6))
    assert other != files


def test_refusals(folder: Path) -> None:
    """Catches an entry that is silently empty, and one file on both sides."""
    for entry, told in (
        (str(folder / "absent"), "names no file"),
        ("*.nothing", "names no file"),
        (str(folder / "0.txt"), "two are needed"),
    ):
        with pytest.raises(ConfigError, match=told):
            find_text_files(DataConfig(paths=(entry,)))
    with pytest.raises(ConfigError, match="paths is empty"):
        DataConfig(paths=())


def test_python_stdlib_has_sources_only() -> None:
    """Catches training on installed packages or test suites under the standard library's name."""
    files = find_text_files(DataConfig(paths=("python-stdlib",)))
    names = {path.name for path in (*files.training, *files.held_out)}
    assert {"argparse.py", "tarfile.py", "decoder.py"} <= names
    parts = {part for path in files.training for part in path.parts}
    assert "site-packages" not in parts
    assert "test" not in parts


def test_batches_are_the_text(folder: Path) -> None:
    """Catches lost or repeated tokens at the seams of files and batches."""
    paths = [folder / "0.txt", folder / "1.txt", folder / "2.txt"]
    config = DataConfig(paths=(str(folder),), sequence_length=7, micro_batch=2)
    expected = b"".join(path.read_bytes() + b"\0" for path in paths)
    batches = list(read_batches(paths, ByteTokenizer(), config))
    assert all(batch.shape == (2, 7) and batch.dtype == torch.int64 for batch in batches)
    joined = bytes(torch.cat([batch.flatten() for batch in batches]).tolist())
    assert joined == expected[: len(joined)]
    assert len(expected) - len(joined) < 14


def test_cycles_repeat_and_refuse_too_little(folder: Path) -> None:
    """Catches an end of data in mid-training, and an endless search in too little text."""
    paths = [folder / "0.txt"]
    config = DataConfig(paths=(str(folder),), sequence_length=8, micro_batch=1)
    once = list(read_batches(paths, ByteTokenizer(), config))
    cycled = list(itertools.islice(cycle_batches(paths, ByteTokenizer(), config), 2 * len(once)))
    assert torch.equal(torch.cat(cycled), torch.cat(once + once))
    config = DataConfig(paths=(str(folder),), sequence_length=80)
    with pytest.raises(ConfigError, match="fewer than the 1 x 80 tokens"):
        next(cycle_batches(paths, ByteTokenizer(), config))


def test_unreadable_text(folder: Path) -> None:
    """Catches a traceback for a file that vanished, or one that is not UTF-8."""
    config = DataConfig(paths=(str(folder),), sequence_length=4)
    with pytest.raises(ConfigError, match=r"gone\.txt cannot be read"):
        next(read_batches([folder / "gone.txt"], ByteTokenizer(), config))
    batch = next(read_batches([folder / "picture.png"], ByteTokenizer(), config))
    assert batch[0, 1:].tolist() == list(b"\xbf\xbdP")
    assert ByteTokenizer().decode([0xFF, 65]) == "�A"
