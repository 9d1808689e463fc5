"""Sub-groups: consecutive states that are updated together in the streamed optimizer step."""

from __future__ import annotations

from collections.abc import Sequence

from zinf_core.errors import BudgetTooSmallError
from zinf_core.units import format_nbytes


def sub_group_ranges(nbytes: Sequence[int], limit_nbytes: int) -> list[range]:
    """Cut `range(len(nbytes))` into the fewest consecutive ranges of at most `limit_nbytes` each.

    `nbytes[i]` is the working memory of item i. Raises BudgetTooSmallError naming the index if
    one item alone is larger.
    """
    ranges: list[range] = []
    start, total = 0, 0
    for index, size in enumerate(nbytes):
        if size > limit_nbytes:
            raise BudgetTooSmallError(
                f"item {index} needs {format_nbytes(size)}, "
                f"more than the sub-group limit of {format_nbytes(limit_nbytes)}"
            )
        if total + size > limit_nbytes:
            ranges.append(range(start, index))
            start, total = index, 0
        total += size
    if start < len(nbytes):
        ranges.append(range(start, len(nbytes)))
    return ranges
