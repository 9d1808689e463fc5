"""Tokenizer: what training needs of one, and one that needs no files."""

from __future__ import annotations

from typing import Protocol


class Tokenizer(Protocol):
    """Turns text into token ids and back."""

    @property
    def num_tokens(self) -> int:
        """Size of the vocabulary; every id is smaller."""
        ...

    @property
    def separator_id(self) -> int:
        """Id that stands between two files."""
        ...

    def encode(self, text: str) -> list[int]:
        """Return the ids of `text`, with no special ids added."""
        ...

    def decode(self, ids: list[int]) -> str:
        """Return the text of `ids`."""
        ...


class ByteTokenizer:
    """Each byte of UTF-8 is a token: 256 of them, no files needed."""

    num_tokens = 256
    separator_id = 0

    def encode(self, text: str) -> list[int]:
        """Return the bytes of `text`; what UTF-8 cannot hold becomes ``?``."""
        return list(text.encode("utf-8", errors="replace"))

    def decode(self, ids: list[int]) -> str:
        """Return the text of `ids`; broken sequences become U+FFFD."""
        return bytes(ids).decode("utf-8", errors="replace")
