"""Source: where a model's configuration, tokenizer and weights come from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from transformers import PretrainedConfig

from zinf_core.errors import ConfigError
from zinf_torch.train.config import ModelConfig
from zinf_torch.train.tokenizer import Tokenizer


class Weights(Protocol):
    """Stored tensors, read one at a time so that the model is never held whole."""

    def stored_names(self) -> frozenset[str]:
        """Return the names under which tensors are stored."""
        ...

    def find(self, name: str) -> str | None:
        """Return the stored name of the parameter or buffer called `name`, or None."""
        ...

    def shape(self, stored_name: str) -> tuple[int, ...]:
        """Return the shape `read` gives."""
        ...

    def read(self, stored_name: str, dtype: torch.dtype) -> torch.Tensor:
        """Return one tensor on the CPU, owned by the caller. Blocks on the file."""
        ...


class ModelSource(Protocol):
    """A model that can be built and trained."""

    @property
    def name(self) -> str:
        """Name for people."""
        ...

    def read_config(self) -> PretrainedConfig:
        """Return the Hugging Face configuration. Raises ConfigError if there is none to read."""
        ...

    def open_tokenizer(self) -> Tokenizer:
        """Return the model's tokenizer. Raises ConfigError if there is none to read."""
        ...

    def open_weights(self, names: Sequence[str]) -> Weights | None:
        """Return the stored weights for parameters called `names`; None: they are drawn."""
        ...


def open_source(config: ModelConfig) -> ModelSource:
    """Return the source that `config` names. Raises ConfigError if its file is not there."""
    # Each source brings its own readers, which a run with another source does not need.
    if config.gguf is not None:
        from zinf_torch.train.gguf_source import GgufSource  # noqa: PLC0415

        return GgufSource(config.gguf)
    if config.path is not None:
        from zinf_torch.train.folder_source import FolderSource  # noqa: PLC0415

        return FolderSource(config.path)
    from zinf_torch.train.random_source import RandomSource  # noqa: PLC0415

    return RandomSource(config.config or {})


class HubTokenizer:
    """A Hugging Face tokenizer, seen as a Tokenizer."""

    def __init__(self, tokenizer: Any) -> None:
        """Wrap `tokenizer`, a PreTrainedTokenizerBase."""
        self._tokenizer = tokenizer

    @property
    def num_tokens(self) -> int:
        """Size of the vocabulary, added tokens included."""
        return len(self._tokenizer)

    @property
    def separator_id(self) -> int:
        """End-of-text id; 0 where the tokenizer has none."""
        eos = self._tokenizer.eos_token_id
        return 0 if eos is None else int(eos)

    def encode(self, text: str) -> list[int]:
        """Return the ids of `text`, with no special ids added."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False, verbose=False)
        return ids

    def decode(self, ids: list[int]) -> str:
        """Return the text of `ids`."""
        return str(self._tokenizer.decode(ids))


def refuse_unreadable(what: str, error: Exception) -> ConfigError:
    """Return the error for something a Hugging Face reader refused, on one line."""
    reason = str(error).strip().partition("\n")[0]
    return ConfigError(f"{what} cannot be read: {type(error).__name__}: {reason}")
