"""Command line: ``zinf COMMAND``, where installed packages bring the commands.

A package adds a command with an entry point in the group ``zinf.commands`` whose name is the
command's and whose object is a Command. Only the command asked for is imported, so one that is
broken, or slow to import, costs the others nothing.

Exit codes: 0 done, 1 the command's own "no", 2 an error that one line on stderr explains, 130
interrupted.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Mapping, Sequence
from importlib import metadata
from typing import Final, Protocol, runtime_checkable

from zinf_core.errors import ConfigError, ZinfError

COMMAND_GROUP: Final = "zinf.commands"
EXIT_ERROR: Final = 2
EXIT_INTERRUPTED: Final = 130


@runtime_checkable
class Command(Protocol):
    """One subcommand."""

    name: str
    help: str
    """One line, without a full stop."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declare the command's arguments on `parser`. Imports nothing heavy."""
        ...

    def run(self, args: argparse.Namespace) -> int:
        """Do it and return the exit code. Raises ZinfError for what the user can mend."""
        ...


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line `arguments` (default: the process's) and return the exit code."""
    arguments = sys.argv[1:] if arguments is None else arguments
    entries = _find_entries()
    try:
        commands, broken = _load_commands(entries, arguments)
        args = _build_parser(commands, broken).parse_args(arguments)
        code = commands[args.command].run(args)
        sys.stdout.flush()
    except KeyboardInterrupt:
        _complain("interrupted")
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader went away; what the interpreter flushes at exit must not fail once more.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except ZinfError as exc:
        _complain(str(exc))
        return EXIT_ERROR
    except ExceptionGroup as group:
        expected, unexpected = group.split(ZinfError)
        if expected is None or unexpected is not None:
            raise
        for leaf in _leaves(expected):
            _complain(str(leaf))
        return EXIT_ERROR
    return code


def _find_entries() -> dict[str, metadata.EntryPoint]:
    """Return the installed commands by name, none of them imported."""
    return {entry.name: entry for entry in metadata.entry_points(group=COMMAND_GROUP)}


def _load_commands(
    entries: Mapping[str, metadata.EntryPoint], arguments: Sequence[str]
) -> tuple[dict[str, Command], dict[str, str]]:
    """Return (commands, reasons why others are not available), by name.

    Only the command that `arguments` starts with is imported; all of them if it starts with none.
    Raises ConfigError if the one asked for is broken.
    """
    asked = arguments[0] if arguments else ""
    if asked in entries:
        return {asked: _load(entries[asked])}, {}
    commands: dict[str, Command] = {}
    broken: dict[str, str] = {}
    for name in sorted(entries):
        try:
            commands[name] = _load(entries[name])
        except ConfigError as exc:
            broken[name] = str(exc)
    return commands, broken


def _load(entry: metadata.EntryPoint) -> Command:
    """Import one command. Raises ConfigError whatever goes wrong in its module."""
    what = f"command {entry.name!r} ({entry.value})"
    try:
        command = entry.load()
    except Exception as exc:
        reason = f"{type(exc).__name__}: {exc}"
        raise ConfigError(
            f"{what} cannot be imported: {reason}{_install_hint(entry, exc)}"
        ) from exc
    if not isinstance(command, Command):
        kind = type(command).__name__
        raise ConfigError(f"{what} is a {kind}, without name, help, add_arguments and run")
    return command


def _install_hint(entry: metadata.EntryPoint, error: Exception) -> str:
    """Return how to install the module that `error` misses, if an extra brings it."""
    if not isinstance(error, ModuleNotFoundError) or not error.name or entry.dist is None:
        return ""
    missing = re.escape(error.name.partition(".")[0])
    for requirement in entry.dist.requires or ():
        match = re.match(rf"{missing}\b.*\bextra *== *['\"]([\w-]+)", requirement)
        if match:
            return f'; install it with: pip install "{entry.dist.name}[{match[1]}]"'
    return ""


def _build_parser(
    commands: Mapping[str, Command], broken: Mapping[str, str]
) -> argparse.ArgumentParser:
    """Return the parser of all `commands`; the help ends with what is `broken` and why."""
    epilog = "\n".join(("not available:", *broken.values())) if broken else None
    parser = argparse.ArgumentParser(
        prog="zinf",
        description="Train models whose states do not fit in memory.",
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"zinf {metadata.version('zinf')}")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, command in commands.items():
        summary = command.help.replace("%", "%%")
        subparser = subparsers.add_parser(name, help=summary, description=command.help)
        command.add_arguments(subparser)
    return parser


def _leaves(group: BaseExceptionGroup[ZinfError]) -> list[BaseException]:
    """Return the errors of `group` and of the groups in it."""
    leaves: list[BaseException] = []
    for exc in group.exceptions:
        leaves += _leaves(exc) if isinstance(exc, BaseExceptionGroup) else [exc]
    return leaves


def _complain(message: str) -> None:
    """Write one message to standard error."""
    sys.stderr.write(f"zinf: {message}\n")
    sys.stderr.flush()


if __name__ == "__main__":
    sys.exit(main())
