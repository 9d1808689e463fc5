"""zinf: a plain PyTorch loop over tiers, under budgets."""

from __future__ import annotations

import argparse

import torch
from common import ADAMW, CLIP, Phases, build_model, run

import zinf_torch as zt


def main() -> None:
    """Train as told by the arguments."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("size")
    parser.add_argument("--micro-batch", type=int, default=1)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--device", default="256MiB")
    parser.add_argument("--host", default="1GiB")
    parser.add_argument("--folder", help="on the drive; without it everything stays in memory")
    args = parser.parse_args()
    homes = (
        {}
        if args.folder
        else dict.fromkeys(("parameters", "gradients", "optimizer_states"), "device")
    )
    with zt.Runtime(device=args.device, host=args.host, nvme=args.folder, **homes) as runtime:
        with runtime.deferred_init():
            model = build_model(args.size)
        model = runtime.attach(model)
        optimizer = runtime.optimizer(torch.optim.AdamW, model.parameters(), fused=True, **ADAMW)

        def optimize() -> None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            optimizer.step()
            optimizer.zero_grad()

        run(Phases(model=model, optimize=optimize), steps=args.steps, micro_batch=args.micro_batch)


if __name__ == "__main__":
    main()
