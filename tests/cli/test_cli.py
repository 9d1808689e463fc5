"""Command line: finding commands, exit codes, and errors on one line."""

from collections.abc import Callable

import pytest

from zinf_core.cli import main

COMMAND = """
import os, sys
from zinf_core.errors import BudgetTooSmallError, TransferError

class Command:
    name = "shout"
    help = "say 100 % of it loudly"
    def add_arguments(self, parser):
        parser.add_argument("word")
    def run(self, args):
        if args.word == "budget":
            raise BudgetTooSmallError("device budget of 1 B is too small; raise it")
        if args.word == "group":
            inner = ExceptionGroup("one", [TransferError(5, "second")])
            raise ExceptionGroup("two", [TransferError(5, "first"), inner])
        if args.word == "mixed":
            raise ExceptionGroup("two", [TransferError(5, "first"), ZeroDivisionError()])
        if args.word == "stop":
            raise KeyboardInterrupt
        if args.word == "bug":
            raise ZeroDivisionError("a bug")
        sys.stdout.write(args.word.upper())
        return 3

SHOUT = Command()
"""
SHOUT = "[zinf.commands]\nshout = shout:SHOUT\n"


@pytest.fixture
def _shout(install: Callable[..., None]) -> None:
    install("shout", COMMAND, SHOUT)


@pytest.mark.usefixtures("_shout")
def test_a_command_of_another_package(capsys: pytest.CaptureFixture[str]) -> None:
    """Catches commands that must be known here, and exit codes that get lost."""
    assert main(["shout", "hello"]) == 3
    assert capsys.readouterr().out == "HELLO"


@pytest.mark.usefixtures("_shout")
@pytest.mark.parametrize(
    ("word", "code", "lines"),
    [
        ("budget", 2, ["zinf: device budget of 1 B is too small; raise it"]),
        ("group", 2, ["zinf: [Errno 5] first", "zinf: [Errno 5] second"]),
        ("stop", 130, ["zinf: interrupted"]),
    ],
)
def test_errors_are_told_on_one_line(
    word: str, code: int, lines: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches tracebacks where the user can mend something, and a wrong exit code."""
    assert main(["shout", word]) == code
    assert capsys.readouterr().err.splitlines() == lines


@pytest.mark.usefixtures("_shout")
def test_bugs_are_not_hidden() -> None:
    """Catches an `except Exception` that would turn our own bugs into one vague line."""
    with pytest.raises(ZeroDivisionError):
        main(["shout", "bug"])
    with pytest.raises(ExceptionGroup):
        main(["shout", "mixed"])


@pytest.mark.slow  # `zinf --help` imports every command, torch with them
def test_a_broken_command_costs_only_itself(
    install: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches one missing library that takes all of `zinf` down, and a hint that is lost."""
    install("shout", COMMAND, SHOUT)
    install(
        "crash",
        "import no_such_library.part",
        "[zinf.commands]\ncrash = crash:X\n",
        'Requires-Dist: no-such\nRequires-Dist: no_such_library>=2; extra == "extras"\n',
    )
    install("hollow", "X = 3", "[zinf.commands]\nhollow = hollow:X\n")
    assert main(["shout", "hello"]) == 3
    with pytest.raises(SystemExit) as exited:
        main(["--help"])
    assert exited.value.code == 0
    out = capsys.readouterr().out
    assert "say 100 % of it loudly" in out
    assert "command 'crash' (crash:X) cannot be imported" in out
    assert main(["crash"]) == 2
    err = capsys.readouterr().err
    assert "No module named 'no_such_library'" in err
    assert 'pip install "crash[extras]"' in err
    assert main(["hollow"]) == 2
    assert "is a int, without name, help, add_arguments and run" in capsys.readouterr().err


@pytest.mark.slow
def test_our_own_commands_are_found(capsys: pytest.CaptureFixture[str]) -> None:
    """Catches an entry point in pyproject.toml that names nothing."""
    with pytest.raises(SystemExit) as exited:
        main(["nonsense"])
    assert exited.value.code == 2
    err = capsys.readouterr().err
    assert "doctor" in err
    assert "train" in err
    for command in ("doctor", "train"):
        with pytest.raises(SystemExit) as exited:
            main([command, "--help"])
        assert exited.value.code == 0
    with pytest.raises(SystemExit) as exited:
        main(["--version"])
    assert exited.value.code == 0
    assert "zinf 0." in capsys.readouterr().out
