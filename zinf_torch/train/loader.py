"""Loader: builds the model straight into its homes and fills it, one tensor at a time."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, cast

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PretrainedConfig

from zinf_core.errors import ConfigError
from zinf_torch.api import Runtime
from zinf_torch.budget import at_home, device_requirement, page_nbytes
from zinf_torch.homes import Homes
from zinf_torch.train.config import FloatType, ModelConfig, TrainConfig
from zinf_torch.train.source import ModelSource, Weights, refuse_unreadable
from zinf_torch.train.tokenizer import Tokenizer

DTYPES: Final = {FloatType.FLOAT32: torch.float32, FloatType.BFLOAT16: torch.bfloat16}
_MAX_NAMES_SHOWN: Final = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Blueprint:
    """A model that is checked but not built: nothing of its size is allocated yet."""

    name: str
    config: PretrainedConfig
    weights: Weights | None
    """None: weights are drawn."""
    numel: int
    """Parameters, tied ones once."""
    num_tensors: int


def draw_blueprint(source: ModelSource, config: TrainConfig) -> Blueprint:
    """Return the checked plan of the model in `source`.

    Raises ConfigError if the model is no causal language model, is too short for the sequences, or
    its stored tensors are missing, left over or of the wrong shape; BudgetTooSmallError if the
    device budget cannot hold what one operation needs.
    """
    hub_config = source.read_config()
    longest = getattr(hub_config, "max_position_embeddings", None)
    if isinstance(longest, int) and longest < config.data.sequence_length:
        raise ConfigError(
            f"data.sequence_length = {config.data.sequence_length} is longer than the "
            f"{longest} positions of {source.name}"
        )
    try:
        with torch.device("meta"):
            twin = AutoModelForCausalLM.from_config(hub_config, dtype=DTYPES[config.model.dtype])
    except Exception as exc:
        raise refuse_unreadable(f"{source.name}: causal language model", exc) from exc
    homes = Homes.of(
        parameters=config.home.parameters,
        gradients=config.home.gradients,
        optimizer_states=config.home.optimizer,
        tiers=("device", "host", "nvme"),
    )
    fixed = sum(page_nbytes(param, param.dtype) for param in at_home(twin, homes, "device"))
    device_requirement(twin, homes).check("device", config.budget.device, fixed)
    weights = source.open_weights([name for name, _ in _named_tensors(twin)])
    if weights is not None:
        _check_weights(twin, weights, source.name)
    parameters = list(twin.parameters())
    return Blueprint(
        name=source.name,
        config=hub_config,
        weights=weights,
        numel=sum(parameter.numel() for parameter in parameters),
        num_tensors=len(parameters),
    )


def check_vocabulary(blueprint: Blueprint, tokenizer: Tokenizer) -> None:
    """Raise ConfigError if the tokenizer has ids for which the model has no embedding."""
    vocab_size = getattr(blueprint.config, "vocab_size", None)
    if isinstance(vocab_size, int) and vocab_size < tokenizer.num_tokens:
        raise ConfigError(
            f"{blueprint.name}: vocab_size = {vocab_size} is smaller than the tokenizer's "
            f"{tokenizer.num_tokens}"
        )


def build_model(runtime: Runtime, blueprint: Blueprint, config: ModelConfig) -> nn.Module:
    """Return the attached model with its weights in their homes; never holds it whole.

    Blocks on the tiers and on the weights' files.
    """
    torch.manual_seed(config.seed)
    with runtime.deferred_init():
        model = AutoModelForCausalLM.from_config(blueprint.config, dtype=DTYPES[config.dtype])
    if config.gradient_checkpointing:
        _recompute_activations(model)
    attached = cast("nn.Module", runtime.attach(model))
    if blueprint.weights is not None:
        load_weights(attached, blueprint.weights)
    return attached


def load_weights(model: nn.Module, weights: Weights) -> None:
    """Copy every stored tensor into `model`, which keeps its dtypes. Blocks on the file."""
    with torch.no_grad():
        for name, tensor in _named_tensors(model):
            stored_name = weights.find(name)
            if stored_name is not None:
                tensor.copy_(weights.read(stored_name, tensor.dtype))


def _recompute_activations(model: Any) -> None:
    """Turn gradient checkpointing on, under the name it has in this release of transformers."""
    options = {"use_reentrant": False}
    if hasattr(model, "activation_checkpointing_enable"):
        model.activation_checkpointing_enable(activation_checkpointing_kwargs=options)
    else:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)


def _named_tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Iterate over parameters and persistent buffers, each tied one under its first name."""
    yield from model.named_parameters()
    for module_name, module in model.named_modules():
        transient = module._non_persistent_buffers_set
        for name, buffer in module.named_buffers(prefix=module_name, recurse=False):
            if name.rpartition(".")[2] not in transient:
                yield name, buffer


def _check_weights(twin: nn.Module, weights: Weights, source_name: str) -> None:
    """Raise ConfigError unless stored tensors and the model's parameters match one to one."""
    stored = weights.stored_names()
    missing = [name for name, _ in twin.named_parameters() if weights.find(name) is None]
    if missing:
        raise ConfigError(f"{source_name} lacks {_names_text(missing)}")
    every_name = [name for name, _ in twin.named_parameters(remove_duplicate=False)]
    every_name += [name for name, _ in _named_tensors(twin)]
    ignored = getattr(twin, "_keys_to_ignore_on_load_unexpected", None) or ()
    left_over = [
        name
        for name in sorted(stored - {weights.find(name) for name in every_name})
        if not any(re.search(pattern, name) for pattern in ignored)
    ]
    if left_over:
        raise ConfigError(f"{source_name}: the model has no place for {_names_text(left_over)}")
    for name, tensor in _named_tensors(twin):
        stored_name = weights.find(name)
        if stored_name is not None and weights.shape(stored_name) != tuple(tensor.shape):
            raise ConfigError(
                f"{source_name}: {stored_name} has shape {weights.shape(stored_name)}, the model "
                f"needs {tuple(tensor.shape)}"
            )


def _names_text(names: Sequence[str]) -> str:
    """Return the first few names, and how many more there are."""
    shown = ", ".join(names[:_MAX_NAMES_SHOWN])
    more = len(names) - _MAX_NAMES_SHOWN
    return f"{shown} and {more} more" if more > 0 else shown
