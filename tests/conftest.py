"""Hypothesis profiles dev, ci, nightly; ``--hypothesis-profile`` or HYPOTHESIS_PROFILE choose."""

import os

from hypothesis import settings

settings.register_profile(
    "dev", max_examples=25, stateful_step_count=30, deadline=None, derandomize=True
)
settings.register_profile("ci", max_examples=50, deadline=None, derandomize=True)
settings.register_profile("nightly", max_examples=2000, deadline=None, print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "dev"))
