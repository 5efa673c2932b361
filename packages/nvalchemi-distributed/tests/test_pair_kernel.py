"""The kernel without a compiler, and with fewer outputs."""

from __future__ import annotations

import logging

import torch
from systems import fcc, lj, single

from nvalchemi_distributed.data import Batch


def test_without_a_working_compiler_the_plain_kernel_runs_and_a_warning_says_so(monkeypatch, caplog):
    def no_compiler(graph, inputs):
        raise RuntimeError("No working C++ compiler found")

    def compile_with_it(function, **options):
        options.pop("options")
        return torch._dynamo.optimize(no_compiler, **options)(function)

    monkeypatch.setattr(torch, "compile", compile_with_it)
    batch = Batch.from_data_list([fcc(3)])
    model, plain = lj(5.0, compile=True), lj(5.0)
    with caplog.at_level(logging.WARNING):
        first, second = single(model, batch), single(model, batch)
    expected = single(plain, batch)
    for name in expected:
        assert torch.equal(first[name], expected[name])
        assert torch.equal(second[name], expected[name])
    warnings = [r.getMessage() for r in caplog.records if "cannot build the kernel" in r.getMessage()]
    # Said once, not at every step.
    assert len(warnings) == 1
    assert "No working C++ compiler found" in warnings[0]
    assert "install a C++ compiler, or leave compile at False" in warnings[0]


def test_outputs_that_are_not_active_are_left_out_and_change_nothing():
    batch = Batch.from_data_list([fcc(3), fcc(2)])
    whole = single(lj(5.0), batch)
    for names in ({"forces"}, {"forces", "virial"}, {"energy"}, {"energy", "forces", "stress"}):
        model = lj(5.0)
        model.restrict(names)
        part = single(model, batch)
        assert set(part) == names
        for name in names:
            assert torch.allclose(part[name], whole[name], rtol=1e-13, atol=1e-15)
