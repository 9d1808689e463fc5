"""``zinf doctor``: what this machine offers, what is missing, and how to get it."""

from __future__ import annotations

import argparse
import dataclasses
import enum
import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Final

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from zinf_core.registry import tier_schemes
from zinf_core.units import MiB, format_nbytes
from zinf_storage.machine import (
    Cuda,
    Memory,
    Package,
    find_packages,
    gds_problem,
    probe_cuda,
    python_version,
    read_memory,
)
from zinf_storage.probe import IoPath, PathProbe, probe_path

_LOW_LOCKABLE_NBYTES: Final = 64 * MiB
_ALWAYS_USED: Final = frozenset({"torch", "transformers", "gguf", "safetensors"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """Everything ``zinf doctor`` found."""

    zinf: str
    python: str
    packages: tuple[Package, ...]
    tiers: tuple[str, ...]
    cuda: Cuda
    gds_problem: str | None
    """Why GPUDirect Storage cannot be used; None if it may."""
    storage: PathProbe
    memory: Memory
    advice: tuple[str, ...]
    """What is missing and how to get it, one sentence each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """One titled list of facts."""

    title: str
    rows: tuple[tuple[str, str], ...]


class DoctorCommand:
    """The subcommand."""

    name = "doctor"
    help = "say what this machine offers, what is missing and how to get it"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declare the folder to probe and the output format."""
        parser.add_argument(
            "path",
            nargs="?",
            type=Path,
            default=Path(tempfile.gettempdir()),
            metavar="PATH",
            help="folder on the drive to probe (default: %(default)s)",
        )
        parser.add_argument("--json", action="store_true", help="write one JSON object")

    def run(self, args: argparse.Namespace) -> int:
        """Write the diagnosis to standard output. Raises ConfigError for a bad PATH."""
        diagnosis = diagnose(args.path)
        if args.json:
            sys.stdout.write(to_json(diagnosis) + "\n")
        elif sys.stdout.isatty():
            _show_tables(Console(), to_sections(diagnosis))
        else:
            sys.stdout.writelines(f"{line}\n" for line in to_lines(to_sections(diagnosis)))
        return 0


DOCTOR: Final = DoctorCommand()


def diagnose(path: Path) -> Diagnosis:
    """Look at the machine, and at the drive that holds `path`. Raises ConfigError if it cannot."""
    storage = probe_path(path)
    packages = find_packages()
    cuda = probe_cuda()
    memory = read_memory()
    return Diagnosis(
        zinf=metadata.version("zinf"),
        python=python_version(),
        packages=packages,
        tiers=tier_schemes(),
        cuda=cuda,
        gds_problem=gds_problem(cuda, packages),
        storage=storage,
        memory=memory,
        advice=tuple(_advise(storage, packages, cuda, memory)),
    )


def to_json(diagnosis: Diagnosis) -> str:
    """Return `diagnosis` as JSON; sizes are bytes."""
    return json.dumps(dataclasses.asdict(diagnosis), default=_jsonable, indent=2)


def to_sections(diagnosis: Diagnosis) -> tuple[Section, ...]:
    """Return `diagnosis` in words."""
    versions = [("zinf", diagnosis.zinf), ("python", diagnosis.python)]
    versions += [(package.name, _package_text(package)) for package in diagnosis.packages]
    return (
        Section(title="versions", rows=tuple(versions)),
        Section(
            title="tiers", rows=tuple((f"{name}://", "registered") for name in diagnosis.tiers)
        ),
        Section(title="device", rows=tuple(_device_rows(diagnosis))),
        Section(title="storage", rows=tuple(_storage_rows(diagnosis.storage))),
        Section(title="memory", rows=tuple(_memory_rows(diagnosis.memory))),
        Section(
            title="advice",
            rows=tuple((str(number), text) for number, text in enumerate(diagnosis.advice, 1))
            or (("-", "nothing is missing"),),
        ),
    )


def to_lines(sections: Sequence[Section]) -> Iterator[str]:
    """Iterate over plain lines, one fact each, every one of them greppable."""
    for section in sections:
        for label, value in section.rows:
            yield f"{section.title}: {label}: {value}"


def _show_tables(console: Console, sections: Sequence[Section]) -> None:
    """Draw one table per section."""
    for section in sections:
        table = Table(title=section.title, title_justify="left", box=box.SIMPLE, show_header=False)
        table.add_column(style="bold", no_wrap=True)
        table.add_column(overflow="fold")
        for label, value in section.rows:
            table.add_row(Text(label), Text(value))
        console.print(table)


def _device_rows(diagnosis: Diagnosis) -> Iterator[tuple[str, str]]:
    """Iterate over what is known about CUDA."""
    cuda = diagnosis.cuda
    present = f"{cuda.num_devices} device(s), driver for CUDA {cuda.driver}"
    yield "cuda", f"not available: {cuda.problem}" if cuda.problem else present
    problem = diagnosis.gds_problem
    yield "gds", f"not available: {problem}" if problem else "may work: driver and kvikio are here"


def _storage_rows(storage: PathProbe) -> Iterator[tuple[str, str]]:
    """Iterate over what is known about the drive."""
    yield "path", str(storage.path)
    yield "file system", f"{storage.filesystem} on {storage.mount_point or 'an unknown mount'}"
    yield "free", f"{format_nbytes(storage.free_nbytes)} of {format_nbytes(storage.total_nbytes)}"
    if storage.io_path is IoPath.POSIX_DIRECT:
        yield "O_DIRECT", "accepted"
    else:
        yield "O_DIRECT", f"refused: {storage.refusal}"
    if storage.alignment is None:
        yield "direct alignment", "not told by this kernel; 4096 bytes are used"
    else:
        memory, offset = storage.alignment.memory_nbytes, storage.alignment.offset_nbytes
        yield "direct alignment", f"memory {memory} bytes, offset {offset} bytes"
    yield "path taken", storage.io_path.value if storage.io_path else "none: not writable"


def _memory_rows(memory: Memory) -> Iterator[tuple[str, str]]:
    """Iterate over the limits on memory."""
    total, available = format_nbytes(memory.total_nbytes), format_nbytes(memory.available_nbytes)
    yield "ram", f"{available} available of {total}"
    yield "cgroup limit", _limit_text(memory.cgroup_limit_nbytes)
    yield "lockable", _limit_text(memory.lockable_nbytes)
    yield "huge pages", memory.huge_pages


def _package_text(package: Package) -> str:
    """Return the version of a package, or how to get it, and what it is for."""
    if package.version is not None:
        return f"{package.version} ({package.purpose})"
    remedy = f'; pip install "zinf[{package.extra}]"' if package.extra else ""
    return f"not installed ({package.purpose}{remedy})"


def _limit_text(nbytes: int | None) -> str:
    """Return a limit for people."""
    return "unlimited" if nbytes is None else format_nbytes(nbytes)


def _advise(
    storage: PathProbe, packages: Sequence[Package], cuda: Cuda, memory: Memory
) -> Iterator[str]:
    """Iterate over what is missing and how to get it."""
    for package in packages:
        is_for_cuda = (package.extra or "").startswith("cuda")
        is_wanted = package.name in _ALWAYS_USED or (is_for_cuda and cuda.num_devices > 0)
        if package.version is None and package.extra and is_wanted:
            advice = f'{package.purpose}: pip install "zinf[{package.extra}]" brings {package.name}'
            yield advice.replace("13", "12") if cuda.driver and cuda.driver < "13" else advice
    if not storage.is_writable:
        yield f"{storage.path} is not usable ({storage.refusal}); give a folder you may write to"
    elif storage.io_path is IoPath.POSIX_BUFFERED:
        yield (
            f"{storage.path} ({storage.filesystem}) refuses O_DIRECT, so transfers pass through "
            "the page cache; a folder on a local ext4 or XFS drive is faster"
        )
    lockable = memory.lockable_nbytes
    if cuda.num_devices and lockable is not None and lockable < _LOW_LOCKABLE_NBYTES:
        yield f"only {format_nbytes(lockable)} may be locked; raise it with ulimit -l"


def _jsonable(value: object) -> str:
    """Return what json cannot write as text."""
    if isinstance(value, enum.Enum):
        return str(value.value)
    return str(value)
