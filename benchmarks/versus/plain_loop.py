"""Plain PyTorch with everything in memory: fp32 masters kept by hand."""

from __future__ import annotations

import argparse

import torch
from common import ADAMW, CLIP, Phases, build_model, run


def main() -> None:
    """Train as told by the arguments."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("size")
    parser.add_argument("--micro-batch", type=int, default=1)
    parser.add_argument("--steps", type=int, default=4)
    args = parser.parse_args()
    model = build_model(args.size)
    params = list(model.parameters())
    masters = [param.detach().float() for param in params]
    optimizers = [torch.optim.AdamW([master], fused=True, **ADAMW) for master in masters]

    def optimize() -> None:
        torch.nn.utils.clip_grad_norm_(params, CLIP)
        with torch.no_grad():
            for param, master, optimizer in zip(params, masters, optimizers, strict=True):
                master.grad = param.grad.float()  # one at a time: the least memory
                param.grad = None
                optimizer.step()
                master.grad = None
                param.copy_(master)

    run(Phases(model=model, optimize=optimize), steps=args.steps, micro_batch=args.micro_batch)


if __name__ == "__main__":
    main()
