"""Faults of memory: host bytes at start, in loading and in training, page cache (P63, P65, P66,
P71)."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

import zinf_torch as zt
from faults.children import run_child
from faults.places import cached_nbytes
from faults.support import mlp, square_loss, train
from zinf_core.buffers import HostBuffer
from zinf_core.keys import StateKind, TensorKey
from zinf_core.units import KiB, MiB
from zinf_storage.allocators import PageAlignedAllocator
from zinf_storage.nvme import DirectIo, NvmeOptions, NvmeTier

GROWTH = """
def resident():
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")

def warm_up():
    model = nn.Linear(512, 512)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(16, 512)).sum().backward()
    optimizer.step()
    with zt.Runtime(device="2MiB", host="8MiB", nvme=folder / "warm") as runtime:
        model = runtime.attach(nn.Linear(64, 64))
        optimizer = runtime.optimizer(torch.optim.AdamW, model.parameters())
        model(torch.ones(16, 64)).sum().backward()
        optimizer.step()

warm_up()
before = resident()
Path("/proc/self/clear_refs").write_text("5")  # the peak begins again at what is resident

def growth():
    status = Path("/proc/self/status").read_text().split()
    return 1024 * int(status[status.index("VmHWM:") + 1]) - before
"""

SLACK_NBYTES = 24 * MiB
"""Activations, the interpreter's own objects, memory that libraries keep for later."""

SMALL = """
with zt.Runtime(device="512MiB", host="1GiB", nvme=folder / "z") as runtime:
    model = nn.Sequential(*[nn.Linear(256, 256) for _ in range(4)])
    runtime.attach(model)
    attached = growth()
    optimizer = runtime.optimizer(torch.optim.AdamW, model.parameters())
    for _ in range(3):
        model(torch.ones(2, 256)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    trained = growth()
"""


LARGE = """
class Blocks(nn.Module):
    def __init__(self, depth, width):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(depth))

    def forward(self, x):
        for layer in self.layers:
            x = x + torch.tanh(layer(x)) * 0.1
        return x

budgets = dict(device="8MiB", host="8MiB")
with zt.Runtime(**budgets, nvme=folder / "z", **HOMES) as runtime:
    with runtime.deferred_init():
        model = Blocks(128, 512)
    runtime.attach(model)
    built = growth()
    optimizer = runtime.optimizer(torch.optim.AdamW, model.parameters(), lr=1e-3)
    wrapped = growth()
    losses = []
    for _ in range(NUM_STEPS):
        loss = model(torch.ones(2, 512)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    peaks = {name: used.peak_nbytes for name, used in runtime.usage().items()}
    total = sum(p.nbytes for p in model.parameters())
    report(built=built, wrapped=wrapped, trained=growth(), losses=losses, total=total, peaks=peaks)
"""


@pytest.mark.slow
def test_p63_p65_a_model_far_over_the_budget(tmp_path: Path) -> None:
    """P63, P65: full copies at set-up, or in training: killed for memory. 128 MiB of weights and
    512 MiB of states under 8 MiB of device and 8 MiB of host budget."""
    script = LARGE.replace("HOMES", "{}").replace("NUM_STEPS", "2")
    facts = run_child(GROWTH + script, tmp_path)
    assert facts["total"] == 128 * MiB
    assert facts["peaks"]["device"] <= 8 * MiB
    assert facts["peaks"]["host"] <= 8 * MiB
    layer = MiB
    for phase in ("built", "wrapped", "trained"):
        assert facts[phase] <= 16 * MiB + layer + SLACK_NBYTES, (phase, facts)
    assert facts["losses"][1] < facts["losses"][0]


COMING_AND_GOING = """
with zt.Runtime(device="4MiB", host="8MiB", nvme=folder / "y") as runtime:
    grown = []
    for _ in range(24):
        model = runtime.attach(nn.Linear(1024, 512))
        optimizer = runtime.optimizer(torch.optim.AdamW, model.parameters(), lr=1e-3)
        model(torch.ones(2, 1024)).sum().backward()
        optimizer.step()
        del model, optimizer
        grown.append(growth())
report(attached=attached, trained=trained, first=grown[3], last=grown[-1])
"""


@pytest.mark.slow
def test_p63_p65_small_models_take_little_and_leave_nothing(tmp_path: Path) -> None:
    """P63, P65: buffers sized by constants: gigabytes taken at the start for a model of 1 MB; and
    memory of dropped models that piles up: 20 of them have 160 MiB of states."""
    facts = run_child(GROWTH + SMALL + COMING_AND_GOING, tmp_path)
    assert facts["attached"] < 64 * MiB
    assert facts["trained"] < 64 * MiB
    assert facts["last"] - facts["first"] < 12 * MiB


NUM_SHARDS, TENSORS_PER_SHARD, TENSOR_SHAPE = 8, 8, (256, 1024)

SHARDED = """
from contextlib import contextmanager
from zinf_torch.train import folder_source
from zinf_torch.train.folder_source import FolderWeights
from zinf_torch.train.loader import load_weights

reads = []
really_open = folder_source.safe_open

class Counted:
    def __init__(self, file):
        self.file = file

    def __getattr__(self, name):
        return getattr(self.file, name)

    def get_tensor(self, name):
        reads.append(name)
        return self.file.get_tensor(name)

@contextmanager
def safe_open(path, framework):
    with really_open(path, framework=framework) as file:
        yield Counted(file)

folder_source.safe_open = safe_open

class Stack(nn.Module):
    def __init__(self, depth):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(1024, 256, bias=False) for _ in range(depth))

GROWTH
weights = FolderWeights(folder)
with zt.Runtime(device="4MiB", host="8MiB", HOMES) as runtime:
    with runtime.deferred_init():
        model = Stack(DEPTH)
    runtime.attach(model)
    load_weights(model, weights)
    loaded = growth()
    names = [name for name, _ in model.named_parameters()]
    reads_once = sorted(reads) == sorted(names)
    written = sum(traffic.written_nbytes for traffic in runtime.traffic().values())
    equal = sum(
        torch.equal(param + 0, weights.read(name, torch.float32))
        for name, param in model.named_parameters()
    )
    report(loaded=loaded, equal=equal, names=len(names), once=reads_once, written=written)
"""


def _write_shards(folder: Path) -> int:
    """Write a model in `NUM_SHARDS` safetensors with an index; return the bytes of one."""
    weight_map = {}
    for shard in range(NUM_SHARDS):
        tensors = {}
        for index in range(TENSORS_PER_SHARD):
            number = shard * TENSORS_PER_SHARD + index
            tensors[f"layers.{number}.weight"] = np.random.default_rng(number).random(
                TENSOR_SHAPE, np.float32
            )
        name = f"model-{shard:05d}.safetensors"
        save_file(tensors, folder / name)
        weight_map |= dict.fromkeys(tensors, name)
    index_text = json.dumps({"weight_map": weight_map})
    (folder / "model.safetensors.index.json").write_text(index_text, encoding="utf-8")
    return TENSORS_PER_SHARD * 4 * TENSOR_SHAPE[0] * TENSOR_SHAPE[1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("homes", "num_writes"),
    [
        ('nvme=folder / "z"', 2),
        (
            """parameters={
            "*.?.*": f"object://file://{folder}/o?part_nbytes=1MiB&num_threads=2",
            "*.[12]?.*": f"striped://[nvme://{folder}/a][nvme://{folder}/b]?shares=1,1",
            "*.[34]?.*": f"compressed://[nvme://{folder}/c]?num_threads=2",
            "*": f"checksummed://[nvme://{folder}/d]?num_threads=2",
        }""",
            3,
        ),
    ],
    ids=["nvme", "every tier"],
)
def test_p66_a_model_in_shards_is_streamed(tmp_path: Path, homes: str, num_writes: int) -> None:
    """P66: the whole state dict in memory before it is spread, or the files read over and over:
    64 MiB in 8 files, under 4 MiB of device and 8 MiB of host budget, take at most one file more.
    Values are written when they are drawn, when their name gives them another home, and when they
    are read from the file."""
    shard_nbytes = _write_shards(tmp_path)
    assert shard_nbytes == 8 * MiB
    script = SHARDED.replace("GROWTH", GROWTH).replace("HOMES", homes)
    script = script.replace("DEPTH", str(NUM_SHARDS * TENSORS_PER_SHARD))
    facts = run_child(script, tmp_path)
    assert facts["equal"] == facts["names"] == NUM_SHARDS * TENSORS_PER_SHARD
    assert facts["once"], "a tensor was read twice, or not at all"
    assert facts["written"] <= num_writes * NUM_SHARDS * shard_nbytes
    assert facts["loaded"] <= shard_nbytes + 12 * MiB + SLACK_NBYTES, facts


def _swap(tier: NvmeTier, num_rounds: int) -> int:
    """Write and read back 16 MiB in every round; return the bytes moved."""
    keys = [TensorKey.of(f"layers.{index}.weight", StateKind.PARAM) for index in range(4)]
    buffer: HostBuffer = PageAlignedAllocator().allocate(4 * MiB)
    for key in keys:
        tier.reserve(key, 4 * MiB)
    for round_ in range(num_rounds):
        for index, key in enumerate(keys):
            buffer.array[:] = 16 * round_ + index
            tier.write_from(key, buffer).wait()
        for index, key in enumerate(keys):
            buffer.array[:] = 0
            tier.read_into(key, buffer).wait()
            assert np.all(buffer.array == 16 * round_ + index)
    return num_rounds * 32 * MiB


@pytest.mark.slow
@pytest.mark.parametrize("direct", DirectIo)
def test_p71_swapping_leaves_the_page_cache_alone(tmp_path: Path, direct: DirectIo) -> None:
    """P71: buffered writes push everything else out of the page cache."""
    options = NvmeOptions(segment_nbytes=16 * MiB, direct=direct)
    tier = NvmeTier.open(tmp_path / "z", options=options)
    try:
        moved = _swap(tier, 4)
        assert moved == 128 * MiB
        if tier.path_taken == "posix-direct":
            assert cached_nbytes(tmp_path / "z") <= 64 * KiB
        else:
            # What is dropped after a transfer may still be on its way to the disk.
            assert cached_nbytes(tmp_path / "z") <= 16 * MiB
    finally:
        tier.close()


@pytest.mark.parametrize("direct", DirectIo)
def test_p71_a_file_system_in_memory(shm_folder: Path, direct: DirectIo) -> None:
    """P71: where there is no disk, direct I/O may be refused; the bytes are right all the same."""
    tier = NvmeTier.open(
        shm_folder / "z", options=NvmeOptions(segment_nbytes=16 * MiB, direct=direct)
    )
    try:
        _swap(tier, 1)
        assert tier.path_taken in {"posix-direct", "posix-buffered"}
    finally:
        tier.remove()


@pytest.mark.slow
def test_p71_training_leaves_the_page_cache_alone(tmp_path: Path) -> None:
    """P71: the same in training, where nobody can tell whether the page cache is used."""
    with zt.Runtime(device="2MiB", host="8MiB", nvme=tmp_path / "z") as runtime:
        model = runtime.attach(mlp(512, 8))
        optimizer = runtime.optimizer(torch.optim.AdamW, model.parameters(), lr=1e-3)
        train(model, optimizer, 6, square_loss)
        moved = runtime.traffic()["nvme"]
        path = runtime.paths()["nvme"]
        cached = cached_nbytes(tmp_path / "z")
    assert moved.read_nbytes + moved.written_nbytes > 256 * MiB
    assert path.startswith(("posix-direct", "posix-buffered"))
    assert cached <= (64 * KiB if path.startswith("posix-direct") else 16 * MiB)
