"""Loop: plain PyTorch training, measured step by step."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from zinf_core.runtime.pool import PoolUsage
from zinf_torch.api import Runtime
from zinf_torch.train.config import LoopConfig, Schedule
from zinf_torch.train.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class Moved:
    """Bytes that went from and to one tier."""

    read_nbytes: int = 0
    written_nbytes: int = 0

    def since(self, earlier: Moved) -> Moved:
        """Return what came on top of `earlier`."""
        return Moved(
            read_nbytes=self.read_nbytes - earlier.read_nbytes,
            written_nbytes=self.written_nbytes - earlier.written_nbytes,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """One optimizer step."""

    number: int
    """From 1."""
    loss: float
    """Mean over the step's micro-batches, before the update."""
    num_tokens: int
    elapsed_s: float
    moved: Mapping[str, Moved]
    """By tier, in this step alone."""
    pools: Mapping[str, PoolUsage]
    """By memory, after the step."""


def train_steps(
    runtime: Runtime,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: Iterator[torch.Tensor],
    *,
    config: LoopConfig,
    clock: Callable[[], float],
) -> Iterator[StepResult]:
    """Train `config.steps` steps on `batches`; yield after each. Stops when no longer iterated.

    `clock` gives seconds.
    """
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, _rate_factor(config))
    model.train()
    for number in range(1, config.steps + 1):
        started_s, moved_before = clock(), read_traffic(runtime)
        loss, num_tokens = _accumulate(model, batches, config.accumulation_steps)
        if config.clip_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), config.clip_norm)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        moved = read_traffic(runtime)
        yield StepResult(
            number=number,
            loss=loss,
            num_tokens=num_tokens,
            elapsed_s=clock() - started_s,
            moved={name: moved[name].since(moved_before[name]) for name in moved},
            pools=runtime.usage(),
        )


def measure_loss(
    model: nn.Module, batches: Sequence[torch.Tensor], should_stop: Callable[[], bool]
) -> float | None:
    """Return the mean loss over `batches`, in eval mode, or None once `should_stop` says so."""
    was_training = model.training
    model.eval()
    losses: list[float] = []
    try:
        with torch.no_grad():
            for batch in batches:
                if should_stop():
                    return None
                losses.append(float(_loss_of(model, batch)))
    finally:
        model.train(was_training)
    return math.fsum(losses) / len(losses)


def complete_greedily(model: nn.Module, tokenizer: Tokenizer, prompt: str, num_tokens: int) -> str:
    """Return `prompt` and the `num_tokens` likeliest tokens after it, one after another."""
    was_training = model.training
    model.eval()
    ids = tokenizer.encode(prompt) or [tokenizer.separator_id]
    device = next(model.parameters()).device
    try:
        with torch.no_grad():
            for _ in range(num_tokens):
                logits = model(input_ids=torch.tensor([ids], device=device)).logits
                ids.append(int(logits[0, -1].argmax()))
    finally:
        model.train(was_training)
    return tokenizer.decode(ids)


def read_traffic(runtime: Runtime) -> dict[str, Moved]:
    """Return the bytes moved so far, by tier."""
    return {
        name: Moved(read_nbytes=traffic.read_nbytes, written_nbytes=traffic.written_nbytes)
        for name, traffic in runtime.traffic().items()
    }


def _accumulate(
    model: nn.Module, batches: Iterable[torch.Tensor], num_batches: int
) -> tuple[float, int]:
    """Run forward and backward of `num_batches` micro-batches; return (mean loss, tokens)."""
    losses: list[float] = []
    num_tokens = 0
    for _, batch in zip(range(num_batches), batches, strict=False):
        loss = _loss_of(model, batch)
        (loss / num_batches).backward()
        losses.append(loss.item())
        num_tokens += batch.numel()
    return math.fsum(losses) / len(losses), num_tokens


def _loss_of(model: nn.Module, batch: torch.Tensor) -> Any:
    """Return the mean next-token loss of ids of shape (micro_batch, sequence_length)."""
    batch = batch.to(next(model.parameters()).device)
    return model(input_ids=batch, labels=batch, use_cache=False).loss


def _rate_factor(config: LoopConfig) -> Callable[[int], float]:
    """Return the factor on the learning rate by the number of steps done."""

    def factor(num_done: int) -> float:
        warm = min(1.0, (num_done + 1) / (config.warmup + 1))
        if config.schedule is Schedule.CONSTANT:
            return warm
        return min(warm, (config.steps - num_done) / config.steps)

    return factor
