"""Loading optimizer state dicts tensor by tensor, without torch's casts to the parameter dtype."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


def match_groups(
    param_groups: list[dict[str, Any]], saved_groups: list[dict[str, Any]]
) -> dict[Any, torch.Tensor]:
    """Return which parameter each saved index names. Raises ValueError as torch's optimizers do."""
    if len(param_groups) != len(saved_groups):
        raise ValueError("loaded state dict has a different number of parameter groups")
    sizes = [len(group["params"]) for group in param_groups]
    saved_sizes = [len(group["params"]) for group in saved_groups]
    if sizes != saved_sizes:
        raise ValueError(
            "loaded state dict contains a parameter group that doesn't match the size of "
            f"optimizer's group: {saved_sizes} saved, {sizes} here"
        )
    return {
        index: param
        for group, saved in zip(param_groups, saved_groups, strict=True)
        for index, param in zip(saved["params"], group["params"], strict=True)
    }


def merge_options(
    param_groups: list[dict[str, Any]], saved_groups: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    """Return groups with the saved options and the parameters (and their names) of here."""
    merged = []
    for group, saved in zip(param_groups, saved_groups, strict=True):
        options = {name: value for name, value in saved.items() if name != "params"}
        if "param_names" in group:
            options["param_names"] = group["param_names"]
        merged.append({**group, **options, "params": group["params"]})
    return merged
