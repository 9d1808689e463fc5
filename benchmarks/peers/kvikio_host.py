"""kvikio's POSIX path between host memory and a file, for comparison.

Usage: python kvikio_host.py FILE NBYTES KEY_NBYTES, with a libcuda on LD_LIBRARY_PATH; see
`peers.libcuda`. The file exists and has NBYTES; it is overwritten in place.
"""

from __future__ import annotations

import mmap
import sys
from functools import partial

from protocol import Transfer, say, serve

MIB = 1 << 20
SETTINGS = [(4, MIB), (4, 4 * MIB), (8, MIB), (8, 4 * MIB), (2, 4 * MIB)]
"""Threads and bytes per task that are tried."""


def main() -> int:
    """Open the file and serve; say why if that is not possible."""
    path, nbytes, key_nbytes = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    try:
        import kvikio  # noqa: PLC0415 - it may be missing
        import kvikio.defaults  # noqa: PLC0415
        import numpy as np  # noqa: PLC0415

        pages = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        pages.madvise(mmap.MADV_HUGEPAGE)
        memory = np.frombuffer(pages, np.uint8)
        memory[:] = 7
        kvikio.defaults.set(
            {"compat_mode": kvikio.CompatMode.ON, "auto_direct_io_read": True,
             "auto_direct_io_write": True}
        )  # fmt: skip
        file = kvikio.CuFile(path, "r+")
        file.read(memory[:key_nbytes])
    except Exception as exc:  # noqa: BLE001 - whatever it is, the benchmark shows it
        say(error=f"{type(exc).__name__}: {exc}")
        return 1

    def transfer(num_threads: int, task_nbytes: int, operation: str) -> None:
        if kvikio.defaults.get("num_threads") != num_threads:
            kvikio.defaults.set("num_threads", num_threads)
        submit = file.pread if operation == "read" else file.pwrite
        futures = [
            submit(memory[start : start + key_nbytes], file_offset=start, task_size=task_nbytes)
            for start in range(0, nbytes, key_nbytes)
        ]
        for future in futures:
            future.get()

    choices: list[tuple[str, Transfer]] = [
        (f"{threads} threads, {task // MIB} MiB tasks", partial(transfer, threads, task))
        for threads, task in SETTINGS
    ]
    serve(f"kvikio {kvikio.__version__}, POSIX, O_DIRECT, overwrite in place", choices)
    return 0


if __name__ == "__main__":
    sys.exit(main())
