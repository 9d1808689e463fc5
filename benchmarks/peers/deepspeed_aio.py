"""DeepSpeed's aio_handle between its pinned host memory and a file, for comparison.

Usage: python deepspeed_aio.py FILE NBYTES KEY_NBYTES. The file exists and has NBYTES; it is
overwritten in place. The op is built on first use, which takes minutes.
"""

from __future__ import annotations

import contextlib
import os
import sys
from functools import partial

from protocol import Transfer, say, serve

MIB = 1 << 20
SETTINGS = [(MIB, 32, 1), (MIB, 32, 2), (MIB, 8, 1), (MIB // 4, 32, 1), (4 * MIB, 8, 1)]
"""Block bytes, queue depth and threads that are tried."""


def main() -> int:
    """Load the op and serve; say why if that is not possible."""
    path, nbytes, key_nbytes = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    try:
        with contextlib.redirect_stdout(sys.stderr):
            import deepspeed  # noqa: PLC0415 - it may be missing
            import torch  # noqa: PLC0415
            from deepspeed.ops.op_builder import AsyncIOBuilder  # noqa: PLC0415

            op = AsyncIOBuilder().load(verbose=False)
            handles = [
                op.aio_handle(block, depth, False, True, threads)
                for block, depth, threads in SETTINGS
            ]
            memory = handles[0].new_cpu_locked_tensor(nbytes, torch.empty(0, dtype=torch.uint8))
            memory.fill_(7)
    except (Exception, SystemExit) as exc:  # noqa: BLE001 - the benchmark shows it
        say(error=f"{type(exc).__name__}: {exc}")
        return 1

    def transfer(handle: object, operation: str) -> None:
        submit = handle.async_pread if operation == "read" else handle.async_pwrite
        keys = [memory.narrow(0, start, key_nbytes) for start in range(0, nbytes, key_nbytes)]
        for number, key in enumerate(keys):
            submit(key, path, number * key_nbytes)
        if handle.wait() != len(keys):
            raise RuntimeError("aio_handle.wait reports fewer transfers than were submitted")

    choices: list[tuple[str, Transfer]] = [
        (
            f"{block // 1024} KiB blocks, depth {depth}, {threads} threads",
            partial(transfer, handle),
        )
        for (block, depth, threads), handle in zip(SETTINGS, handles, strict=True)
    ]
    serve(f"aio_handle of deepspeed {deepspeed.__version__}, O_DIRECT, overwrite in place", choices)
    return 0


if __name__ == "__main__":
    sys.exit(main())
