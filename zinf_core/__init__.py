"""Framework-agnostic runtime of zinf: storage tiers, pools, the pager and its policies.

Imports numpy, msgpack and the standard library, and knows no tensor framework.
"""
