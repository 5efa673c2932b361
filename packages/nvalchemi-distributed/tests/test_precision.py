"""Reduced precision is noticed once, and can be pinned."""

from __future__ import annotations

import os
import warnings

import pytest
import torch
from systems import fcc, lj

from distmd_protocol import PrecisionPolicy, PrecisionWarning
from distmd_protocol.testkit import run_ranks
from nvalchemi_distributed import DomainConfig, DomainParallel, pin_fp32
from nvalchemi_distributed.data import Batch
from nvalchemi_distributed.dynamics import NVE
from nvalchemi_distributed.hooks import NeighborListHook


def open_twice(comm):
    """Messages of the warnings that two scopes give under reduced precision."""
    torch.set_float32_matmul_precision("high")
    seen = []
    for _ in range(2):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            model = lj()
            integrator = NVE(model, 1.0, hooks=[NeighborListHook(model.neighbor_config)])
            parallel = DomainParallel(integrator, DomainConfig(cutoff=5.0))
            parallel.partition(Batch.from_data_list([fcc(2)]) if comm.rank == 0 else None)
        seen.append([str(w.message) for w in caught if issubclass(w.category, PrecisionWarning)])
    pin_fp32()
    return [seen, torch.get_float32_matmul_precision(), os.environ["NVIDIA_TF32_OVERRIDE"]]


@pytest.mark.gloo
def test_a_scope_under_reduced_precision_warns_once_a_process():
    for outcome in run_ranks(open_twice, 2, launcher="gloo", fresh=True):
        assert outcome.failure is None
        (first, second), precision, override = outcome.result
        assert len(first) == 1
        assert "pin_fp32" in first[0]
        assert second == []
        assert (precision, override) == ("highest", "0")


def test_policy_reports_torch():
    assert "float32_matmul_precision" in str(PrecisionPolicy.current())
