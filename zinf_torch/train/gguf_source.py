"""GGUF source: a model in one GGUF file, dequantised tensor by tensor."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import gguf
import numpy as np
import numpy.typing as npt
import torch
from gguf.quants import quant_shape_to_byte_shape
from transformers import AutoConfig, AutoTokenizer, PretrainedConfig

from zinf_core.errors import ConfigError
from zinf_core.units import MiB
from zinf_torch.train.source import HubTokenizer, Weights, refuse_unreadable
from zinf_torch.train.tokenizer import Tokenizer

FloatArray = npt.NDArray[np.float32]

_CHUNK_NBYTES: Final = 4 * MiB
"""fp32 bytes dequantised at a time."""
_SAME_LAYOUT: Final = frozenset({"qwen2", "qwen3"})
"""Architectures whose GGUF tensors are the Hugging Face ones under other names."""
_IGNORED: Final = frozenset({"rope_freqs.weight"})
"""Tensors that follow from the configuration."""


class GgufSource:
    """The GGUF file at `path`."""

    def __init__(self, path: Path) -> None:
        """Raise ConfigError if `path` is not a file."""
        if not path.is_file():
            raise ConfigError(f"model.gguf = {path}: no such file")
        self._path = path

    @property
    def name(self) -> str:
        """Name for people."""
        return self._path.stem

    def read_config(self) -> PretrainedConfig:
        """Return the configuration. Raises ConfigError if it cannot be made from the metadata."""
        try:
            return AutoConfig.from_pretrained(
                self._path.parent, gguf_file=self._path.name, local_files_only=True
            )
        except Exception as exc:
            raise refuse_unreadable(f"model.gguf = {self._path}: configuration", exc) from exc

    def open_tokenizer(self) -> Tokenizer:
        """Return the tokenizer. Raises ConfigError if it cannot be made from the metadata."""
        try:
            return HubTokenizer(
                AutoTokenizer.from_pretrained(
                    self._path.parent, gguf_file=self._path.name, local_files_only=True
                )
            )
        except Exception as exc:
            raise refuse_unreadable(f"model.gguf = {self._path}: tokenizer", exc) from exc

    def open_weights(self, names: Sequence[str]) -> Weights:
        """Return the stored weights. Raises ConfigError for an architecture not known here."""
        return GgufWeights(self._path, names)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Stored:
    """One tensor of the file."""

    shape: tuple[int, ...]
    quantization: gguf.GGMLQuantizationType
    offset: int
    """First byte in the file."""
    nbytes: int
    """Bytes in the file."""


class GgufWeights:
    """The tensors of one GGUF file. Nothing is mapped: mapped pages would count as memory used."""

    def __init__(self, path: Path, names: Sequence[str]) -> None:
        """Read where each tensor lies and how the model's `names` are called here.

        Raises ConfigError for an architecture whose tensor layout is not known here.
        """
        reader = gguf.GGUFReader(path)
        architecture = str(reader.fields["general.architecture"].contents())
        self._undo = _layout_of(reader, architecture, path)
        self._path = path
        self._stored = {
            tensor.name: _Stored(
                shape=tuple(int(size) for size in reversed(tensor.shape)),
                quantization=tensor.tensor_type,
                offset=int(tensor.data_offset),
                nbytes=int(tensor.n_bytes),
            )
            for tensor in reader.tensors
            if tensor.name not in _IGNORED
        }
        num_blocks = int(reader.fields[f"{architecture}.block_count"].contents())
        architectures = {value: key for key, value in gguf.MODEL_ARCH_NAMES.items()}
        name_map = gguf.get_tensor_name_map(architectures[architecture], num_blocks)
        found = {name: name_map.get_name(name, (".weight", ".bias")) for name in names}
        self._stored_name = {name: stored for name, stored in found.items() if stored}

    def stored_names(self) -> frozenset[str]:
        """Return the names in the file."""
        return frozenset(self._stored)

    def find(self, name: str) -> str | None:
        """Return what the file calls the parameter `name`, if it holds it."""
        stored_name = self._stored_name.get(name)
        return stored_name if stored_name in self._stored else None

    def shape(self, stored_name: str) -> tuple[int, ...]:
        """Return the shape, slowest dimension first as in torch."""
        return self._stored[stored_name].shape

    def read(self, stored_name: str, dtype: torch.dtype) -> torch.Tensor:
        """Return one dequantised tensor. Holds it once in `dtype` and a chunk in fp32."""
        stored = self._stored[stored_name]
        rows_shape = (-1, stored.shape[-1])
        result = torch.empty(stored.shape, dtype=dtype)
        rows = result.view(rows_shape)
        step = max(1, _CHUNK_NBYTES // (4 * stored.shape[-1]))
        row_shape = quant_shape_to_byte_shape((stored.shape[-1],), stored.quantization)
        row_nbytes = int(row_shape[0])
        with self._path.open("rb") as file:
            file.seek(stored.offset)
            for start in range(0, len(rows), step):
                num_rows = min(step, len(rows) - start)
                raw = np.fromfile(file, dtype=np.uint8, count=num_rows * row_nbytes)
                if raw.nbytes != num_rows * row_nbytes:
                    raise ConfigError(f"model.gguf = {self._path}: ends within {stored_name}")
                values = gguf.dequantize(raw.reshape(num_rows, row_nbytes), stored.quantization)
                rows[start : start + num_rows].copy_(torch.from_numpy(values))
        return self._undo(stored_name, result)


def _layout_of(
    reader: Any, architecture: str, path: Path
) -> Callable[[str, torch.Tensor], torch.Tensor]:
    """Return what turns a stored tensor into the Hugging Face one."""
    if architecture in _SAME_LAYOUT:
        return _keep
    if architecture == "llama":
        num_heads = int(reader.fields["llama.attention.head_count"].contents())
        kv_field = reader.fields.get("llama.attention.head_count_kv")
        num_kv_heads = num_heads if kv_field is None else int(kv_field.contents())
        return partial(_unpermute, num_heads=num_heads, num_kv_heads=num_kv_heads)
    known = ", ".join(sorted({"llama", *_SAME_LAYOUT}))
    raise ConfigError(
        f"model.gguf = {path}: architecture {architecture!r} is not among {known}; give the "
        "model's Hugging Face folder as model.path"
    )


def _keep(stored_name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Return `tensor` as it is."""
    del stored_name
    return tensor


def _unpermute(
    stored_name: str, tensor: torch.Tensor, *, num_heads: int, num_kv_heads: int
) -> torch.Tensor:
    """Return query and key weights with rotary pairs as halves, the way transformers wants them.

    llama.cpp stores the two rows of each pair beside each other; others are returned as they are.
    """
    if ".attn_q." in stored_name:
        heads = num_heads
    elif ".attn_k." in stored_name:
        heads = num_kv_heads
    else:
        return tensor
    pairs = tensor.view(heads, tensor.shape[0] // heads // 2, 2, *tensor.shape[1:])
    return pairs.transpose(1, 2).reshape(tensor.shape)
