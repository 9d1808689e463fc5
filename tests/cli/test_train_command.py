"""``zinf train`` as a whole, against a plain PyTorch loop."""

import io
import itertools
import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from zinf_core.cli import main
from zinf_core.config import from_mapping
from zinf_core.errors import BudgetTooSmallError, ConfigError
from zinf_torch.train.command import train
from zinf_torch.train.config import TrainConfig
from zinf_torch.train.data import cycle_batches, find_text_files, read_batches
from zinf_torch.train.report import LineReporter
from zinf_torch.train.tokenizer import ByteTokenizer

pytestmark = pytest.mark.slow

SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
}
TEXT = "def f(a, b):\n    return [a, b, a + b]\n"


@pytest.fixture
def settings(tmp_path: Path) -> dict[str, dict[str, object]]:
    for number in range(8):
        (tmp_path / f"{number}.py").write_text(TEXT * (number + 3), encoding="utf-8")
    return {
        "model": {"config": {"model_type": "llama", **SIZES}, "dtype": "float32", "seed": 7},
        "data": {
            "paths": [str(tmp_path)],
            "sequence_length": 24,
            "micro_batch": 2,
            "held_out_fraction": 0.25,
        },
        "train": {
            "steps": 4,
            "accumulation_steps": 2,
            "learning_rate": 0.01,
            "weight_decay": 0.1,
            "clip_norm": 0.5,
            "warmup": 2,
            "eval_batches": 2,
        },
        "budget": {"device": "256KiB", "host": "512KiB", "nvme": str(tmp_path / "st ätes")},
        "sample": {"prompt": "def ", "num_tokens": 5},
    }


RATES = {"constant": (1 / 3, 2 / 3, 1.0, 1.0), "linear": (1 / 3, 2 / 3, 1 / 2, 1 / 4)}
"""Factors on the learning rate: two steps of warm-up, four steps in all."""


def plain_training(config: TrainConfig) -> tuple[list[float], list[float], list[str]]:
    """Return (step losses, held-out losses, samples) of the loop anyone would write."""
    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_config(LlamaConfig(vocab_size=256, **SIZES))
    files, tokenizer = find_text_files(config.data), ByteTokenizer()
    held_out = list(itertools.islice(read_batches(files.held_out, tokenizer, config.data), 2))
    batches = cycle_batches(files.training, tokenizer, config.data)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
    losses, held_out_losses, samples = [], [], []

    def measure() -> None:
        with torch.no_grad():
            found = [model(input_ids=batch, labels=batch).loss.item() for batch in held_out]
            made = model.generate(
                torch.tensor([list(b"def ")]), max_new_tokens=5, do_sample=False, eos_token_id=None
            )
        held_out_losses.append(sum(found) / len(found))
        samples.append(tokenizer.decode(made[0].tolist()))

    measure()
    for factor in RATES[config.train.schedule.value]:
        optimizer.param_groups[0]["lr"] = 0.01 * factor
        parts = []
        for batch in itertools.islice(batches, 2):
            loss = model(input_ids=batch, labels=batch).loss
            (loss / 2).backward()
            parts.append(loss.item())
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(sum(parts) / 2)
    measure()
    return losses, held_out_losses, samples


@pytest.mark.parametrize(("checkpointing", "schedule"), [(False, "constant"), (True, "linear")])
def test_same_losses_as_a_plain_loop(
    settings: dict[str, dict[str, object]], checkpointing: bool, schedule: str, tmp_path: Path
) -> None:
    """Catches a lost micro-batch, a wrong learning rate, or clipping left out."""
    settings["model"]["gradient_checkpointing"] = checkpointing
    settings["train"]["schedule"] = schedule
    config = from_mapping(TrainConfig, settings)
    stream = io.StringIO()
    summary = train(config, LineReporter(stream), json_path=tmp_path / "summary.json")
    losses, held_out_losses, samples = plain_training(config)
    assert [summary.first_loss, summary.last_loss] == [losses[0], losses[-1]]
    assert [summary.held_out_loss_before, summary.held_out_loss_after] == held_out_losses
    assert [summary.sample_before, summary.sample_after] == samples
    assert summary.num_tokens == 4 * 2 * 2 * 24
    assert not summary.is_interrupted
    assert all(pool.peak_nbytes <= pool.budget_nbytes for pool in summary.pools.values())
    assert summary.moved["nvme"].read_nbytes > 0
    assert not (tmp_path / "st ätes").exists()
    written = json.loads((tmp_path / "summary.json").read_text(encoding="utf-8"))
    assert written["held_out_loss_after"] == summary.held_out_loss_after
    assert [line.split()[1] for line in stream.getvalue().splitlines() if "step " in line] == [
        "1/4", "2/4", "3/4", "4/4",
    ]  # fmt: skip


def test_bfloat16_learns(settings: dict[str, dict[str, object]]) -> None:
    """Catches bf16 parameters that stand still because the optimizer's small updates round away."""
    settings["model"]["dtype"] = "bfloat16"
    settings["train"] |= {"steps": 12, "accumulation_steps": 1}
    summary = train(from_mapping(TrainConfig, settings), LineReporter(io.StringIO()))
    assert summary.held_out_loss_before is not None
    assert summary.held_out_loss_after is not None
    assert summary.held_out_loss_after < summary.held_out_loss_before - 1


@pytest.mark.parametrize(
    ("section", "key", "value", "error", "told"),
    [
        ("budget", "device", "60KiB", BudgetTooSmallError, "device budget of 60.00 KiB"),
        ("budget", "host", "64KiB", BudgetTooSmallError, "host budget of 64.00 KiB"),
        ("data", "sequence_length", 4000, ConfigError, "longer than the 2048 positions"),
        ("data", "micro_batch", 400, ConfigError, "held-out files do not fill one micro-batch"),
        ("train", "optimizer", "Adaam", ConfigError, "did you mean Adam"),
    ],
)
def test_refused_before_training(
    settings: dict[str, dict[str, object]],
    section: str,
    key: str,
    value: object,
    error: type[Exception],
    told: str,
    tmp_path: Path,
) -> None:
    """Catches a run that starts although it cannot end, or leaves files when refused."""
    settings[section][key] = value
    with pytest.raises(error, match=told):
        train(from_mapping(TrainConfig, settings), LineReporter(io.StringIO()))
    assert not (tmp_path / "st ätes").exists()


def write_toml(settings: dict[str, dict[str, object]], path: Path) -> None:
    """Write `settings` as TOML; JSON values are TOML values, tables apart."""
    lines = []
    model_config: Any = settings["model"].pop("config")
    for title, section in {**settings, "model.config": model_config}.items():
        lines.append(f"[{title}]")
        lines += [f"{key} = {json.dumps(value)}" for key, value in section.items()]
    path.write_text("\n".join(lines), encoding="utf-8")


def test_command_line(
    settings: dict[str, dict[str, object]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches overrides that do not arrive, and errors without the file's name."""
    file = tmp_path / "run.toml"
    write_toml(settings, file)
    assert main(["train", str(file), "--set", "train.steps=1", "--set", "sample.num_tokens=0"]) == 0
    out = capsys.readouterr().out
    assert "step 1/1  loss " in out
    assert "sample" not in out
    assert main(["train", str(file), "--set", "train.stepz=1"]) == 2
    err = capsys.readouterr().err
    assert err == (
        f"zinf: {file}: train.stepz = 1 is not a known setting; did you mean train.steps?\n"
    )
    assert main(["train", str(file), "--json", str(tmp_path / "no" / "where.json")]) == 2
    assert "does not exist" in capsys.readouterr().err


@pytest.mark.parametrize("presses", [1, 2])
def test_ctrl_c(settings: dict[str, dict[str, object]], presses: int, tmp_path: Path) -> None:
    """Catches a run that dies with a traceback, leaves its files, or loses what it had learnt."""
    settings["train"]["steps"] = 100_000
    file = tmp_path / "run.toml"
    write_toml(settings, file)
    # a shell that starts its jobs in the background has them ignore Ctrl-C
    program = (
        "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
        "from zinf_core.cli import main; raise SystemExit(main())"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program, "train", str(file)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        encoding="utf-8",
    )
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        lines.append(line)
        if line.startswith("step 2/"):
            process.send_signal(signal.SIGINT)
        if presses == 2 and line.startswith("stopping after this step"):
            process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert err == ""
    shown = "".join(lines)
    assert "(interrupted)" in shown
    assert "held-out loss: " in shown
    assert "-> not measured" in shown
    assert not (tmp_path / "st ätes").exists()
