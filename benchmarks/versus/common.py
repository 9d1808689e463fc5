"""What every contestant shares: the model, the data, the options, and how a step is measured."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

TOKENS = 256
CLIP = 1.0
ADAMW = {"lr": 1e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
SIZES = {
    "125m": (768, 2048, 12, 12, 4),
    "1b1": (2048, 5632, 22, 32, 4),
}
"""Hidden size, feed-forward size, layers, heads, key-value heads."""
VOCAB = 32000


def build_config(size: str) -> LlamaConfig:
    """Return the configuration of one of `SIZES`."""
    hidden, feed_forward, layers, heads, kv_heads = SIZES[size]
    return LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=hidden,
        intermediate_size=feed_forward,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=TOKENS,
        tie_word_embeddings=False,
        use_cache=False,
        attn_implementation="sdpa",
    )


def build_model(size: str) -> LlamaForCausalLM:
    """Return the model in bf16, the same for the same size. Call it under a deferred
    initialisation to build one that does not fit."""
    torch.manual_seed(1234)
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        return LlamaForCausalLM(build_config(size))
    finally:
        torch.set_default_dtype(default)


def batch(step: int, micro_batch: int) -> torch.Tensor:
    """Return the tokens of a step: an uneven choice of 512 symbols that can be learnt."""
    generator = torch.Generator().manual_seed(1_000_003 + step)
    weights = 1.0 / torch.arange(1, 513, dtype=torch.float)
    drawn = torch.multinomial(weights, micro_batch * TOKENS, replacement=True, generator=generator)
    return drawn.view(micro_batch, TOKENS)


@dataclass(kw_only=True)
class Measured:
    """One step."""

    loss: float
    forward_s: float
    backward_s: float
    optimizer_s: float
    read_nbytes: int
    written_nbytes: int
    peak_rss_nbytes: int
    """Most memory in use during the step."""


@dataclass(kw_only=True)
class Phases:
    """A training step in its three parts."""

    model: Callable[..., Any]
    backward: Callable[[torch.Tensor], None] = torch.Tensor.backward
    optimize: Callable[[], None]


def run(phases: Phases, *, steps: int, micro_batch: int) -> None:
    """Run `steps` steps and print one line of JSON for each."""
    for step in range(steps):
        ids = batch(step, micro_batch)
        Path("/proc/self/clear_refs").write_text("5")
        before, start = disk_nbytes(), time.perf_counter()
        loss = phases.model(input_ids=ids, labels=ids).loss
        forward = time.perf_counter()
        phases.backward(loss)
        backward = time.perf_counter()
        phases.optimize()
        end, after = time.perf_counter(), disk_nbytes()
        measured = Measured(
            loss=loss.item(),
            forward_s=forward - start,
            backward_s=backward - forward,
            optimizer_s=end - backward,
            read_nbytes=after[0] - before[0],
            written_nbytes=after[1] - before[1],
            peak_rss_nbytes=status_nbytes("VmHWM"),
        )
        print(json.dumps(asdict(measured)))
        sys.stdout.flush()


def disk_nbytes() -> tuple[int, int]:
    """Return the bytes this process had the drive read and write so far."""
    lines = Path("/proc/self/io").read_text().splitlines()
    fields = dict(line.split(": ") for line in lines)
    return int(fields["read_bytes"]), int(fields["write_bytes"])


def status_nbytes(name: str) -> int:
    """Return one of the memory figures of /proc/self/status."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise LookupError(name)
