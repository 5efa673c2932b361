from __future__ import annotations

from collections import OrderedDict, defaultdict, namedtuple
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from distmd_protocol import ProtocolError, flatten, unflatten

Pair = namedtuple("Pair", "first second")


@dataclass(frozen=True)
class State:
    position: Any
    static: Any = field(default=None, metadata={"static": True})
    counter: Any = field(init=False, default=0)


@dataclass
class Custom:
    """A dataclass whose __init__ does not take its fields."""

    value: Any

    def __init__(self):
        self.value = 1


def test_paths_of_every_kind_of_container():
    tree = {"a": [1, (2, 3)], "b": Pair(4, {"c": 5}), "s": State(6, static=print), 7: 8}
    assert flatten(tree) == {
        "a/0": 1, "a/1/0": 2, "a/1/1": 3, "b/first": 4, "b/second/c": 5, "s/position": 6, "s/counter": 0, "7": 8,
    }  # fmt: skip


def test_none_and_empty_containers_hold_nothing():
    assert flatten({"a": None, "b": {}, "c": [], "d": ()}) == {}
    assert unflatten({"a": None, "b": {}, "c": []}, {}) == {"a": None, "b": {}, "c": []}


def test_names_with_slashes_are_escaped():
    tree = {"mlp/~/linear_0": {"w": 1}, "mlp": {"~": {"linear_0": 2}}}
    assert flatten(tree) == {"mlp~1~0~1linear_0/w": 1, "mlp/~0/linear_0": 2}


def test_unflatten_keeps_types_and_does_not_touch_the_template():
    template = {
        "n": Pair(0, [0, (0,)]),
        "o": OrderedDict(z=0, a=0),
        "d": defaultdict(list, k=0),
        "s": State(0, static=len),
        "c": Custom(),
    }
    leaves = {path: number for number, path in enumerate(flatten(template), start=1)}
    result = unflatten(template, leaves)
    assert flatten(result) == leaves
    assert isinstance(result["n"], Pair)
    assert isinstance(result["n"].second[1], tuple)
    assert list(result["o"]) == ["z", "a"]
    assert result["d"].default_factory is list
    assert result["s"].static is len
    assert set(flatten(template).values()) == {0, 1}


def test_missing_and_left_over_paths_are_all_named():
    with pytest.raises(ProtocolError, match=r"missing: b, c/0\. left over: x, y"):
        unflatten({"a": 1, "b": 2, "c": [3]}, {"a": 1, "x": 1, "y": 2})


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        (np.ones(3), "bare ndarray"),
        ({"": 1}, "non-empty"),
        ({(1, 2): 1}, "non-empty"),
        ({1: 1, "1": 2}, "used twice"),
        ({"a": {True: 1}}, "at 'a'"),
    ],
)
def test_what_has_no_path_is_refused(tree, message):
    with pytest.raises(ProtocolError, match=message):
        flatten(tree)


def test_a_cycle_is_refused_and_a_shared_part_is_not():
    shared = [1]
    assert flatten({"a": shared, "b": shared}) == {"a/0": 1, "b/0": 1}
    cycle: list[Any] = []
    cycle.append({"again": cycle})
    with pytest.raises(ProtocolError, match="contains itself"):
        flatten(cycle)


trees = st.recursive(
    st.integers(),
    lambda children: (
        st.dictionaries(st.text(min_size=1), children, min_size=1, max_size=3)
        | st.lists(children, min_size=1, max_size=3)
        | st.tuples(children, children)
    ),
    max_leaves=10,
).filter(lambda tree: not isinstance(tree, int))


@given(trees)
def test_round_trip(tree):
    assert unflatten(tree, flatten(tree)) == tree
