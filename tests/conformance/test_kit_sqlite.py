"""The example of docs/write-a-tier.md: the kit on it, its package, and the page's code."""

from __future__ import annotations

import ast
import contextlib
import importlib.util
import os
import sqlite3
import sys
import tomllib
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any

import pytest

from zinf_core.cli import main
from zinf_core.errors import (
    TierClosedError,
    TierError,
    TierFullError,
    TierLockedError,
    TransferError,
)
from zinf_core.registry import TierUrl, open_tier
from zinf_core.testing import DeferredTier, Operation, TierSuite, machine_for, seeded_order
from zinf_core.testing.bench import Bench, data_of, key_of
from zinf_core.tier import Tier

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "sqlite-tier"
PAGE = ROOT / "docs" / "write-a-tier.md"


def imported(name: str) -> ModuleType:
    """Import a module of the example, which is not installed."""
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, EXAMPLE / f"{name}.py")
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
    return sys.modules[name]


sqlite_tier = imported("zinf_sqlite_tier")
authors_test = imported("test_sqlite_tier")


class BrokenBlob:
    """A blob on a drive that gives up half-way."""

    def __init__(self, blob: sqlite3.Blob) -> None:
        self._blob = blob

    def __enter__(self) -> BrokenBlob:
        return self

    def __exit__(
        self, kind: type | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._blob.close()

    def seek(self, offset: int) -> None:
        self._blob.seek(offset)

    def read(self, nbytes: int) -> bytes:
        raise sqlite3.OperationalError("disk I/O error")

    def write(self, data: memoryview) -> None:
        self._blob.write(data[: len(data) // 2])
        raise sqlite3.OperationalError("disk I/O error")


class BreakableConnection:
    """A connection whose next blob is broken when armed."""

    def __init__(self, db: sqlite3.Connection) -> None:
        self._db = db
        self.armed: set[bool] = set()

    def blobopen(self, *args: Any, readonly: bool = False) -> Any:
        blob = self._db.blobopen(*args, readonly=readonly)
        if readonly in self.armed:
            self.armed.remove(readonly)
            return BrokenBlob(blob)
        return blob

    def __getattr__(self, name: str) -> Any:
        return getattr(self._db, name)


class TestSqliteTier(authors_test.TestSqliteTier):
    """As its author tests it, and on a drive that fails."""

    num_kills = 3

    def open_tier(self, folder: Path) -> Tier:
        tier = super().open_tier(folder)
        self.store._db = BreakableConnection(self.store._db)
        return tier

    def fail_next(self, tier: Tier, operation: Operation) -> bool:
        self.store._db.armed.add(operation is Operation.READ)
        return True


class TestDeferredSqliteTier(TierSuite):
    def open_tier(self, folder: Path) -> Tier:
        return DeferredTier(authors_test.open_in(folder), order=seeded_order(1))


TestSqliteMachine = pytest.mark.slow(machine_for(authors_test.open_in).TestCase)


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Install the example as pip would, for this process and its children, until the test ends."""
    project = tomllib.loads((EXAMPLE / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    info = tmp_path / "site" / f"zinf_sqlite_tier-{project['version']}.dist-info"
    info.mkdir(parents=True)
    head = f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n"
    (info / "METADATA").write_text(head, encoding="utf-8")
    lines = ["[zinf.tiers]"]
    lines += [f"{k} = {v}" for k, v in project["entry-points"]["zinf.tiers"].items()]
    (info / "entry_points.txt").write_text("\n".join(lines), encoding="utf-8")
    places = [str(info.parent), str(EXAMPLE)]
    for place in places:
        monkeypatch.syspath_prepend(place)
    path = os.pathsep.join([*places, *filter(None, [os.environ.get("PYTHONPATH")])])
    monkeypatch.setenv("PYTHONPATH", path)
    return tmp_path


def test_the_package_offers_the_scheme(installed: Path) -> None:
    """Catches an entry point that names nothing, and capacity that does not arrive."""
    tier = open_tier(f"sqlite://{installed}/x.db", capacity_nbytes=5000)
    try:
        assert isinstance(tier, Tier)
        assert tier.name == "sqlite"
        assert tier.capabilities.persistent
        tier.reserve(key_of(0), 5000)
        with pytest.raises(TierFullError, match="of 1 bytes: 0 left"):
            tier.reserve(key_of(1), 1)
    finally:
        tier.close()


def test_its_imports_are_public() -> None:
    """Catches an example that needs what the product does not promise to keep."""
    text = (EXAMPLE / "zinf_sqlite_tier.py").read_text(encoding="utf-8")
    nodes = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ImportFrom)]
    modules = {node.module for node in nodes} - {"__future__"}
    names = {alias.name for node in nodes for alias in node.names}
    assert not [name for name in (*modules, *names) if "_" in (name[0], name.rpartition(".")[2][0])]
    assert {name.partition(".")[0] for name in modules} == {"zinf_core", "collections"}
    assert "class SqliteStore:" in text


def test_a_second_tier_on_the_file_is_refused(tmp_path: Path) -> None:
    """Catches two writers that undo each other's work, and a connection left open."""
    for _ in range(2):  # a new file, then one that is there
        first = authors_test.open_in(tmp_path)
        with pytest.raises(TierLockedError, match="locked") as before:
            authors_test.open_in(tmp_path)
        first.flush().wait()
        with pytest.raises(TierLockedError, match="locked") as after:
            authors_test.open_in(tmp_path)
        first.close()
        # SQLite closes its files when no connection of the process has a lock on them any more
        assert open_files(tmp_path) == [], f"left open by one of {(before, after)}"


def open_files(folder: Path) -> list[str]:
    """Return what this process has open in `folder`; nothing where the system does not say."""
    entries = Path("/proc/self/fd").glob("*")
    found = [os.path.realpath(entry) for entry in entries]
    return sorted(path for path in found if path.startswith(str(folder)))


@pytest.mark.parametrize("content", [b"no database, but long enough to be taken for one" * 9, None])
def test_what_is_no_database_is_refused(tmp_path: Path, content: bytes | None) -> None:
    """Catches a file of somebody else that is overwritten, and a folder taken for a file."""
    path = tmp_path / "tensors.db"
    path.mkdir() if content is None else path.write_bytes(content)
    with pytest.raises(TransferError, match=r"cannot use .*tensors\.db"):
        authors_test.open_in(tmp_path)
    assert content is None or path.read_bytes() == content


def test_a_key_larger_than_a_row_is_refused(tmp_path: Path) -> None:
    """Catches a bare sqlite3.DataError for keys above SQLite's limit of 1 GB."""
    tier = sqlite_tier.open_sqlite(TierUrl.parse(f"sqlite://{tmp_path}/x.db"), capacity_nbytes=None)
    try:
        with pytest.raises(TierFullError, match=r"reserve of 1000000000 bytes .* too big"):
            tier.reserve(key_of(0), 1_000_000_000)
        assert list(tier.keys()) == []
    finally:
        tier.close()


def test_a_full_drive_leaves_the_last_flush(small_disk: Path) -> None:
    """Catches bytes older than the newest that are read after SQLite undid the newest."""
    suite = authors_test.TestSqliteTier()
    bench = Bench(suite, small_disk)
    bench.store(key_of(0), data_of(5000))
    bench.flush()
    bench.write(key_of(0), data_of(5000, 1))
    with pytest.raises((TierError, TierFullError)):  # noqa: PT012 - in one of these three
        bench.store(key_of(1), data_of(1 << 20))
        bench.flush()
        bench.read(key_of(0))
    with contextlib.suppress(TierClosedError):
        assert bench.read(key_of(0)) == data_of(5000, 1)
    bench.reopen()
    assert bench.read(key_of(0)) == data_of(5000)
    bench.close()


def test_unknown_options_are_refused() -> None:
    """Catches options dropped in silence, and a database in memory for want of a name."""
    with pytest.raises(ValueError, match="names no file"):
        sqlite_tier.open_sqlite(TierUrl.parse("sqlite://"), capacity_nbytes=None)
    with pytest.raises(ValueError, match="unknown option 'mode'"):
        sqlite_tier.open_sqlite(TierUrl.parse("sqlite:///x.db?mode=1"), capacity_nbytes=None)


@pytest.mark.parametrize(
    ("language", "name"),
    [
        ("python", "zinf_sqlite_tier.py"),
        ("python", "test_sqlite_tier.py"),
        ("toml", "pyproject.toml"),
    ],
)
def test_the_page_shows_the_files(language: str, name: str) -> None:
    """Catches a page that teaches what the example no longer does."""
    text = (EXAMPLE / name).read_text(encoding="utf-8")
    assert f"```{language}\n{text}```\n" in PAGE.read_text(encoding="utf-8")


def test_it_is_as_short_as_the_page_says() -> None:
    """Catches an example that grows until nobody would write one like it."""
    text = (EXAMPLE / "zinf_sqlite_tier.py").read_text(encoding="utf-8")
    tree = ast.parse(text)
    docs = [node for node in ast.walk(tree) if isinstance(node, ast.Expr)]
    docs = [node for node in docs if isinstance(node.value, ast.Constant)]
    imports = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
    other = {n for node in (*docs, *imports) for n in range(node.lineno, node.end_lineno + 1)}
    lines = [line for n, line in enumerate(text.splitlines(), 1) if line.strip() and n not in other]
    assert 55 <= len(lines) <= 65
    assert "about 60 lines of code" in PAGE.read_text(encoding="utf-8")


CONFIG = """
[model]
dtype = "float32"
[model.config]
model_type = "llama"
hidden_size = 32
intermediate_size = 48
num_hidden_layers = 2
num_attention_heads = 2
num_key_value_heads = 2
[data]
paths = ["{folder}"]
sequence_length = 24
micro_batch = 2
[train]
steps = 2
eval_batches = 1
[budget]
device = "128KiB"
host = "512KiB"
nvme = "{folder}/nvme"
[sample]
prompt = "def "
num_tokens = 2
"""


@pytest.mark.slow
def test_training_takes_it_by_its_url_alone(
    installed: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches a command line that only takes tiers it knows, and bytes that change on the way."""
    pytest.importorskip("transformers")
    for number in range(8):
        text = "def f(a, b):\n    return [a, b, a + b]\n" * (number + 3)
        (installed / f"{number}.py").write_text(text, encoding="utf-8")
    config = installed / "config.toml"
    config.write_text(CONFIG.format(folder=installed), encoding="utf-8")
    url = f"sqlite://{installed}/states.db"
    settings = [f"home.{state}={url}" for state in ("parameters", "gradients", "optimizer")]
    losses = []
    for home in ([], settings):
        arguments = [part for setting in home for part in ("--set", setting)]
        assert main(["train", str(config), *arguments]) == 0
        out = capsys.readouterr().out
        losses.append([line for line in out.splitlines() if "loss:" in line])
    assert losses[0] == losses[1]
    assert len(losses[0]) == 2
    assert f"{url} traffic" in out
