"""Names of the objects below a tier's prefix, where there may be others that are not ours."""

from __future__ import annotations

import re
from typing import Final

_PART: Final = re.compile(r"parts/[a-z0-9-]+\.[0-9a-f]+\.[0-9a-f]+\.[0-9a-f]+")
_OTHER: Final = re.compile(r"manifests/[0-9]{12}\.zinf|leases/[^/]+\.zinf")


def is_part(name: str) -> bool:
    """Return whether a tier gives names like `name` to parts of keys."""
    return _PART.fullmatch(name) is not None


def is_ours(name: str) -> bool:
    """Return whether a tier gives names like `name`; nothing else is ever read or deleted."""
    return is_part(name) or _OTHER.fullmatch(name) is not None
