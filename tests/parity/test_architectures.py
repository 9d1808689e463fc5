"""Real architectures, unchanged, at the tightest device budget, against plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from parity.support import (
    Outcome,
    Recipe,
    assert_same,
    build,
    outcome,
    tightest,
    train,
    train_plain,
    train_tightest,
)
from parity.zoo import ARCHITECTURES, VOCAB

CHECKPOINTING = {"plain": None, "non-reentrant": False, "reentrant": True}
GENERATING = ("gpt2", "llama-grouped", "t5")


def _built(name: str, use_reentrant: bool | None) -> nn.Module:
    model: Any = ARCHITECTURES[name].build()
    model.train()
    if use_reentrant is not None:
        enable = getattr(model, "activation_checkpointing_enable", None)  # transformers' new name
        (enable or model.gradient_checkpointing_enable)({"use_reentrant": use_reentrant})
        assert any(getattr(module, "gradient_checkpointing", False) for module in model.modules())
    return model


def _loss(name: str, model: nn.Module, generator: torch.Generator) -> torch.Tensor:
    loss: torch.Tensor = model(**ARCHITECTURES[name].batch(generator)).loss
    return loss


@cache
def recipe(name: str, use_reentrant: bool | None = None) -> Recipe:
    """Return the recipe of one architecture."""
    return Recipe(
        build=partial(_built, name, use_reentrant),
        batch_loss=partial(_loss, name),
        options={"lr": 1e-2, "weight_decay": 0.1},
        num_steps=3,
        accumulation=2,
        clip=0.5,
    )


@pytest.mark.slow
@pytest.mark.parametrize("kind", CHECKPOINTING)
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_training(tmp_path: Path, name: str, kind: str) -> None:
    """Catches a use of a parameter that escapes paging, a tied or shared weight counted twice, a
    page that is gone when backward or recomputation needs it, random numbers drawn in another
    order, and an operation that needs more than the largest module at once."""
    used = recipe(name, CHECKPOINTING[kind])
    assert_same(train_tightest(used, tmp_path / "z"), train_plain(used))


def generated(name: str, model: Any) -> torch.Tensor:
    """Return what the model writes greedily in eval mode."""
    generator = torch.Generator().manual_seed(7)
    ids = torch.randint(3, VOCAB, (2, 5), generator=generator)
    model.eval()
    tokens: torch.Tensor = model.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=6,
        do_sample=False,
        pad_token_id=0,
        eos_token_id=None,
    )
    model.train()
    return tokens


@pytest.mark.slow
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("name", GENERATING)
def test_generating(
    tmp_path: Path, name: str, mode: Callable[[], AbstractContextManager[None]]
) -> None:
    """Catches a page fetched in inference mode that spoils the training after it, a key-value cache
    over pages that were evicted, and eval that differs from plain (FAULTS P07, P29)."""
    used = recipe(name)

    def run(
        model: nn.Module, optimizer: torch.optim.Optimizer
    ) -> tuple[Outcome, list[torch.Tensor]]:
        results, trace = [], []
        for _ in range(2):
            with mode():
                results.append(generated(name, model))
                generator = torch.Generator().manual_seed(8)
                model.eval()
                results.append(model(**ARCHITECTURES[name].batch(generator)).logits.clone())
                model.train()
            trace += train(used, model, optimizer)
        return outcome(trace, model, optimizer), results

    model = build(used)
    expected, expected_results = run(model, torch.optim.AdamW(model.parameters(), **used.options))
    with tightest(used, tmp_path / "z") as (_, paged, optimizer):
        found, results = run(paged, optimizer)
    assert_same(found, expected)
    for result, value in zip(results, expected_results, strict=True):
        assert torch.equal(result, value)


def test_generated_tokens_depend_on_the_weights() -> None:
    """Catches an oracle that would be equal whatever the weights are."""
    first, second = build(recipe("gpt2")), build(recipe("gpt2"))
    with torch.no_grad():
        for param in second.parameters():
            param.mul_(-1.5)
    assert not torch.equal(generated("gpt2", first), generated("gpt2", second))
