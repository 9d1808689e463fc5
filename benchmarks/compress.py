"""What compressed:// saves and costs on real weights and real Adam moments.

Usage: python benchmarks/compress.py [--gguf FILE] [--steps N] [--mib N] [--rounds N]
[--codecs LIST] [--json FILE]

Weights and moments come from a few AdamW steps of a small Llama on the source text of Python's
standard library, in fp32 and rounded to bf16; with --gguf (see examples/fetch_demo_model.py) the
weights of that model as well. Those were dequantised from a few bits per weight, so that their
fp32 bytes compress better than those of weights that never were quantised: read them as such.

Each round writes and reads every kind of data through a compressed tier over host memory, with one
thread, for every codec; rates are plain bytes per second of wall time, CPU is the codec's share.
Every read is compared with what was written, bit by bit.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import sysconfig
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from zinf_core.buffers import ByteArray
from zinf_core.keys import StateKind, TensorKey
from zinf_core.registry import open_tier
from zinf_core.units import MiB
from zinf_storage.allocators import PageAlignedAllocator
from zinf_storage.chunked import ChunkedTier
from zinf_torch.train.gguf_source import GgufSource

KEY = TensorKey.of("benchmark", StateKind.PARAM)
CODECS = "lz4,zstd:-5,zstd:1,zstd:3,zstd:9,blosc2:1,blosc2:5,zstd:1:1"


@dataclass
class Result:
    """What one codec made of one kind of data, by round."""

    ratio: float = 1.0
    write_bytes_per_s: list[float] = field(default_factory=list)
    read_bytes_per_s: list[float] = field(default_factory=list)
    encode_cpu_bytes_per_s: list[float] = field(default_factory=list)
    decode_cpu_bytes_per_s: list[float] = field(default_factory=list)


def training_text() -> bytes:
    """Return source text of the standard library, some megabytes."""
    folder = Path(sysconfig.get_path("stdlib"))
    return b"".join(path.read_bytes() for path in sorted(folder.glob("*.py"))[:120])


def trained(steps: int) -> tuple[LlamaForCausalLM, torch.optim.AdamW]:
    """Return a small byte-level Llama and its optimizer after `steps` steps."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256, hidden_size=384, intermediate_size=1024, num_hidden_layers=6,
        num_attention_heads=6, num_key_value_heads=6, max_position_embeddings=256, use_cache=False,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
    text = torch.frombuffer(bytearray(training_text()), dtype=torch.uint8)
    starts = torch.randint(0, len(text) - 257, (steps, 8))
    losses = []
    for row in starts:
        ids = torch.stack([text[start : start + 256] for start in row]).long()
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    print(f"{steps} steps, loss {losses[0]:.3f} to {losses[-1]:.3f}", file=sys.stderr)
    return model, optimizer


def gathered(tensors: Iterator[torch.Tensor], limit: int) -> torch.Tensor:
    """Return tensors end to end, in fp32, up to `limit` bytes."""
    flat, numel = [], 0
    for tensor in tensors:
        flat.append(tensor.detach().float().flatten())
        numel += flat[-1].numel()
        if 4 * numel >= limit:
            break
    return torch.cat(flat)[: limit // 4]


def as_bytes(tensor: torch.Tensor) -> ByteArray:
    """Return the bytes of a tensor."""
    found: ByteArray = tensor.contiguous().view(torch.uint8).numpy()
    return found


def collected(gguf: Path | None, steps: int, limit: int) -> dict[str, ByteArray]:
    """Return the bytes to compress, by kind."""
    model, optimizer = trained(steps)
    states = [optimizer.state[parameter] for parameter in model.parameters()]
    kinds = {
        "weights": gathered(iter(model.parameters()), limit),
        "exp_avg": gathered((state["exp_avg"] for state in states), limit),
        "exp_avg_sq": gathered((state["exp_avg_sq"] for state in states), limit),
    }
    if gguf is not None:
        weights = GgufSource(gguf).open_weights([])
        # The first tensor of a model is often its embedding: the layers say more.
        names = sorted(name for name in weights.stored_names() if name.startswith("blk."))
        tensors = (weights.read(name, torch.float32) for name in names)
        kinds["gguf weights"] = gathered(tensors, limit)
    data = {}
    for name, tensor in kinds.items():
        data[f"{name} fp32"] = as_bytes(tensor)
        data[f"{name} bf16"] = as_bytes(tensor.bfloat16())
    return data


def opened(codec: str, capacity: int) -> ChunkedTier:
    """Open a compressed tier for ``name[:level[:shuffle]]``."""
    name, level, shuffle, *_ = [*codec.split(":"), "", ""]
    url = f"compressed://[host://]?codec={name}&num_threads=1"
    url += f"&level={level}" if level else ""
    url += f"&shuffle={shuffle}" if shuffle else ""
    tier = open_tier(url, capacity_nbytes=capacity)
    if not isinstance(tier, ChunkedTier):
        raise TypeError(f"compressed:// opened a {type(tier).__name__}")
    return tier


def run_once(codec: str, data: ByteArray, result: Result) -> None:
    """Write and read `data` once and add what was measured."""
    src = PageAlignedAllocator().allocate(data.nbytes)
    dst = PageAlignedAllocator().allocate(data.nbytes)
    src.array[:] = data
    tier = opened(codec, 2 * data.nbytes + 16 * MiB)
    try:
        tier.reserve(KEY, data.nbytes)
        start = time.perf_counter()
        tier.write_from(KEY, src).wait()
        written = time.perf_counter()
        tier.read_into(KEY, dst).wait()
        end = time.perf_counter()
        counters, result.ratio = tier.counters, tier.ratio
    finally:
        tier.close()
    if not np.array_equal(dst.array, data):
        raise AssertionError(f"{codec}: the bytes read are not those written")
    result.write_bytes_per_s.append(data.nbytes / (written - start))
    result.read_bytes_per_s.append(data.nbytes / (end - written))
    result.encode_cpu_bytes_per_s.append(data.nbytes / max(counters.encode_cpu_s, 1e-9))
    if counters.decoded_nbytes:
        result.decode_cpu_bytes_per_s.append(counters.decoded_nbytes / counters.decode_cpu_s)


def median_mb(values: list[float]) -> str:
    """Return the median in MB/s, a dash if there is none."""
    return f"{statistics.median(values) / 1e6:8.0f}" if values else f"{'-':>8}"


def main() -> int:
    """Run the rounds, print a table, write the JSON if asked."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--gguf", type=Path, help="a GGUF model whose weights are measured too")
    parser.add_argument("--steps", type=int, default=40, help="AdamW steps before the moments")
    parser.add_argument("--mib", type=int, default=32, help="most fp32 bytes of each kind")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--codecs", default=CODECS, help="name[:level[:shuffle]], comma-separated")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    data = collected(args.gguf, args.steps, args.mib * MiB)
    codecs = args.codecs.split(",")
    results = {(kind, codec): Result() for kind in data for codec in codecs}
    for _ in range(args.rounds):
        for (kind, codec), result in results.items():
            run_once(codec, data[kind], result)
    print(
        f"{args.rounds} rounds, 1 thread, chunks of 1 MiB, {platform.machine()}, "
        f"{os.cpu_count()} cores; medians in MB/s of plain bytes"
    )
    print(f"{'data':18} {'codec':12} {'MiB':>6} {'ratio':>6} {'write':>8} {'read':>8} "
          f"{'enc/cpu':>8} {'dec/cpu':>8}")  # fmt: skip
    for (kind, codec), result in results.items():
        print(
            f"{kind:18} {codec:12} {data[kind].nbytes / MiB:6.1f} {result.ratio:6.3f} "
            f"{median_mb(result.write_bytes_per_s)} {median_mb(result.read_bytes_per_s)} "
            f"{median_mb(result.encode_cpu_bytes_per_s)} "
            f"{median_mb(result.decode_cpu_bytes_per_s)}"
        )
    if args.json:
        rows = [
            {"data": kind, "codec": codec, "nbytes": data[kind].nbytes, **vars(result)}
            for (kind, codec), result in results.items()
        ]
        args.json.write_text(json.dumps({"steps": args.steps, "rows": rows}, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
