"""Streamed optimizer step: sub-groups of states are read, updated and written, three in flight.

Paper, section 5.2.2 (optimizer states on NVMe): while one sub-group is updated, the next one is
read and the one before is written.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from zinf_core.errors import BudgetExceededError
from zinf_core.runtime.loans import Loan, LoanDesk
from zinf_core.runtime.page import Page


@dataclass(frozen=True, slots=True, kw_only=True)
class PageUse:
    """One page a sub-group needs."""

    page: Page
    written: bool
    """Its new bytes go home after the update."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SubGroup:
    """States that are updated together."""

    uses: tuple[PageUse, ...]
    working_nbytes: int
    """Host memory the update needs at most, the loans of `uses` included."""
    is_complete: bool
    """`uses` names everything the update will need, so another sub-group may be read meanwhile."""


Update = Callable[[int, Sequence[Loan]], None]
"""Updates sub-group i in the memory of its loans, which are in the order of its uses; may give
back loans early and may borrow more, within the sub-group's working bytes."""


def stream_sub_groups(
    desk: LoanDesk, sub_groups: Sequence[SubGroup], update: Update, *, available_nbytes: int
) -> None:
    """Run `update` on every sub-group in order. Blocks.

    The next sub-group is read ahead when both fit `available_nbytes` of host memory. If `update`
    raises, what it wrote so far still goes home, as the in-place updates of plain PyTorch stay.
    """
    ahead: list[Loan] = []
    try:
        for index, group in enumerate(sub_groups):
            loans, ahead = ahead or _borrow(desk, group), []
            following = sub_groups[index + 1] if index + 1 < len(sub_groups) else None
            ready = False
            try:
                if following is not None and _fit_together(group, following, available_nbytes):
                    ahead = _borrow_ahead(desk, following)
                for loan in loans:
                    desk.wait(loan)
                ready = True
                update(index, loans)
            finally:
                _give_back(desk, loans, [ready and use.written for use in group.uses])
    finally:
        _give_back(desk, ahead, [False] * len(ahead))


def _fit_together(group: SubGroup, following: SubGroup, available_nbytes: int) -> bool:
    complete = group.is_complete and following.is_complete
    return complete and group.working_nbytes + following.working_nbytes <= available_nbytes


def _give_back(desk: LoanDesk, loans: Sequence[Loan], written: Sequence[bool]) -> None:
    """Give all loans back, also if one fails."""
    with ExitStack() as stack:
        for loan, is_written in zip(loans, written, strict=True):
            stack.callback(desk.give_back, loan, written=is_written)


def _borrow(desk: LoanDesk, group: SubGroup) -> list[Loan]:
    loans: list[Loan] = []
    try:
        loans.extend(desk.borrow(use.page) for use in group.uses)
    except BaseException:
        _give_back(desk, loans, [False] * len(loans))
        raise
    return loans


def _borrow_ahead(desk: LoanDesk, group: SubGroup) -> list[Loan]:
    try:
        return _borrow(desk, group)
    except BudgetExceededError:
        return []  # host memory is in use elsewhere: the sub-group is read when its turn comes
