"""Tiers over tiers: striped, compressed and checksummed, three settings of one ChunkedTier."""

from zinf_storage.chunked.codecs import Codec, codec_named
from zinf_storage.chunked.options import ChunkedOptions
from zinf_storage.chunked.tier import ChunkedTier

__all__ = ["ChunkedOptions", "ChunkedTier", "Codec", "codec_named"]
