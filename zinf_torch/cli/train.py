"""``zinf train``: fine-tune a causal language model on text files."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Final

from zinf_core.cli import EXIT_INTERRUPTED
from zinf_core.config import load_toml
from zinf_core.errors import ConfigError
from zinf_torch.train.config import TrainConfig


class TrainCommand:
    """The subcommand."""

    name = "train"
    help = "fine-tune a Hugging Face causal language model on text files, within memory budgets"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declare the configuration file and what changes it."""
        parser.add_argument("config", type=Path, metavar="CONFIG.toml", help="what to do")
        parser.add_argument(
            "--set",
            action="append",
            default=[],
            dest="overrides",
            metavar="KEY=VALUE",
            help="change one setting, e.g. train.steps=4 or budget.device=1GiB; may be repeated",
        )
        parser.add_argument(
            "--json", type=Path, metavar="FILE", help="also write the summary to FILE"
        )

    def run(self, args: argparse.Namespace) -> int:
        """Train, and return 0, or 130 after Ctrl-C. Raises ZinfError for what cannot work."""
        config = load_toml(TrainConfig, args.config, args.overrides)
        # The configuration is read first: a slip in it should not cost the wait for these imports.
        try:
            from zinf_torch.train.command import train  # noqa: PLC0415
            from zinf_torch.train.report import open_reporter  # noqa: PLC0415
        except ModuleNotFoundError as exc:
            raise ConfigError(
                f'zinf train needs {exc.name}; install it with: pip install "zinf[torch,hf]"'
            ) from exc
        with open_reporter(sys.stdout) as reporter:
            summary = train(config, reporter, json_path=args.json)
        return EXIT_INTERRUPTED if summary.is_interrupted else 0


TRAIN: Final = TrainCommand()
