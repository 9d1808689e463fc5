"""Configuration: what a file may say, and what it is told when it says something else."""

import dataclasses
import enum
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zinf_core.config import Nbytes, Within, from_mapping, load_toml, override
from zinf_core.errors import ConfigError


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


@dataclass(frozen=True, slots=True, kw_only=True)
class Inner:
    steps: Annotated[int, Within(minimum=1, maximum=99)]
    rate: Annotated[float, Within(above=0, below=1)] = 0.5
    colour: Colour = Colour.RED
    betas: tuple[float, float] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Outer:
    inner: Inner
    device: Nbytes = 0
    enabled: bool = False
    name: str = "x"
    folder: Path | None = None
    words: tuple[str, ...] = ()
    labels: dict[str, str] = field(default_factory=dict)
    options: dict[str, object] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.name == "bad":
            raise ConfigError("name must not be bad")


def refusal(**settings: object) -> str:
    with pytest.raises(ConfigError) as caught:
        from_mapping(Outer, {"inner": {"steps": 1}, **settings}, source="run.toml")
    return str(caught.value)


def test_every_type_arrives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a type that is passed through unconverted, and paths that follow a later chdir."""
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "run.toml"
    file.write_text(
        'device = "1.5 MiB"\nenabled = true\nname = "n"\nfolder = "a b/ü"\nwords = ["p", "q"]\n'
        '[inner]\nsteps = 3\nrate = 0.25\ncolour = "blue"\nbetas = [0, 0.9]\n'
        '[labels]\n"layers.*" = "nvme"\n[options]\nfused = false\nnum = 3\n',
        encoding="utf-8",
    )
    loaded = load_toml(Outer, file)
    monkeypatch.chdir("/")
    assert loaded == Outer(
        inner=Inner(steps=3, rate=0.25, colour=Colour.BLUE, betas=(0.0, 0.9)),
        device=3 << 19,
        enabled=True,
        name="n",
        folder=tmp_path / "a b" / "ü",
        words=("p", "q"),
        labels={"layers.*": "nvme"},
        options={"fused": False, "num": 3},
    )
    assert loaded.inner.betas is not None
    assert type(loaded.inner.betas[0]) is float


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"devise": 5}, "devise = 5 is not a known setting; did you mean device?"),
        ({"steps": 5}, "steps = 5 is not a known setting; did you mean inner.steps?"),
        ({"inner": {"steps": 1, "colr": "red"}}, "inner.colr = 'red'"),
        ({"inner": {"steps": 1, "zzz": 1}}, "valid here: betas, colour, rate, steps"),
        ({"inner": {}}, "inner.steps is missing"),
        ({"inner": 3}, "inner = 3 is not a section; write [inner]"),
        ({"inner": {"steps": 0}}, "inner.steps = 0 must be at least 1"),
        ({"inner": {"steps": -4}}, "inner.steps = -4 must be at least 1"),
        ({"inner": {"steps": 100}}, "inner.steps = 100 must be at most 99"),
        ({"inner": {"steps": True}}, "inner.steps = True is not a whole number"),
        ({"inner": {"steps": 2.0}}, "inner.steps = 2.0 is not a whole number"),
        ({"inner": {"steps": "2"}}, "inner.steps = '2' is not a whole number"),
        ({"inner": {"steps": 1, "rate": 0}}, "inner.rate = 0 must be greater than 0"),
        ({"inner": {"steps": 1, "rate": 1}}, "inner.rate = 1 must be less than 1"),
        ({"inner": {"steps": 1, "rate": float("nan")}}, "inner.rate = nan is not a finite"),
        ({"inner": {"steps": 1, "rate": True}}, "inner.rate = True is not a number"),
        ({"inner": {"steps": 1, "rate": "0.1"}}, "inner.rate = '0.1' is not a number"),
        ({"inner": {"steps": 1, "colour": "green"}}, "'green' is not one of red, blue"),
        ({"inner": {"steps": 1, "betas": [0.1]}}, "needs 2 items, not 1"),
        ({"inner": {"steps": 1, "betas": [0.1, "x"]}}, "inner.betas[1] = 'x' is not a number"),
        ({"device": -1}, "device = -1 is negative"),
        ({"device": "12 parsecs"}, "device = '12 parsecs' is not a size"),
        ({"device": True}, "device = True is not a size"),
        ({"enabled": 1}, "enabled = 1 is not true or false"),
        ({"name": 1}, "name = 1 is not text"),
        ({"name": "bad"}, "name must not be bad"),
        ({"folder": ""}, "folder = '' is not a path"),
        ({"folder": "a\0b"}, "is not a path"),
        ({"words": "p"}, "words = 'p' is not a list"),
        ({"labels": {"a": 1}}, "labels.a = 1 is not text"),
    ],
)
def test_refusals_name_the_setting(settings: dict[str, object], told: str) -> None:
    """Catches a value that is silently coerced or ignored, and a message without its full path."""
    message = refusal(**settings)
    assert message.startswith("run.toml: ")
    assert told in message


def test_all_problems_are_told_at_once() -> None:
    """Catches a reader that stops at the first problem, so that a file needs as many tries."""
    message = refusal(inner={"steps": 0, "rat": 0.1}, device=-1)
    assert "3 problems" in message
    for part in ("inner.steps", "inner.rat ", "did you mean inner.rate?", "device = -1"):
        assert part in message


def test_unreadable_files(tmp_path: Path) -> None:
    """Catches a raw OSError or TOML traceback instead of one line naming the file."""
    broken = tmp_path / "broken.toml"
    broken.write_text("steps =", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"broken\.toml: is not valid TOML"):
        load_toml(Outer, broken)
    with pytest.raises(ConfigError, match=r"absent\.toml: cannot be read: No such file"):
        load_toml(Outer, tmp_path / "absent.toml")
    with pytest.raises(ConfigError, match="cannot be read"):
        load_toml(Outer, tmp_path)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("a.b=3", 3),
        ("a.b= 3.5 ", 3.5),
        ("a.b=true", True),
        ("a.b=512MiB", "512MiB"),
        ('a.b="512MiB"', "512MiB"),
        ("a.b=[1, 2]", [1, 2]),
        ("a.b=x=y", "x=y"),
        ("a.b=", ""),
        ("a.b=1\nc = 2", "1\nc = 2"),
    ],
)
def test_override_values(text: str, value: object) -> None:
    """Catches sizes that need quoting, text cut at a second `=`, and values that add settings."""
    before = {"a": {"b": 0, "k": 1}}
    assert override(before, [text]) == {"a": {"b": value, "k": 1}}
    assert before == {"a": {"b": 0, "k": 1}}


@pytest.mark.parametrize("text", ["a.b", "=3", "a..b=3", "a.b.c=1", ".a=1"])
def test_override_refusals(text: str) -> None:
    """Catches an override that is dropped, or that writes into something that is no section."""
    with pytest.raises(ConfigError, match="override"):
        override({"a": {"b": 0}}, [text])


def test_override_makes_sections() -> None:
    """Catches overrides that work only for sections the file already has."""
    assert override({}, ["a.b.c=1", "a.d=2"]) == {"a": {"b": {"c": 1}, "d": 2}}


_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["steps", "rate", "name", "inner", "b"]), inner, max_size=3
        )
    ),
    max_leaves=6,
)


@pytest.mark.slow
@given(
    st.dictionaries(
        st.sampled_from([item.name for item in dataclasses.fields(Outer)]) | st.text(max_size=4),
        _VALUES,
        max_size=4,
    )
)
def test_any_mapping_is_read_or_refused(mapping: dict[str, object]) -> None:
    """Catches a value that breaks the reader itself: only ConfigError may come out."""
    try:
        read = from_mapping(Outer, mapping)
    except ConfigError:
        return
    assert isinstance(read.device, int)
    assert 1 <= read.inner.steps <= 99
