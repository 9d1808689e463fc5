"""Completions: repeatable results, and waiting for many without leaving one behind."""

from __future__ import annotations

import pytest

from zinf_core.completion import CompletedTransfer, Completion
from zinf_core.errors import TransferError


class Counted:
    """A completion that notes how often it was waited for."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error
        self.num_waits = 0

    def done(self) -> bool:
        return self.num_waits > 0

    def wait(self, timeout_s: float | None = None) -> None:
        del timeout_s
        self.num_waits += 1
        if self.error is not None:
            raise self.error


def test_a_completed_transfer_is_a_completion() -> None:
    """Catches a change of the protocol that its simplest implementation missed."""
    assert isinstance(CompletedTransfer(), Completion)
    assert isinstance(Counted(), Completion)
    assert not isinstance(object(), Completion)


@pytest.mark.parametrize("timeout_s", [None, 0.0, 1.0])
def test_success_is_repeatable(timeout_s: float | None) -> None:
    """Catches a result that can be had once only."""
    transfer = CompletedTransfer()
    assert transfer.done()
    transfer.wait(timeout_s)
    transfer.wait(timeout_s)


def test_failure_is_repeatable() -> None:
    """Catches a failure that the second wait does not see."""
    error = TransferError("the device is gone")
    transfer = CompletedTransfer(error)
    assert transfer.done()
    for _ in range(3):
        with pytest.raises(TransferError) as caught:
            transfer.wait()
        assert caught.value is error


def test_failing_often_does_not_keep_old_frames() -> None:
    """Catches a traceback that grows with every wait and keeps the buffers of its frames alive."""
    transfer = CompletedTransfer(TransferError("the device is gone"))
    lengths = []
    for _ in range(3):
        with pytest.raises(TransferError) as caught:
            transfer.wait()
        lengths.append(len(caught.traceback))
    assert lengths[0] == lengths[-1]
