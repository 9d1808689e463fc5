"""Settings of ``zinf train``, section by section of its TOML file."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Final

from zinf_core.config import Nbytes, Within
from zinf_core.errors import ConfigError

PYTHON_STDLIB: Final = "python-stdlib"
"""In `data.paths`: the sources of the running Python's standard library."""

_HOMES: Final = ("device", "host", "nvme")

PositiveInt = Annotated[int, Within(minimum=1)]
NaturalInt = Annotated[int, Within(minimum=0)]
PositiveFloat = Annotated[float, Within(above=0)]
NaturalFloat = Annotated[float, Within(minimum=0)]


class FloatType(enum.Enum):
    """Number format of the parameters that compute uses."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    """With fp32 master weights, which the optimizer updates."""


class Schedule(enum.Enum):
    """What the learning rate does after its warm-up."""

    CONSTANT = "constant"
    LINEAR = "linear"
    """Falls in a straight line that would reach 0 one step after the last."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Which model: exactly one of `path`, `gguf` and `config`."""

    path: Path | None = None
    """Folder with ``config.json``, safetensors files and a tokenizer."""
    gguf: Path | None = None
    """GGUF file, quantised or not."""
    config: dict[str, object] | None = None
    """Settings of a Hugging Face configuration, ``model_type`` among them; weights are random."""
    dtype: FloatType = FloatType.BFLOAT16
    seed: NaturalInt = 0
    """Of random weights and of dropout."""
    gradient_checkpointing: bool = False
    """Recompute each layer's activations in backward instead of keeping them."""

    def __post_init__(self) -> None:
        """Refuse no source or several."""
        sources = [name for name in ("path", "gguf", "config") if getattr(self, name) is not None]
        if len(sources) != 1:
            found = " and ".join(sources) or "none"
            raise ConfigError(f"needs exactly one of path, gguf and config, found {found}")
        if self.config is not None and not isinstance(self.config.get("model_type"), str):
            raise ConfigError('config needs a model_type, e.g. "llama"')


@dataclass(frozen=True, slots=True, kw_only=True)
class DataConfig:
    """Which text, and how it is cut."""

    paths: tuple[str, ...]
    """Files, folders (searched for `suffixes`), globs, or ``"python-stdlib"``."""
    suffixes: tuple[str, ...] = (".md", ".py", ".rst", ".txt")
    held_out_fraction: Annotated[float, Within(above=0, below=1)] = 0.05
    """Share of the files kept from training; at least one file."""
    sequence_length: Annotated[int, Within(minimum=2)] = 256
    """Tokens."""
    micro_batch: PositiveInt = 1
    """Sequences in one forward and backward."""
    seed: NaturalInt = 0
    """Of the order of files and of which are held out."""

    def __post_init__(self) -> None:
        """Refuse an empty list."""
        if not self.paths:
            raise ConfigError("paths is empty; name files, folders or globs")


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopConfig:
    """The training loop."""

    steps: PositiveInt
    """Optimizer steps."""
    compute: str = "cpu"
    """``"cpu"`` or a CUDA device, ``"cuda:0"``."""
    accumulation_steps: PositiveInt = 1
    """Micro-batches per optimizer step."""
    optimizer: str = "AdamW"
    """Name of a class in torch.optim."""
    learning_rate: PositiveFloat = 1e-4
    weight_decay: NaturalFloat | None = None
    """None: the optimizer's own default."""
    betas: tuple[float, float] | None = None
    """None: the optimizer's own default."""
    optimizer_options: dict[str, object] = field(default_factory=dict)
    """Further keyword arguments of the optimizer."""
    clip_norm: PositiveFloat | None = None
    """Global gradient norm to clip to; None: no clipping."""
    warmup: NaturalInt = 0
    """Optimizer steps in which the learning rate grows to its value."""
    schedule: Schedule = Schedule.CONSTANT
    eval_batches: PositiveInt = 8
    """Micro-batches of held-out text that the held-out loss is the mean of."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleConfig:
    """Greedy sample shown before and after."""

    prompt: str = "def "
    num_tokens: NaturalInt = 24
    """0: no sample."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetConfig:
    """Bytes the run may use of each memory, and the folder for what lives on NVMe."""

    device: Nbytes
    host: Nbytes
    nvme: Path | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class HomeConfig:
    """Where each model state lives when idle: ``"device"``, ``"host"``, ``"nvme"`` (the folder of
    `budget.nvme`), or the URL of a tier."""

    parameters: str = "nvme"
    gradients: str = "nvme"
    optimizer: str = "nvme"

    def __post_init__(self) -> None:
        """Refuse what is neither a name nor a URL."""
        for name in ("parameters", "gradients", "optimizer"):
            home = getattr(self, name)
            if home not in _HOMES and "://" not in home:
                raise ConfigError(
                    f"{name} = {home!r} is not one of {', '.join(_HOMES)} or a URL, scheme://path"
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    """The whole file."""

    model: ModelConfig
    data: DataConfig
    train: LoopConfig
    budget: BudgetConfig
    home: HomeConfig = field(default_factory=HomeConfig)
    sample: SampleConfig = field(default_factory=SampleConfig)

    def __post_init__(self) -> None:
        """Refuse sections that contradict one another."""
        homes = (self.home.parameters, self.home.gradients, self.home.optimizer)
        if "nvme" in homes and self.budget.nvme is None:
            raise ConfigError(
                "budget.nvme is missing: [home] puts states on nvme; name a folder on the drive"
            )
