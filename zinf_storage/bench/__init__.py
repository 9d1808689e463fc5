"""Benchmark of tiers: what each moves per second, how long a request takes, and what to choose.

Measures through the Tier protocol alone, so that a tier of another package is measured like ours.
"""
