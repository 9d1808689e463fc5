"""Training step of zinf against plain PyTorch on the same model, interleaved.

Usage: python benchmarks/step.py [--layers N] [--hidden N] [--rounds N] [--folder PATH]
[--json FILE]

bf16 Llama, fp32 masters, AdamW, clipping at 1.0, 256 tokens. Each round runs one step of every
variant, so that a machine that drifts drifts under all of them; ratios are taken within a round.
The plain loop keeps its fp32 masters by hand. Losses must be equal step by step.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import zinf_torch as zt
from zinf_core.units import align_up, format_nbytes
from zinf_torch.budget import device_requirement
from zinf_torch.homes import Homes

TOKENS = 256
OPTIONS = {"lr": 1e-4, "betas": (0.9, 0.95), "weight_decay": 0.1, "fused": True}
Step = Callable[[torch.Tensor], float]


def build(layers: int, hidden: int) -> LlamaForCausalLM:
    """Return the model, the same for the same sizes."""
    torch.manual_seed(1234)
    config = LlamaConfig(
        vocab_size=8192,
        hidden_size=hidden,
        intermediate_size=hidden * 8 // 3,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=max(1, hidden // 192),
        max_position_embeddings=TOKENS,
        tie_word_embeddings=False,
        use_cache=False,
    )
    return LlamaForCausalLM(config).to(torch.bfloat16)


def plain_step(model: nn.Module) -> Step:
    """Return one step of plain PyTorch with masters kept by hand."""
    params = list(model.parameters())
    masters = [p.detach().float().requires_grad_() for p in params]
    optimizer = torch.optim.AdamW(masters, **OPTIONS)

    def step(ids: torch.Tensor) -> float:
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        nn.utils.clip_grad_norm_(params, 1.0)
        for param, master in zip(params, masters, strict=True):
            master.grad = param.grad.float()
            param.grad = None
        optimizer.step()
        with torch.no_grad():
            for param, master in zip(params, masters, strict=True):
                param.copy_(master)
                master.grad = None
        return loss.item()

    return step


def zinf_step(runtime: zt.Runtime, model: nn.Module) -> Step:
    """Return one step under zinf."""
    model = runtime.attach(model)
    optimizer = runtime.optimizer(torch.optim.AdamW, model.parameters(), **OPTIONS)

    def step(ids: torch.Tensor) -> float:
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return step


def budgets(model: nn.Module) -> tuple[int, int]:
    """Return device and host bytes: twice what the largest module and the largest update in one
    piece take."""
    homes = Homes.of(
        parameters="nvme",
        gradients="nvme",
        optimizer_states="nvme",
        tiers=("device", "host", "nvme"),
    )
    largest = max(param.numel() for param in model.parameters())
    return 2 * device_requirement(model, homes).nbytes, 2 * align_up(18 * largest + 8 * 4096)


def spread(values: list[float]) -> str:
    """Return min / median / max."""
    return f"{min(values):.3f} / {statistics.median(values):.3f} / {max(values):.3f}"


def main() -> int:
    """Run the rounds, print a table and write the JSON if asked."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="folder on the drive to use (default: temp)")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    times: dict[str, list[float]] = {
        "plain": [],
        "zinf, all on nvme": [],
        "zinf, all on device": [],
    }
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(dir=args.folder))
        model = build(args.layers, args.hidden)
        numel = sum(param.numel() for param in model.parameters())
        device, host = budgets(model)
        paged = stack.enter_context(zt.Runtime(device=device, host=host, nvme=Path(folder, "zinf")))
        room = 24 * numel + (64 << 20)
        resident = stack.enter_context(zt.Runtime(device=room, host=host, parameters="device",
                                       gradients="device", optimizer_states="device"))  # fmt: skip
        steps = dict(
            zip(
                times,
                (
                    plain_step(model),
                    zinf_step(paged, build(args.layers, args.hidden)),
                    zinf_step(resident, build(args.layers, args.hidden)),
                ),
                strict=True,
            )
        )
        generator = torch.Generator().manual_seed(7)
        print(f"{numel / 1e6:.1f} M parameters, {args.rounds} rounds after one warm-up, "
              f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, "
              f"torch {torch.__version__}, nvme path {paged.paths()['nvme']}, budgets: device "
              f"{format_nbytes(device)}, host {format_nbytes(host)}")  # fmt: skip
        for round_ in range(args.rounds + 1):
            ids = torch.randint(0, 8192, (1, TOKENS), generator=generator)
            before = paged.traffic()["nvme"]
            losses = {}
            for name, step in steps.items():
                start = time.perf_counter()
                losses[name] = step(ids)
                if round_:
                    times[name].append(time.perf_counter() - start)
            if len(set(losses.values())) != 1:
                print(f"losses differ: {losses}", file=sys.stderr)
                return 1
        moved = paged.traffic()["nvme"]
        read = (moved.read_nbytes - before.read_nbytes) / numel
        written = (moved.written_nbytes - before.written_nbytes) / numel
        peak = {name: usage.peak_nbytes for name, usage in paged.usage().items()}
    for name, seconds in times.items():
        ratios = [a / b for a, b in zip(seconds, times["plain"], strict=True)]
        print(f"{name:20} step s (min / median / max) {spread(seconds)}   x plain {spread(ratios)}")
    print(
        f"zinf, all on nvme: {read:.1f} B read and {written:.1f} B written per parameter and "
        f"step; peak tracked device {format_nbytes(peak['device'])}, host "
        f"{format_nbytes(peak['host'])}; losses equal plain's bit by bit"
    )
    if args.json:
        args.json.write_text(
            json.dumps(
                {
                    "numel": numel,
                    "step_s": times,
                    "read_nbytes_per_parameter": read,
                    "written_nbytes_per_parameter": written,
                    "peak_tracked_nbytes": peak,
                },
                indent=2,
            )
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
