"""Names of the objects below a tier's prefix, where there may be others that are not ours."""

from __future__ import annotations

import re
from typing import Final

_OURS: Final = re.compile(
    r"parts/[a-z0-9-]+\.[0-9a-f]+\.[0-9a-f]+\.[0-9a-f]+"
    r"|manifests/[0-9]{12}\.zinf"
    r"|leases/[^/]+\.zinf"
)


def is_ours(name: str) -> bool:
    """Return whether a tier gives names like `name`; nothing else is ever read or deleted."""
    return _OURS.fullmatch(name) is not None
