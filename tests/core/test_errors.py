"""The tree of errors: drawn, complete, and usable as the builtin errors it stands for."""

from __future__ import annotations

import builtins
import inspect
import pickle
import re

import pytest

from zinf_core import errors
from zinf_core.errors import KeyAbsentError, TierFullError, TransferError, ZinfError

CLASSES = [
    value
    for value in vars(errors).values()
    if inspect.isclass(value) and issubclass(value, Exception)
]


def drawn() -> dict[str, tuple[str, str]]:
    """Return parent and builtin base of each class drawn in the docstring of `errors`."""
    found: dict[str, tuple[str, str]] = {}
    above: dict[int, str] = {}
    for line in (errors.__doc__ or "").splitlines():
        match = re.match(r"    ((?:│   |    )*(?:├── |└── )?)(\w+Error)(?: \((\w+)\))?", line)
        if match:
            depth = len(match[1]) // 4
            above[depth] = match[2]
            found[match[2]] = (above.get(depth - 1, "Exception"), match[3] or "")
    return found


def test_all_classes_are_drawn_and_no_other() -> None:
    """Catches a class that was added, renamed or removed without its line in the drawing."""
    assert set(drawn()) == {cls.__name__ for cls in CLASSES}
    assert len(CLASSES) > 15


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_bases_are_those_drawn(cls: type[Exception]) -> None:
    """Catches a class that hangs elsewhere in the tree, or lacks the builtin base it promises."""
    parent, builtin = drawn()[cls.__name__]
    expected = [vars(errors).get(parent, Exception)]
    if builtin:
        expected.append(getattr(builtins, builtin))
    assert list(cls.__bases__) == expected


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_every_error_says_when(cls: type[Exception]) -> None:
    """Catches a class without a docstring of its own."""
    assert cls.__doc__
    assert all(cls.__doc__ != base.__doc__ for base in cls.__bases__)


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_messages_are_shown_as_written(cls: type[Exception]) -> None:
    """Catches a builtin base that quotes the message (KeyError) or drops it (OSError)."""
    message = "nvme: no room for 'w/param' of 4096 bytes"
    assert str(cls(message)) == message


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_errors_cross_process_boundaries(cls: type[Exception]) -> None:
    """Catches a class that cannot be pickled, which hides a worker's error behind another one."""
    copy = pickle.loads(pickle.dumps(cls("message")))
    assert type(copy) is cls
    assert str(copy) == "message"


def test_system_errors_keep_their_number() -> None:
    """Catches an OSError whose errno is lost, so that ENOSPC cannot be told from EIO."""
    for cls in (TierFullError, TransferError):
        error = cls(28, "no room")
        assert error.errno == 28
        assert "no room" in str(error)


def test_everything_is_caught_at_the_root() -> None:
    """Catches an error outside the tree."""
    assert all(issubclass(cls, ZinfError) for cls in CLASSES)
    with pytest.raises(KeyError, match="no key"):
        raise KeyAbsentError("no key")
    assert str(KeyAbsentError()) == ""
