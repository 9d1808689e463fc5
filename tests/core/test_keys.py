"""Keys: identity, order, and the form seen in messages."""

from __future__ import annotations

import dataclasses
import itertools

import pytest

from zinf_core.errors import ConfigError
from zinf_core.keys import Extent, StateKind, TensorKey


def test_of_names_a_state() -> None:
    """Catches a kind or part that is lost on the way."""
    key = TensorKey.of("layers.0.weight", StateKind.OPTIMIZER_STATE, "exp_avg")
    assert (key.name, key.kind, key.part) == (
        "layers.0.weight",
        StateKind.OPTIMIZER_STATE,
        "exp_avg",
    )


@pytest.mark.parametrize(
    ("key", "text"),
    [
        (TensorKey.of("w", StateKind.PARAM), "w/param"),
        (TensorKey.of("w", StateKind.GRAD, "1"), "w/grad/1"),
        (TensorKey.of("a.b", StateKind.OPTIMIZER_STATE, "exp_avg"), "a.b/optimizer_state/exp_avg"),
    ],
)
def test_text(key: TensorKey, text: str) -> None:
    """Catches messages and exported names that change."""
    assert str(key) == text


def test_every_part_of_a_key_tells_it_apart() -> None:
    """Catches two states that would share their bytes."""
    keys = [
        TensorKey.of(name, kind, part)
        for name, kind, part in itertools.product(("a", "b"), StateKind, ("", "exp_avg", "x"))
    ]
    assert len(set(keys)) == len(keys) == 2 * 4 * 3
    assert len({str(key) for key in keys}) == len(keys)
    assert keys == [TensorKey(key.name, key.kind_value, key.part) for key in keys]


def test_keys_sort_by_name_first() -> None:
    """Catches an order by kind, which would tear the states of a parameter apart on disk."""
    kinds = sorted(StateKind, key=lambda kind: kind.value)
    keys = [TensorKey.of(name, kind) for name in ("a", "b") for kind in kinds]
    shuffled = [*keys[5:], *keys[:5]]
    assert sorted(shuffled) == keys


def test_stored_names_of_kinds_do_not_change() -> None:
    """Catches a renamed kind, which would orphan everything stored before."""
    assert {kind.name: kind.value for kind in StateKind} == {
        "PARAM": "param",
        "GRAD": "grad",
        "MASTER": "master",
        "OPTIMIZER_STATE": "optimizer_state",
    }


def test_an_unknown_kind_can_be_listed_but_not_used() -> None:
    """Catches a key of a newer release that cannot even be named in a message."""
    key = TensorKey("w", "curvature")
    assert str(key) == "w/curvature"
    with pytest.raises(ValueError, match="curvature"):
        key.kind  # noqa: B018 - the property raises


@pytest.mark.parametrize(
    "thing", [TensorKey.of("a", StateKind.PARAM), Extent(nbytes=1, allocated_nbytes=4096)]
)
def test_keys_and_extents_are_frozen(thing: object) -> None:
    """Catches a key that changes while it is a key of a dict."""
    for field in dataclasses.fields(thing):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(thing, field.name, 1)


@pytest.mark.parametrize("parts", [(1, "param", ""), ("w", None, ""), ("w", "param", b"x")])
def test_parts_must_be_text(parts: tuple[object, object, object]) -> None:
    """Catches a key that a tier stores and cannot read back, and all other keys with it."""
    with pytest.raises(ConfigError, match="not a str"):
        TensorKey(*parts)  # type: ignore[arg-type]
