"""Summary: what a training run did, and its figures in words and as JSON."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from zinf_core.runtime.pool import PoolUsage
from zinf_core.units import format_nbytes
from zinf_torch.train.loop import Moved


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """One run, finished or interrupted."""

    model: str
    numel: int
    """Parameters, tied ones once."""
    is_interrupted: bool
    num_steps: int
    """Optimizer steps done."""
    num_tokens: int
    """Tokens trained on."""
    training_s: float
    """Seconds in those steps."""
    first_loss: float | None
    last_loss: float | None
    held_out_loss_before: float | None
    held_out_loss_after: float | None
    """None when the run was interrupted before it was measured."""
    moved: Mapping[str, Moved]
    """By tier, over the whole run: loading, measuring and sampling included."""
    pools: Mapping[str, PoolUsage]
    """By memory, at the end."""
    baseline_rss_nbytes: int
    """Physical memory held after imports, before anything of the run."""
    peak_rss_nbytes: int
    sample_before: str | None
    sample_after: str | None

    @property
    def rss_growth_nbytes(self) -> int:
        """Peak of physical memory over the baseline."""
        return self.peak_rss_nbytes - self.baseline_rss_nbytes

    @property
    def tokens_per_s(self) -> float:
        """Tokens trained on per second of training; 0 before the first step."""
        return self.num_tokens / self.training_s if self.training_s else 0.0


def summary_rows(summary: Summary) -> Iterator[tuple[str, str]]:
    """Iterate over (what, how much) for people."""
    yield "model", f"{summary.model}, {summary.numel / 1e6:.1f} M parameters"
    ended = " (interrupted)" if summary.is_interrupted else ""
    yield "steps", f"{summary.num_steps}{ended} in {summary.training_s:.1f} s"
    yield "tokens", f"{summary.num_tokens}, {summary.tokens_per_s:.1f} per second"
    yield "training loss", _change(summary.first_loss, summary.last_loss)
    yield "held-out loss", _change(summary.held_out_loss_before, summary.held_out_loss_after)
    for name, moved in summary.moved.items():
        if not moved.read_nbytes and not moved.written_nbytes:
            continue
        read, written = format_nbytes(moved.read_nbytes), format_nbytes(moved.written_nbytes)
        yield f"{name} traffic", f"{read} read, {written} written"
    for name, pool in summary.pools.items():
        peak, budget = format_nbytes(pool.peak_nbytes), format_nbytes(pool.budget_nbytes)
        yield f"{name} peak", f"{peak} tracked of a budget of {budget}"
    growth = format_nbytes(summary.rss_growth_nbytes)
    yield (
        "peak RSS",
        f"{format_nbytes(summary.peak_rss_nbytes)}, {growth} over "
        f"{format_nbytes(summary.baseline_rss_nbytes)} after imports",
    )


def summary_json(summary: Summary) -> str:
    """Return the summary as one JSON object; sizes are bytes, times seconds."""
    fields = dataclasses.asdict(summary)
    fields["rss_growth_nbytes"] = summary.rss_growth_nbytes
    fields["tokens_per_s"] = summary.tokens_per_s
    return json.dumps(fields, indent=2)


def _change(before: float | None, after: float | None) -> str:
    """Return ``1.77 -> 1.52 (-0.25)``, as far as both are known."""
    if before is None:
        return "not measured"
    if after is None:
        return f"{before:.4f} -> not measured"
    return f"{before:.4f} -> {after:.4f} ({after - before:+.4f})"
