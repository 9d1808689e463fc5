"""Command: the whole of ``zinf train``, from a checked configuration to its summary."""

from __future__ import annotations

import itertools
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
import transformers
from torch import nn

from zinf_core.errors import ConfigError
from zinf_core.runtime.pool import PoolUsage
from zinf_storage.machine import peak_rss_nbytes
from zinf_torch.api import Runtime
from zinf_torch.heap import return_freed_blocks
from zinf_torch.train.config import TrainConfig
from zinf_torch.train.data import TextFiles, cycle_batches, find_text_files, read_batches
from zinf_torch.train.interrupt import StopRequest
from zinf_torch.train.loader import Blueprint, build_model, check_vocabulary, draw_blueprint
from zinf_torch.train.loop import (
    Moved,
    StepResult,
    complete_greedily,
    measure_loss,
    read_traffic,
    train_steps,
)
from zinf_torch.train.memory import release_unused, rss_nbytes
from zinf_torch.train.optimizer_choice import OptimizerChoice, choose_optimizer
from zinf_torch.train.report import Reporter
from zinf_torch.train.source import open_source
from zinf_torch.train.summary import Summary, summary_json
from zinf_torch.train.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class _Plan:
    """Everything a run needs, checked, with nothing of the model's size allocated."""

    config: TrainConfig
    blueprint: Blueprint
    tokenizer: Tokenizer
    files: TextFiles
    held_out: tuple[torch.Tensor, ...]
    """Micro-batches of int64 ids."""
    choice: OptimizerChoice
    baseline_rss_nbytes: int


@dataclass(slots=True, kw_only=True)
class _Record:
    """What a run has come to so far; an interrupted one is summarised from it."""

    steps: list[StepResult] = field(default_factory=list)
    loss_before: float | None = None
    loss_after: float | None = None
    sample_before: str | None = None
    sample_after: str | None = None
    is_interrupted: bool = False
    moved: Mapping[str, Moved] = field(default_factory=dict)
    pools: Mapping[str, PoolUsage] = field(default_factory=dict)


def train(config: TrainConfig, reporter: Reporter, *, json_path: Path | None = None) -> Summary:
    """Fine-tune as `config` says, tell `reporter`, and write the summary to `json_path`.

    Ctrl-C ends it after the current step, or at once if pressed again; either way the runtime is
    closed, its files are gone, and the summary says it was interrupted. Raises ConfigError or
    BudgetError, before anything of the model's size is allocated, for settings that cannot work.
    """
    if json_path is not None and not json_path.parent.is_dir():
        raise ConfigError(f"--json {json_path}: the folder {json_path.parent} does not exist")
    transformers.logging.set_verbosity_error()
    return_freed_blocks(0)
    plan = _make_plan(config, reporter)
    record = _Record()
    with _open_runtime(config) as runtime:
        try:
            _run(runtime, plan, record, reporter)
        except KeyboardInterrupt:
            record.is_interrupted = True
        record.moved, record.pools = read_traffic(runtime), runtime.usage()
    summary = _summarise(plan, record)
    reporter.summary(summary)
    if json_path is not None:
        json_path.write_text(summary_json(summary) + "\n", encoding="utf-8")
        reporter.note(f"summary written to {json_path}")
    return summary


def _make_plan(config: TrainConfig, reporter: Reporter) -> _Plan:
    """Check everything that can be checked without the model."""
    choice = choose_optimizer(config.train)
    files = find_text_files(config.data)
    source = open_source(config.model)
    reporter.note(f"reading {source.name}")
    blueprint = draw_blueprint(source, config)
    release_unused()
    baseline_nbytes = rss_nbytes()
    tokenizer = source.open_tokenizer()
    check_vocabulary(blueprint, tokenizer)
    release_unused()
    batches = read_batches(files.held_out, tokenizer, config.data)
    held_out = tuple(itertools.islice(batches, config.train.eval_batches))
    if not held_out:
        raise ConfigError(
            f"data.paths: the {len(files.held_out)} held-out files do not fill one micro-batch of "
            f"{config.data.micro_batch} x {config.data.sequence_length} tokens; raise "
            "data.held_out_fraction or add text"
        )
    reporter.note(
        f"{blueprint.numel / 1e6:.1f} M parameters in {blueprint.num_tensors} tensors; "
        f"{len(files.training)} files to train on, {len(files.held_out)} held out"
    )
    return _Plan(
        config=config,
        blueprint=blueprint,
        tokenizer=tokenizer,
        files=files,
        held_out=held_out,
        choice=choice,
        baseline_rss_nbytes=baseline_nbytes,
    )


def _open_runtime(config: TrainConfig) -> Runtime:
    """Open the runtime with the budgets and homes of `config`."""
    return Runtime(
        device=config.budget.device,
        host=config.budget.host,
        nvme=config.budget.nvme,
        parameters=config.home.parameters,
        gradients=config.home.gradients,
        optimizer_states=config.home.optimizer,
        compute=config.train.compute,
    )


def _run(runtime: Runtime, plan: _Plan, record: _Record, reporter: Reporter) -> None:
    """Build, measure, train and measure again, keeping `record` current."""
    config = plan.config
    reporter.note("building the model in its homes")
    model = build_model(runtime, plan.blueprint, config.model)
    optimizer = runtime.optimizer(
        plan.choice.optimizer_class, model.parameters(), **plan.choice.options
    )
    batches = cycle_batches(plan.files.training, plan.tokenizer, config.data)
    with StopRequest(lambda: reporter.note("stopping after this step; Ctrl-C again: now")) as stop:
        record.loss_before = measure_loss(model, plan.held_out, lambda: stop.is_requested)
        record.sample_before = _show_sample(model, plan, reporter, "before", stop)
        steps = train_steps(
            runtime, model, optimizer, batches, config=config.train, clock=time.perf_counter
        )
        while not stop.is_requested and (result := next(steps, None)) is not None:
            record.steps.append(result)
            reporter.step(result, config.train.steps)
        if not stop.is_requested:
            record.loss_after = measure_loss(model, plan.held_out, lambda: stop.is_requested)
            record.sample_after = _show_sample(model, plan, reporter, "after", stop)
        record.is_interrupted = stop.is_requested


def _show_sample(
    model: nn.Module, plan: _Plan, reporter: Reporter, when: str, stop: StopRequest
) -> str | None:
    """Show what the model makes of the prompt; return it, or None where none is wanted."""
    sample = plan.config.sample
    if not sample.num_tokens or stop.is_requested:
        return None
    text = complete_greedily(model, plan.tokenizer, sample.prompt, sample.num_tokens)
    reporter.sample(f"sample {when}", text)
    return text


def _summarise(plan: _Plan, record: _Record) -> Summary:
    """Return the figures of a run that has ended."""
    return Summary(
        model=plan.blueprint.name,
        numel=plan.blueprint.numel,
        is_interrupted=record.is_interrupted,
        num_steps=len(record.steps),
        num_tokens=sum(step.num_tokens for step in record.steps),
        training_s=sum(step.elapsed_s for step in record.steps),
        first_loss=record.steps[0].loss if record.steps else None,
        last_loss=record.steps[-1].loss if record.steps else None,
        held_out_loss_before=record.loss_before,
        held_out_loss_after=record.loss_after,
        moved=record.moved,
        pools=record.pools,
        baseline_rss_nbytes=plan.baseline_rss_nbytes,
        peak_rss_nbytes=peak_rss_nbytes(),
        sample_before=record.sample_before,
        sample_after=record.sample_after,
    )
