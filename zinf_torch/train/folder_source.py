"""Folder source: a Hugging Face model folder, its safetensors read tensor by tensor."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from transformers import AutoConfig, AutoTokenizer, PretrainedConfig

from zinf_core.errors import ConfigError
from zinf_torch.train.source import HubTokenizer, Weights, refuse_unreadable
from zinf_torch.train.tokenizer import Tokenizer


class FolderSource:
    """The folder at `path`, as `save_pretrained` writes it."""

    def __init__(self, path: Path) -> None:
        """Raise ConfigError unless `path` holds a ``config.json``."""
        if not (path / "config.json").is_file():
            raise ConfigError(f"model.path = {path}: no config.json there; give a model folder")
        self._path = path

    @property
    def name(self) -> str:
        """Name for people."""
        return self._path.name

    def read_config(self) -> PretrainedConfig:
        """Return the configuration. Raises ConfigError if it cannot be read."""
        try:
            return AutoConfig.from_pretrained(self._path, local_files_only=True)
        except Exception as exc:
            raise refuse_unreadable(f"model.path = {self._path}: config.json", exc) from exc

    def open_tokenizer(self) -> Tokenizer:
        """Return the tokenizer. Raises ConfigError if it cannot be read."""
        try:
            return HubTokenizer(AutoTokenizer.from_pretrained(self._path, local_files_only=True))
        except Exception as exc:
            raise refuse_unreadable(f"model.path = {self._path}: tokenizer", exc) from exc

    def open_weights(self, names: Sequence[str]) -> Weights:
        """Return the stored weights. Raises ConfigError if there are no safetensors."""
        del names
        return FolderWeights(self._path)


class FolderWeights:
    """The safetensors of one folder."""

    def __init__(self, folder: Path) -> None:
        """Read which file holds which tensor.

        Raises ConfigError if a file is missing or broken.
        """
        self._file_of: dict[str, Path] = {}
        for path in _find_files(folder):
            try:
                with safe_open(path, framework="pt") as file:
                    self._file_of.update(dict.fromkeys(file.keys(), path))
            except (OSError, SafetensorError) as exc:
                raise ConfigError(f"model.path: {path} is not a safetensors file: {exc}") from exc

    def stored_names(self) -> frozenset[str]:
        """Return the names in the files."""
        return frozenset(self._file_of)

    def find(self, name: str) -> str | None:
        """Return `name`, or `name` without its base model's, whichever is stored."""
        # A checkpoint of a bare base model lacks the name that the language model gives to it.
        candidates = (name, name.partition(".")[2])
        return next((stored for stored in candidates if stored in self._file_of), None)

    def shape(self, stored_name: str) -> tuple[int, ...]:
        """Return the stored shape."""
        with safe_open(self._file_of[stored_name], framework="pt") as file:
            return tuple(file.get_slice(stored_name).get_shape())

    def read(self, stored_name: str, dtype: torch.dtype) -> torch.Tensor:
        """Return a copy of one tensor; its file is unmapped again."""
        with safe_open(self._file_of[stored_name], framework="pt") as file:
            tensor: torch.Tensor = file.get_tensor(stored_name)
            return tensor.to(dtype, copy=True)


def _find_files(folder: Path) -> list[Path]:
    """Return the safetensors files that make up the model in `folder`."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        return [folder / name for name in sorted(set(weight_map.values()))]
    single = folder / "model.safetensors"
    if not single.is_file():
        raise ConfigError(
            f"model.path = {folder}: no model.safetensors there; save it with "
            "save_pretrained(..., safe_serialization=True)"
        )
    return [single]
