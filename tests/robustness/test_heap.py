"""How large a freed block must be to go back to the system at once."""

from __future__ import annotations

import pytest

from zinf_core.units import GiB, KiB, MiB
from zinf_torch.heap import own_mapping_nbytes


@pytest.mark.parametrize(
    ("budget_nbytes", "expected"),
    [(0, 128 * KiB), (16 * MiB, 128 * KiB), (768 * MiB, 1536 * KiB), (2 * GiB, 4 * MiB),
     (1 << 50, 4 * MiB)],
)  # fmt: skip
def test_what_stays_is_small_beside_the_budgets(budget_nbytes: int, expected: int) -> None:
    """Catches a heap that keeps as much as the budgets hold, or a large run that maps every
    activation anew."""
    assert own_mapping_nbytes(budget_nbytes) == expected
