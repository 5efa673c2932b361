"""Specs are frozen data: copies keep every field, files are lossless, unknown things are refused."""

from __future__ import annotations

import dataclasses
import json
import string

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nvalchemi_distributed import (
    SPEC_LJ_HALO,
    SPEC_MPNN_HALO,
    DistributionSpec,
    FunctionAdapter,
    HaloStoragePolicy,
    JitAdapter,
    MethodAdapter,
    MLIPSpec,
    OpAdapter,
    OutputKind,
    OutputSpec,
    PythonAdapter,
    Reduce,
    ScriptAdapter,
)
from nvalchemi_distributed.errors import AdapterError, ModelError
from nvalchemi_distributed.ops import (
    AllReduceSum,
    GatherInputs,
    GatherMode,
    KeepRows,
    RefreshInputs,
    RefreshOutputs,
    RowKind,
    ScatterMode,
    ScatterOutputs,
    SliceOutputsOwned,
    SliceOwned,
)

names = st.text(string.ascii_letters + "_", min_size=1, max_size=8)
functions = st.builds("{}:{}".format, names, names)
places = st.one_of(st.none(), st.integers(0, 5), names)
keys = st.one_of(st.none(), st.text())
inputs = st.one_of(*(st.builds(t, places, keys) for t in (GatherInputs, RefreshInputs, SliceOwned)))
outputs = st.one_of(
    *(st.builds(t, places, keys) for t in (ScatterOutputs, RefreshOutputs, SliceOutputsOwned, AllReduceSum)),
    st.builds(KeepRows, places, keys, st.sampled_from(RowKind)),
)
transforms = st.lists(st.one_of(inputs, outputs), min_size=1, max_size=3)
adapters = st.one_of(
    st.builds(
        OpAdapter,
        st.builds("{}::{}".format, names, names),
        st.dictionaries(st.integers(0, 9), inputs, max_size=3),
        st.dictionaries(st.integers(0, 9), outputs, max_size=3),
    ),
    st.builds(MethodAdapter, st.text(), names, transforms, st.one_of(st.none(), functions)),
    st.builds(FunctionAdapter, functions, transforms, st.one_of(st.none(), functions)),
    st.builds(PythonAdapter, names, names, functions),
    st.builds(JitAdapter, names, names, functions),
    st.builds(ScriptAdapter, st.text(), st.text(), st.one_of(names, st.integers(0, 5))),
)
output_specs = st.one_of(
    st.builds(OutputSpec, st.just(OutputKind.PER_NODE), st.sampled_from([Reduce.NONE, Reduce.OWNED_ONLY])),
    st.builds(OutputSpec, st.sampled_from([OutputKind.PER_GRAPH, OutputKind.GLOBAL]), st.sampled_from(Reduce)),
)
specs = st.builds(
    MLIPSpec,
    distribution=st.builds(
        DistributionSpec,
        policy=st.builds(HaloStoragePolicy, st.sampled_from(ScatterMode), st.sampled_from(GatherMode)),
        adapters=st.lists(adapters, max_size=4),
        shard_tensors=st.booleans(),
    ),
    outputs=st.dictionaries(st.text(), output_specs, max_size=4),
    hops=st.integers(1, 9),
    name=st.text(),
)


@given(specs)
@settings(max_examples=60, deadline=None)
def test_save_then_load_is_equal(tmp_path_factory, spec):
    again = MLIPSpec.from_json(spec.to_json())
    assert again == spec
    assert hash(again) == hash(spec)
    # Equality by JSON would hide what JSON loses.
    assert again.distribution == spec.distribution
    assert dict(again.outputs) == dict(spec.outputs)
    path = spec.save(tmp_path_factory.getbasetemp() / "spec.json")
    assert MLIPSpec.load(path) == spec


@given(specs)
@settings(max_examples=30, deadline=None)
def test_a_changed_copy_keeps_the_rest(spec):
    copy = dataclasses.replace(spec, hops=spec.hops + 1)
    assert copy != spec
    assert dataclasses.replace(copy, hops=spec.hops) == spec
    other = dataclasses.replace(spec.distribution, shard_tensors=not spec.distribution.shard_tensors)
    changed = dataclasses.replace(spec, distribution=other)
    assert changed != spec
    assert dataclasses.replace(changed, distribution=spec.distribution) == spec


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (lambda d: d.update(version=99), "version 99"),
        (lambda d: d.update(version=1), "version 1"),
        (lambda d: d["spec"]["fields"].update(extra=1), "extra"),
        (lambda d: d["spec"]["fields"].pop("hops"), "hops"),
        (lambda d: d["spec"]["fields"]["distribution"]["fields"].update(extra=1), "DistributionSpec.*extra"),
        (
            lambda d: d["spec"]["fields"]["distribution"]["fields"]["policy"]["fields"].update(scatter_mode="x"),
            "unknown",
        ),
        (lambda d: d["spec"].update(type="Tape"), "Tape"),
        (lambda d: d["spec"].update(type="GatherInputs", fields={"at": 0, "key": None}), "it holds a GatherInputs"),
        (lambda d: d["spec"]["fields"].update(hops=0), "hops=0"),
        (lambda d: d["spec"]["fields"]["outputs"]["pairs"][0][1]["fields"].update(kind="tape"), "unknown kind"),
    ],
)
def test_unknown_fields_and_versions_are_refused(edit, words):
    document = json.loads(SPEC_LJ_HALO.to_json())
    edit(document)
    with pytest.raises(ModelError, match=words):
        MLIPSpec.from_json(json.dumps(document))


@pytest.mark.parametrize("text", ["[]", "{}", "no json", '{"version": 2}', '{"version": 2, "spec": 3}'])
def test_other_files_are_refused(text, tmp_path):
    with pytest.raises(ModelError, match="not a spec"):
        MLIPSpec.from_json(text)
    (tmp_path / "odd.json").write_text(text)
    with pytest.raises(ModelError, match=r"odd\.json"):
        MLIPSpec.load(tmp_path / "odd.json")


def test_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        SPEC_LJ_HALO.hops = 2
    with pytest.raises(TypeError):
        SPEC_LJ_HALO.outputs["energy"] = OutputKind.PER_NODE
    op = OpAdapter("a::b", {0: GatherInputs()})
    with pytest.raises(TypeError):
        op.arg_transforms[1] = GatherInputs()


def a_helper(x):
    return x


def test_functions_become_names():
    assert FunctionAdapter(a_helper, (GatherInputs(0),)).function == f"{__name__}:a_helper"
    assert PythonAdapter("m", "f", a_helper).replacement == f"{__name__}:a_helper"
    for odd in (lambda x: x, [].append):
        with pytest.raises(AdapterError, match="top level"):
            PythonAdapter("m", "f", odd)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: OpAdapter("no_colons"), "names no op"),
        (lambda: OpAdapter("a::b", {0: ScatterOutputs()}), "does not belong"),
        (lambda: OpAdapter("a::b", {}, {"0": ScatterOutputs()}), "does not belong"),
        (lambda: OpAdapter(len), "no registered op"),
        (lambda: MethodAdapter("x"), "does nothing"),
        (lambda: FunctionAdapter("m:f"), "does nothing"),
        (lambda: FunctionAdapter("m.f", (GatherInputs(0),)), "module:function"),
        (lambda: KeepRows(kind="tape"), "unknown kind"),
        (lambda: HaloStoragePolicy("tape"), "unknown kind"),
        (lambda: OutputSpec("per_node", "all_reduce"), "cannot be all-reduced"),
        (lambda: DistributionSpec(adapters=(GatherInputs(),)), "no adapter"),
        (lambda: MLIPSpec(HaloStoragePolicy()), "give a DistributionSpec"),
    ],
)
def test_refused_at_construction(make, words):
    with pytest.raises(ModelError, match=words):
        make()


def test_both_kinds_of_adapters_are_sorted():
    op, method = OpAdapter("a::b"), MethodAdapter("x", transforms=(GatherInputs(0),))
    spec = DistributionSpec(adapters=(method, op))
    assert spec == DistributionSpec(custom_ops=(op,), third_party_helpers=(method,))


def test_presets():
    assert set(SPEC_LJ_HALO.outputs) == set(SPEC_MPNN_HALO.outputs) == {"energy", "forces", "virial", "stress"}
    assert SPEC_MPNN_HALO.distribution.shard_tensors
    assert not SPEC_LJ_HALO.distribution.shard_tensors
    for spec in (SPEC_LJ_HALO, SPEC_MPNN_HALO):
        assert MLIPSpec.from_json(spec.to_json()) == spec
