"""Registry: tiers opened by URL, from entry points."""

import enum
from collections.abc import Callable
from pathlib import Path

import pytest

from zinf_core.buffers import HostBuffer
from zinf_core.errors import ConfigError, TierFullError
from zinf_core.keys import StateKind, TensorKey
from zinf_core.registry import TierUrl, open_tier, tier_schemes
from zinf_storage.allocators import PageAlignedAllocator

KEY = TensorKey.of("w", StateKind.PARAM)
FACTORY = """
def open_it(url, *, capacity_nbytes):
    url.refuse_unknown(frozenset({"depth"}))
    return url, capacity_nbytes
"""


def page(fill: int) -> HostBuffer:
    buffer = PageAlignedAllocator().allocate(4096)
    buffer.array[:] = fill
    return buffer


def test_third_party_scheme(install: Callable[..., None]) -> None:
    """Catches a registry that knows only our own tiers, or loses parts of the URL."""
    install("odd_tier", FACTORY, "[zinf.tiers]\nodd = odd_tier:open_it\n")
    assert "odd" in tier_schemes()
    url, capacity = open_tier("odd:///a%20b/ü?depth=3", capacity_nbytes=7)  # type: ignore[misc]
    assert url == TierUrl(scheme="odd", path="/a b/ü", options={"depth": "3"})
    assert capacity == 7
    with pytest.raises(ConfigError, match="unknown option 'dept'; valid: depth"):
        open_tier("odd:///a?dept=3")


def test_refusals(install: Callable[..., None]) -> None:
    """Catches a scheme that is guessed, chosen among several, or fails with a traceback."""
    install("lost_tier", "import no_such_module_here", "[zinf.tiers]\nlost = lost_tier:x\n")
    install("twin_a", FACTORY, "[zinf.tiers]\ntwin = twin_a:open_it\n")
    install("twin_b", FACTORY, "[zinf.tiers]\ntwin = twin_b:open_it\n")
    with pytest.raises(ConfigError, match="no installed package offers tape:// tiers; available:"):
        open_tier("tape:///x")
    with pytest.raises(ConfigError, match=r"lost:// cannot be used: .*no_such_module_here"):
        open_tier("lost:///x")
    with pytest.raises(ConfigError, match="twin:// is offered more than once"):
        open_tier("twin:///x")
    with pytest.raises(ConfigError, match="not of the form"):
        open_tier("/just/a/path")
    with pytest.raises(ConfigError, match="sets an option twice"):
        open_tier("odd:///x?a=1&a=2")


@pytest.mark.parametrize("scheme", ["host", "nvme"])
def test_built_in_tiers(scheme: str, tmp_path: Path) -> None:
    """Catches an entry point of ours that names nothing, or a capacity that does not arrive."""
    url = "host://" if scheme == "host" else f"nvme://{tmp_path}/a b?num_threads=2&direct=never"
    tier = open_tier(url, capacity_nbytes=1 << 20)
    try:
        tier.reserve(KEY, 4096)
        tier.write_from(KEY, page(7)).wait()
        back = page(0)
        tier.read_into(KEY, back).wait()
        assert (back.array == 7).all()
        with pytest.raises(TierFullError):
            tier.reserve(TensorKey.of("big", StateKind.PARAM), 2 << 20)
    finally:
        tier.close()


@pytest.mark.parametrize(
    ("url", "told"),
    [
        ("host:///x", "no path"),
        ("host://?a=1", "unknown option 'a'"),
        ("nvme://", "names no folder"),
        ("nvme:///x?num_threads=two", "not a whole number"),
        ("nvme:///x?direct=maybe", "not one of auto, never"),
        ("nvme:///x?verify_reads=maybe", "not one of"),
        ("nvme:///x?io_nbytes=1", "multiple of 4096"),
    ],
)
def test_built_in_refusals(url: str, told: str) -> None:
    """Catches an option that is ignored; nothing may be created for a URL that is refused."""
    with pytest.raises(ConfigError, match=told):
        open_tier(url)
    assert not Path("/x").exists()


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


def test_options_are_values() -> None:
    """Catches a default that loses to nothing, and text taken for a value it is not."""
    url = TierUrl.parse("odd://?n=7&z=-3&t=0.5&b=2MiB&s=true&c=blue")
    assert (url.number("n", 1), url.number("none", 1)) == (7, 1)
    assert url.number("z", 1, is_signed=True) == -3
    assert (url.seconds("t", 1.0), url.seconds("none", 1.0)) == (0.5, 1.0)
    assert (url.nbytes("b", 1), url.nbytes("none", 1)) == (2 << 20, 1)
    assert (url.switch("s", default=False), url.switch("none", default=True)) == (True, True)
    assert (url.choice("c", Colour.RED), url.choice("none", Colour.RED)) == (
        Colour.BLUE,
        Colour.RED,
    )


@pytest.mark.parametrize(
    ("read", "says"),
    [
        (lambda url: url.number("x", 1), "odd: x = 'what' is not a whole number"),
        (lambda url: url.number("z", 1), "odd: z = '-3' is not a whole number"),
        (lambda url: url.seconds("x", 1.0), "odd: x = 'what' is not a number of seconds"),
        (lambda url: url.nbytes("x", 1), "x = 'what' is not a size"),
        (lambda url: url.switch("x", default=True), "odd: x = 'what' is not one of 0, 1, false"),
        (lambda url: url.choice("x", Colour.RED), "odd: x = 'what' is not one of red, blue"),
    ],
)
def test_mistyped_options_are_named(read: Callable[[TierUrl], object], says: str) -> None:
    """Catches an option that is guessed, or an error that does not say which it was."""
    with pytest.raises(ConfigError, match=says):
        read(TierUrl.parse("odd://?x=what&z=-3"))
