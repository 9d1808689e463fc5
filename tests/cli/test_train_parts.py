"""Parts of the training command: optimizer choice, interrupts, reports, memory."""

import io
import json
import os
import signal
import threading

import pytest
import torch
from rich.console import Console

from zinf_core.config import from_mapping
from zinf_core.errors import ConfigError
from zinf_core.runtime.pool import PoolUsage
from zinf_torch.train.config import LoopConfig, TrainConfig
from zinf_torch.train.interrupt import StopRequest
from zinf_torch.train.loop import Moved, StepResult
from zinf_torch.train.memory import release_unused, rss_nbytes
from zinf_torch.train.optimizer_choice import choose_optimizer
from zinf_torch.train.report import LineReporter, TerminalReporter, open_reporter
from zinf_torch.train.summary import Summary, summary_json

MIB = 1 << 20
POOL = PoolUsage(
    budget_nbytes=8 * MIB, leased_nbytes=MIB, cached_nbytes=2 * MIB, peak_nbytes=4 * MIB
)
STEP = StepResult(
    number=3,
    loss=1.25,
    num_tokens=100,
    elapsed_s=0.5,
    moved={"nvme": Moved(read_nbytes=3 * MIB, written_nbytes=5 * MIB), "host": Moved()},
    pools={"device": POOL},
)
SUMMARY = Summary(
    model="tiny",
    numel=1_500_000,
    is_interrupted=True,
    num_steps=3,
    num_tokens=300,
    training_s=1.5,
    first_loss=2.0,
    last_loss=1.25,
    held_out_loss_before=2.5,
    held_out_loss_after=None,
    moved=STEP.moved,
    pools=STEP.pools,
    baseline_rss_nbytes=100 * MIB,
    peak_rss_nbytes=130 * MIB,
    sample_before="a [bold]b[/bold]",
    sample_after=None,
)


@pytest.mark.parametrize(
    ("settings", "options"),
    [
        ({}, {"lr": 1e-4}),
        ({"betas": (0.8, 0.9), "weight_decay": 0.1}, None),
        ({"optimizer": "SGD", "optimizer_options": {"momentum": 0.9}}, None),
        ({"optimizer": "Adagrad", "weight_decay": 0.0}, {"lr": 1e-4, "weight_decay": 0.0}),
    ],
)
def test_options_reach_the_optimizer(
    settings: dict[str, object], options: dict[str, object] | None
) -> None:
    """Catches an option that is dropped, and a default of ours that replaces torch's."""
    choice = choose_optimizer(LoopConfig(steps=1, **settings))  # type: ignore[arg-type]
    made = choice.optimizer_class([torch.zeros(1)], **choice.options)
    assert type(made) is getattr(torch.optim, str(settings.get("optimizer", "AdamW")))
    asked = {"lr": 1e-4, **settings}
    asked |= asked.pop("optimizer_options", {})  # type: ignore[arg-type, operator]
    asked.pop("optimizer", None)
    assert {name: made.param_groups[0][name] for name in asked} == asked
    assert options is None or choice.options == options


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"optimizer": "AdamV"}, "did you mean Adam"),
        ({"optimizer": "lr_scheduler"}, "is no class of torch.optim"),
        ({"optimizer": "LBFGS"}, "evaluates the loss several times"),
        ({"optimizer": "SGD", "betas": (0.1, 0.2)}, "SGD takes no 'betas'"),
        ({"optimizer_options": {"epz": 1.0}}, "takes no 'epz'; did you mean eps?"),
        ({"optimizer_options": {"params": []}}, "takes no 'params'"),
        ({"optimizer_options": {"lr": 1.0}}, "lr is set in \\[train\\] already"),
    ],
)
def test_optimizer_refusals(settings: dict[str, object], told: str) -> None:
    """Catches a setting that would be ignored, or a TypeError after the model was built."""
    with pytest.raises(ConfigError, match=told):
        choose_optimizer(LoopConfig(steps=1, **settings))  # type: ignore[arg-type]


def test_sections_that_contradict() -> None:
    """Catches states sent to a tier that has no folder."""
    base: dict[str, object] = {
        "model": {"config": {"model_type": "llama"}},
        "data": {"paths": ["x"]},
        "train": {"steps": 2},
        "budget": {"device": "1MiB", "host": "1MiB"},
    }
    with pytest.raises(ConfigError, match=r"budget\.nvme is missing"):
        from_mapping(TrainConfig, base)
    homes = {"parameters": "host", "gradients": "device", "optimizer": "host"}
    from_mapping(TrainConfig, {**base, "home": homes})


def test_ctrl_c_asks_first_and_then_stops() -> None:
    """Catches a first Ctrl-C that tears a step apart, a second that is ignored, a handler left."""
    before = signal.getsignal(signal.SIGINT)
    told: list[str] = []
    with StopRequest(lambda: told.append("stopping")) as stop:
        assert not stop.is_requested
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.is_requested
        assert told == ["stopping"]
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before
    with pytest.raises(ZeroDivisionError), StopRequest(lambda: None):
        raise ZeroDivisionError
    assert signal.getsignal(signal.SIGINT) is before


def test_ctrl_c_outside_the_main_thread() -> None:
    """Catches training from a thread that dies on `signal only works in main thread`."""
    seen: list[bool] = []

    def run() -> None:
        with StopRequest(lambda: None) as stop:
            seen.append(stop.is_requested)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert seen == [False]


def test_lines_have_every_figure() -> None:
    """Catches a figure that the issue asks for and the log lacks, and control codes in a log."""
    stream = io.StringIO()
    with open_reporter(stream) as reporter:
        assert isinstance(reporter, LineReporter)
        reporter.step(STEP, 9)
        reporter.sample("sample", "a\nb")
        reporter.summary(SUMMARY)
    assert stream.getvalue().splitlines() == [
        "step 3/9  loss 1.2500  tokens/s 200.0  nvme read 3.00 MiB  nvme written 5.00 MiB  "
        "device 3.0/8.0 MiB",
        "sample:",
        "    a",
        "    b",
        "model: tiny, 1.5 M parameters",
        "steps: 3 (interrupted) in 1.5 s",
        "tokens: 300, 200.0 per second",
        "training loss: 2.0000 -> 1.2500 (-0.7500)",
        "held-out loss: 2.5000 -> not measured",
        "nvme traffic: 3.00 MiB read, 5.00 MiB written",
        "device peak: 4.00 MiB tracked of a budget of 8.00 MiB",
        "peak RSS: 130.00 MiB, 30.00 MiB over 100.00 MiB after imports",
    ]


def test_terminal_shows_the_same() -> None:
    """Catches figures lost between the two forms, markup in model output, and a cursor left off."""
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=True, width=200, color_system=None)
    with TerminalReporter(console) as reporter:
        reporter.note("building [the] model")
        reporter.step(STEP, 9)
        reporter.sample("sample before", "a [bold]b[/bold]")
        reporter.summary(SUMMARY)
    shown = stream.getvalue()
    for part in (
        "building [the] model", "loss 1.2500", "tokens/s 200.0", "nvme read 3.00 MiB",
        "nvme written 5.00 MiB", "device 3.0/8.0 MiB", "3/9", "a [bold]b[/bold]",
        "2.0000 -> 1.2500", "130.00 MiB, 30.00 MiB over",
    ):  # fmt: skip
        assert part in shown, part
    assert shown.count("\x1b[?25l") == shown.count("\x1b[?25h") == 1


def test_summary_json() -> None:
    """Catches figures that programs cannot read back."""
    read = json.loads(summary_json(SUMMARY))
    assert read["held_out_loss_after"] is None
    assert read["moved"]["nvme"] == {"read_nbytes": 3 * MIB, "written_nbytes": 5 * MIB}
    assert read["pools"]["device"]["peak_nbytes"] == 4 * MIB
    assert read["rss_growth_nbytes"] == 30 * MIB
    assert read["tokens_per_s"] == 200.0


def test_released_memory_leaves_the_process() -> None:
    """Catches a baseline or peak inflated by freed memory that the C library holds on to."""
    release_unused()
    before = rss_nbytes()
    hoard = [bytes(1000) for _ in range(100_000)]
    assert rss_nbytes() - before > 80 * 1000**2
    last = hoard[-1]  # on top of the heap, which therefore does not shrink by itself
    del hoard
    release_unused()
    assert rss_nbytes() - before < 20 * 1000**2
    assert len(last) == 1000
