"""Storage tiers of zinf: host memory and NVMe. Knows no tensor framework."""
