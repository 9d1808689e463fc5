"""Plain PyTorch training on the device, with what zinf documents about its numbers.

The optimizer runs on the CPU, on fp32 weights: gradients are copied to a twin of the model there
and its weights back. Gradients of bf16 parameters are summed in fp32 from the second micro-batch
on. The gradient norm is taken tensor by tensor (``foreach=False``), as for tensors that are paged.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from gpu.models import batch, build
from torch import nn

NUM_LAYERS = 2
ACCUMULATION = 2
MAX_NORM = 0.5
OPTIONS: dict[str, Any] = {"lr": 1e-2, "betas": (0.9, 0.95), "weight_decay": 0.1}


@dataclass
class Trace:
    """What training gave, step by step."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    weights: list[dict[str, torch.Tensor]] = field(default_factory=list)
    """After each step, on the CPU."""
    foreach_norms: list[float] = field(default_factory=list)
    """The norms as ``clip_grad_norm_`` takes them of plain tensors by default."""


def train_plain(
    dtype: torch.dtype, device: torch.device, *, num_steps: int, on_device: bool = False
) -> Trace:
    """Train; with `on_device` the optimizer runs there, and fp32 needs no twin."""
    model = build(NUM_LAYERS, dtype).to(device)
    params = list(model.parameters())
    place = device if on_device else torch.device("cpu")
    masters = [p.detach().to(place, torch.float32, copy=True).requires_grad_() for p in params]
    optimizer = torch.optim.AdamW(masters, **OPTIONS)
    trace = Trace()
    for step in range(num_steps):
        sums: list[torch.Tensor] = []
        for micro in range(ACCUMULATION):
            loss = model(batch(step * ACCUMULATION + micro, device)) / ACCUMULATION
            loss.backward()
            trace.losses.append(loss.item())
            sums = _accumulated(sums, params)
        trace.foreach_norms.append(nn.utils.get_total_norm(sums).item())
        trace.norms.append(_clip(sums))
        for master, total in zip(masters, sums, strict=True):
            master.grad = total.to(place, torch.float32)
        optimizer.step()
        with torch.no_grad():
            for param, master in zip(params, masters, strict=True):
                param.copy_(master)
        trace.weights.append({n: p.detach().cpu().clone() for n, p in model.named_parameters()})
    return trace


def _accumulated(sums: list[torch.Tensor], params: list[nn.Parameter]) -> list[torch.Tensor]:
    """Return the sums so far with the gradients of `params`, which are taken out."""
    grads = [param.grad for param in params]
    for param in params:
        param.grad = None
    if any(grad is None for grad in grads):
        raise RuntimeError("a parameter got no gradient")
    taken = [grad for grad in grads if grad is not None]
    if not sums:
        return taken
    return [total.float().add_(grad) for total, grad in zip(sums, taken, strict=True)]


def _clip(sums: list[torch.Tensor]) -> float:
    """Scale the sums in place to MAX_NORM and return their norm."""
    holders = [torch.empty_like(total).requires_grad_() for total in sums]
    for holder, total in zip(holders, sums, strict=True):
        holder.grad = total
    return nn.utils.clip_grad_norm_(holders, MAX_NORM, foreach=False).item()
