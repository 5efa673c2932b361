"""Both backends in one process, on real MPI ranks and on real gloo ranks: one file format, one precision policy."""

import hashlib
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import chemtrain_mpi
import nvalchemi_distributed
from distmd_protocol import (
    AgreementError,
    PrecisionPolicy,
    check_environment,
    flatten,
    load_checkpoint,
    save_checkpoint,
)
from distmd_protocol.testkit import run_ranks

LAUNCHERS = [pytest.param("mpi", marks=pytest.mark.mpi), pytest.param("gloo", marks=pytest.mark.gloo)]


def mixed_tree(rank):
    """Arrays of both libraries, among them what only one of them has."""
    return {
        "jax": {
            "bfloat16": jnp.arange(6, dtype=jnp.bfloat16).reshape(2, 3) / 3,
            "float32": jnp.linspace(0, 1, 5, dtype=jnp.float32) + rank,
            "key": jax.random.key(7 + rank),
            "empty": jnp.zeros((0, 3)),
        },
        "torch": {
            "bfloat16": (torch.arange(6, dtype=torch.float32).reshape(2, 3) / 3).to(torch.bfloat16),
            "float64": torch.linspace(0, 1, 5, dtype=torch.float64) + rank,
            "transposed": torch.arange(6).reshape(2, 3).T,
            "flag": torch.tensor(True),
        },
        "numpy": {"scalar": np.array(0.1), "big_endian": np.arange(4, dtype=">i4")},
    }


def bits(leaf):
    """Bytes of an array of either library."""
    if isinstance(leaf, torch.Tensor):
        leaf = leaf.contiguous()
        return (leaf.view(torch.int16) if leaf.dtype == torch.bfloat16 else leaf).numpy().tobytes()
    if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    return np.asarray(leaf).tobytes()


def write_and_read(comm, folder):
    """One shard a rank with arrays of both libraries; what each rank reads back is what it wrote."""
    tree = mixed_tree(comm.rank)
    pending = save_checkpoint(
        Path(folder) / "both", flatten(tree), kind="dynamics", step=3, comm=comm, replicated=False
    )
    checkpoint = load_checkpoint(pending.wait(), kind="dynamics", comm=comm, shard=comm.rank)
    restored = checkpoint.restore(tree)
    same = {
        key: bits(first) == bits(second) and type(first) is type(second)
        for (key, first), second in zip(flatten(tree).items(), flatten(restored).values(), strict=True)
        if key != "numpy/big_endian"
    }
    same["numpy/big_endian"] = bool((np.asarray(restored["numpy"]["big_endian"]) == [0, 1, 2, 3]).all())
    # Both libraries do arithmetic in this very process, and the policy in the file names both.
    product = float(jnp.dot(jnp.ones(3), jnp.ones(3))) + float(torch.ones(3) @ torch.ones(3))
    return {
        "same": same,
        "backends": sorted(checkpoint.precision.backends),
        "product": product,
        "manifest": hashlib.sha256((checkpoint.path / "manifest.json").read_bytes()).hexdigest(),
    }


def agree_on_environment(comm):
    """Equal ranks pass; a rank with another torch setting is named."""
    check_environment(comm)
    before = torch.get_float32_matmul_precision()
    if comm.rank == comm.size - 1:
        torch.set_float32_matmul_precision("medium")
    try:
        check_environment(comm)
    except AgreementError as error:
        return str(error)
    finally:
        torch.set_float32_matmul_precision(before)
    return "no error"


def pinned(comm):
    """Either package's pin_fp32 sets the switches of both."""
    chemtrain_mpi.pin_fp32()
    torch_is_full = torch.get_float32_matmul_precision() == "highest"
    nvalchemi_distributed.pin_fp32()
    policy = PrecisionPolicy.current()
    return [torch_is_full, policy.backends["jax"]["matmul_precision"], policy.environment["NVIDIA_TF32_OVERRIDE"]]


@pytest.mark.parametrize("launcher", LAUNCHERS)
@pytest.mark.parametrize("size", [1, 2])
def test_arrays_of_both_libraries_share_a_checkpoint(launcher, size, tmp_path):
    results = run_ranks(write_and_read, size, str(tmp_path), launcher=launcher)
    for result in results:
        assert all(result["same"].values()), result["same"]
        assert result["backends"] == ["jax", "torch"]
        assert result["product"] == 6.0
        assert result["manifest"] == results[0]["manifest"]


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_environment_agreement_covers_both_backends(launcher):
    messages = run_ranks(agree_on_environment, 2, launcher=launcher)
    assert messages[0] == messages[1]
    assert "backends.torch.float32_matmul_precision" in messages[0]
    assert "medium" in messages[0]


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_either_pin_reaches_both_backends(launcher):
    assert run_ranks(pinned, 2, launcher=launcher) == [[True, "highest", "0"]] * 2
