"""Data: text files become a stream of token batches, and some held out to measure on."""

from __future__ import annotations

import itertools
import random
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch

from zinf_core.errors import ConfigError
from zinf_torch.train.config import PYTHON_STDLIB, DataConfig
from zinf_torch.train.tokenizer import Tokenizer

_NOT_STDLIB: Final = frozenset({"site-packages", "dist-packages", "test", "tests", "__pycache__"})
"""Folders below the standard library's that are not its sources."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TextFiles:
    """Which files are trained on and which are only measured on; none is both."""

    training: tuple[Path, ...]
    held_out: tuple[Path, ...]


def find_text_files(config: DataConfig) -> TextFiles:
    """Return the files that `config.paths` names, divided; the same ones for the same seed.

    Raises ConfigError if an entry names nothing, or if there are fewer than two files.
    """
    found: set[Path] = set()
    for entry in config.paths:
        files = set(_expand(entry, config.suffixes))
        if not files:
            raise ConfigError(
                f"data.paths: {entry!r} names no file (folders are searched for "
                f"{', '.join(config.suffixes)})"
            )
        found |= files
    if len(found) < 2:
        raise ConfigError("data.paths names one file; two are needed, one of them is held out")
    files_in_order = sorted(found)
    random.Random(config.seed).shuffle(files_in_order)
    num_held_out = min(max(1, round(len(found) * config.held_out_fraction)), len(found) - 1)
    return TextFiles(
        training=tuple(files_in_order[num_held_out:]),
        held_out=tuple(files_in_order[:num_held_out]),
    )


def read_batches(
    paths: Sequence[Path], tokenizer: Tokenizer, config: DataConfig
) -> Iterator[torch.Tensor]:
    """Iterate once over the text of `paths` as int64 ids of shape (micro_batch, sequence_length).

    A file is read and tokenised when its turn comes. Files follow one another, parted by the
    separator; what does not fill the last batch is left out. Raises ConfigError if one cannot be
    read.
    """
    ids = _token_ids(paths, tokenizer)
    shape = (config.micro_batch, config.sequence_length)
    numel = config.micro_batch * config.sequence_length
    while len(batch := list(itertools.islice(ids, numel))) == numel:
        yield torch.tensor(batch, dtype=torch.int64).view(shape)


def cycle_batches(
    paths: Sequence[Path], tokenizer: Tokenizer, config: DataConfig
) -> Iterator[torch.Tensor]:
    """Iterate over `read_batches` again and again without end.

    Raises ConfigError if the files do not fill one batch.
    """
    while True:
        num_batches = 0
        for batch in read_batches(paths, tokenizer, config):
            num_batches += 1
            yield batch
        if not num_batches:
            raise ConfigError(
                f"data.paths: {len(paths)} files hold fewer than the {config.micro_batch} x "
                f"{config.sequence_length} tokens of one micro-batch; add text or lower "
                "data.sequence_length"
            )


def _token_ids(paths: Iterable[Path], tokenizer: Tokenizer) -> Iterator[int]:
    """Iterate over the ids of the files, with a separator after each."""
    for path in paths:
        try:
            text = path.read_text(encoding="utf-8", errors="replace")
        except OSError as exc:
            raise ConfigError(f"data.paths: {path} cannot be read: {exc.strerror}") from exc
        yield from tokenizer.encode(text)
        yield tokenizer.separator_id


def _expand(entry: str, suffixes: Sequence[str]) -> Iterator[Path]:
    """Iterate over the absolute paths of the files that one entry of `data.paths` names."""
    if entry == PYTHON_STDLIB:
        root = Path(sysconfig.get_paths()["stdlib"])
        for path in root.rglob("*.py"):
            if _NOT_STDLIB.isdisjoint(path.relative_to(root).parts):
                yield path
        return
    path = Path(entry).expanduser().absolute()
    if path.is_dir():
        yield from (p for p in path.rglob("*") if p.suffix in suffixes and p.is_file())
    elif path.is_file():
        yield path
    else:
        pattern = str(path.relative_to(path.anchor))
        yield from (p for p in Path(path.anchor).glob(pattern) if p.is_file())
