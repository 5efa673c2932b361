"""Specs are frozen data: copies keep every field, files are lossless, unknown things are refused."""

from __future__ import annotations

import dataclasses
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nvalchemi_distributed import SPEC_LJ_HALO, MLIPSpec, OutputKind
from nvalchemi_distributed.errors import ModelError

specs = st.builds(
    MLIPSpec,
    name=st.text(),
    hops=st.integers(1, 9),
    outputs=st.dictionaries(st.text(min_size=1), st.sampled_from(list(OutputKind))),
)


@given(specs)
def test_save_then_load_is_equal(spec):
    again = MLIPSpec.from_json(spec.to_json())
    assert again == spec
    assert hash(again) == hash(spec)


@given(specs)
def test_a_changed_copy_keeps_the_rest(spec):
    copy = dataclasses.replace(spec, hops=spec.hops + 1)
    assert copy != spec
    assert dataclasses.replace(copy, hops=spec.hops) == spec


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (lambda d: d.update(version=99), "version 99"),
        (lambda d: d["spec"].update(extra=1), "extra"),
        (lambda d: d["spec"].pop("hops"), "hops"),
        (lambda d: d["spec"].update(storage="tape"), "unknown kind"),
        (lambda d: d["spec"].update(hops=0), "hops=0"),
    ],
)
def test_unknown_fields_and_versions_are_refused(edit, words):
    document = json.loads(SPEC_LJ_HALO.to_json())
    edit(document)
    with pytest.raises(ModelError, match=words):
        MLIPSpec.from_json(json.dumps(document))
    with pytest.raises(ModelError, match="not a spec"):
        MLIPSpec.from_json("[]")


def test_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        SPEC_LJ_HALO.hops = 2
    with pytest.raises(TypeError):
        SPEC_LJ_HALO.outputs["energy"] = OutputKind.NODE_OWNED
