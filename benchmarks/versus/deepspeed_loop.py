"""DeepSpeed ZeRO-3 on its CPU accelerator, parameters and optimizer on NVMe, tuned and pipelined.

With pipelining it needs 12 optimizer buffers to run at all.
"""

from __future__ import annotations

import argparse

import deepspeed
from common import ADAMW, CLIP, Phases, build_model, run

SIZED = {
    "125m": {"sub_group": 3e7, "buffer": 2.5e7, "live": 3e7, "prefetch": 1.5e7, "bucket": 5e7},
    "1b1": {"sub_group": 7e7, "buffer": 6.6e7, "live": 1e8, "prefetch": 3e7, "bucket": 7e7},
}
"""Sizes in elements."""


def configuration(size: str, micro_batch: int, folder: str) -> dict[str, object]:
    """Return the configuration of the engine."""
    sized = {name: int(value) for name, value in SIZED[size].items()}
    return {
        "train_micro_batch_size_per_gpu": micro_batch,
        "gradient_accumulation_steps": 1,
        "bf16": {"enabled": True},
        "gradient_clipping": CLIP,
        "steps_per_print": 1_000_000,
        "zero_allow_untested_optimizer": True,
        "optimizer": {"type": "AdamW", "params": {**ADAMW, "betas": list(ADAMW["betas"])}},
        "aio": {
            "block_size": 1 << 20,
            "queue_depth": 32,
            "intra_op_parallelism": 1,
            "single_submit": False,
            "overlap_events": True,
        },
        "zero_optimization": {
            "stage": 3,
            "overlap_comm": False,
            "contiguous_gradients": True,
            "reduce_bucket_size": sized["bucket"],
            "sub_group_size": sized["sub_group"],
            "stage3_prefetch_bucket_size": sized["prefetch"],
            "stage3_max_live_parameters": sized["live"],
            "stage3_max_reuse_distance": 0,
            "stage3_param_persistence_threshold": 10_000,
            "offload_optimizer": {
                "device": "nvme",
                "nvme_path": folder,
                "buffer_count": 12,
                "pin_memory": True,
                "pipeline_read": True,
                "pipeline_write": True,
            },
            "offload_param": {
                "device": "nvme",
                "nvme_path": folder,
                "buffer_count": 16,
                "buffer_size": sized["buffer"],
                "max_in_cpu": 0,
                "pin_memory": True,
            },
        },
    }


def main() -> None:
    """Train as told by the arguments."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("size")
    parser.add_argument("--micro-batch", type=int, default=1)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--folder", required=True)
    args = parser.parse_args()
    deepspeed.init_distributed("gloo")
    model = build_model(args.size)
    engine, *_ = deepspeed.initialize(
        model=model,
        model_parameters=model.parameters(),
        config=configuration(args.size, args.micro_batch, args.folder),
    )
    phases = Phases(model=engine, backward=engine.backward, optimize=engine.step)
    run(phases, steps=args.steps, micro_batch=args.micro_batch)


if __name__ == "__main__":
    main()
