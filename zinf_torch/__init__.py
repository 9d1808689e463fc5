"""zinf for PyTorch: a plain training loop over models that do not fit in memory."""

from zinf_torch.api import Runtime

__all__ = ["Runtime"]
