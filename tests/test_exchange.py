"""What one package writes, the other reads or refuses, as the specification says."""

import sys
from pathlib import Path

import jax
import numpy as np
import pytest
import torch

from chemtrain_mpi.potentials import load as load_in_jax
from distmd_protocol import (
    CheckpointError,
    Potential,
    Units,
    flatten,
    load_checkpoint,
    read_manifest,
    save_checkpoint,
    save_potential,
)
from nvalchemi_distributed import DomainConfig, DomainParallel
from nvalchemi_distributed.data import AtomicData, Batch
from nvalchemi_distributed.dynamics import NVE, maxwell_boltzmann
from nvalchemi_distributed.hooks import NeighborListHook
from nvalchemi_distributed.models import PairPotentialWrapper

# The trainer package's own small problem.
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "packages" / "chemtrain-mpi" / "tests"))
import problems


@pytest.fixture(scope="module")
def trainer():
    """A trainer after one epoch, on one process."""
    made = problems.trainer(2)
    made.initialize_trajstates()
    made.train(1)
    return made


@pytest.fixture
def dynamics():
    """A decomposed run on one process, before its batch."""
    model = PairPotentialWrapper("lennard_jones", {"epsilon": np.array([[0.0101]]), "sigma": np.array([[3.4]])}, 8.5)
    hook = NeighborListHook(model.neighbor_config, skin=1.0)
    with DomainParallel(
        dynamics=NVE(model=model, dt=2.0, hooks=[hook]), config=DomainConfig(cutoff=8.5, skin=1.0), n_steps=3
    ) as made:
        yield made


def argon():
    """64 atoms."""
    axis = 3.8 * torch.arange(4, dtype=torch.float64)
    data = AtomicData(
        torch.cartesian_prod(axis, axis, axis),
        torch.full((64,), 18),
        cell=15.2 * torch.eye(3, dtype=torch.float64),
        pbc=True,
    )
    batch = Batch.from_data_list([data])
    maxwell_boltzmann(batch, 60.0, seed=0)
    return batch


def refused(action, path, *words):
    """The action raises a CheckpointError that says why, and leaves the file as it was."""
    before = read_manifest(path)
    with pytest.raises(CheckpointError) as caught:
        action(path)
    assert all(word in str(caught.value) for word in words), str(caught.value)
    assert read_manifest(path) == before


def test_trainer_checkpoint_opens_as_torch_and_is_no_dynamics(trainer, dynamics, tmp_path):
    path = trainer.save(tmp_path / "epoch")
    refused(dynamics.restore, path, "difftre-trainer", "dynamics")
    refused(PairPotentialWrapper.from_artefact, path, "difftre-trainer", "potential")
    # Any reader of the format gets the numbers; a torch template gets them as tensors, bit for bit.
    stored = load_checkpoint(path, kind="difftre-trainer")
    value = np.asarray(trainer.params["sigma"])
    template = {name: torch.from_numpy(np.array(array)) for name, array in stored.arrays.items()}
    tensors = load_checkpoint(path, template=template).restore(template)
    assert isinstance(tensors["params/sigma"], torch.Tensor)
    assert tensors["params/sigma"].numpy().tobytes() == value.tobytes()


def test_dynamics_checkpoint_opens_as_numpy_and_trains_nothing(trainer, dynamics, tmp_path):
    owned = dynamics.run(dynamics.partition(argon()))
    path = dynamics.save(tmp_path / "step-3")
    refused(trainer.restore, path, "dynamics", "difftre-trainer")
    refused(trainer.load_trajstates, path, "dynamics", "trajectories")
    refused(load_in_jax, path, "dynamics", "potential")
    stored = load_checkpoint(path, kind="dynamics", shard=0)
    template = {name: jax.ShapeDtypeStruct(array.shape, array.dtype) for name, array in stored.arrays.items()}
    positions = load_checkpoint(path, template=template, shard=0).restore(template)["node/positions"]
    assert positions.tobytes() == owned.positions.numpy().tobytes()


def test_artefact_is_neither_a_trainer_nor_a_dynamics(trainer, dynamics, tmp_path):
    path = argon_artefact(tmp_path)
    refused(trainer.restore, path, "potential", "difftre-trainer")
    refused(dynamics.restore, path, "potential", "dynamics")


def argon_artefact(folder):
    """An artefact that both packages read alike."""
    written = Potential(
        family="lennard_jones",
        species=("Ar",),
        masses=np.array([39.948]),
        parameters={"epsilon": np.array([[0.98]]), "sigma": np.array([[0.34]])},
        cutoff=0.85,
        smoothing="none",
        tail_correction=True,
        units=Units("nm", "kJ/mol", "amu", "ps"),
    )
    save_potential(folder / "argon", written)
    in_torch = PairPotentialWrapper.from_artefact(folder / "argon")
    in_jax = load_in_jax(folder / "argon", units=Units.METAL)
    assert in_torch.cutoff == pytest.approx(float(in_jax.potential.cutoff), rel=1e-15)
    return folder / "argon"


@pytest.mark.parametrize("library", ["jax", "torch"])
def test_error_state_of_either_library_is_resumed_by_neither(trainer, dynamics, tmp_path, library):
    tree = {"params": trainer.params} if library == "jax" else {"node": {"positions": argon().positions}}
    path = save_checkpoint(tmp_path / "failed", flatten(tree), kind="error-state", step=1).wait()
    refused(trainer.restore, path, "error-state")
    refused(dynamics.restore, path, "error-state")
    # For diagnosis it opens, when that is asked for.
    assert load_checkpoint(path, allow_error_state=True).kind == "error-state"


def test_error_state_of_a_failed_update_is_resumed_by_neither(dynamics, tmp_path):
    def broken(prediction, target):
        return jax.numpy.nan * jax.numpy.sum(prediction - target)

    failing = problems.trainer(2, loss_fn=broken, checkpoint_path=tmp_path)
    failing.initialize_trajstates()
    with pytest.raises(Exception, match="not finite"):
        failing.train(1)
    (path,) = tmp_path.glob("*_error_state")
    assert read_manifest(path).kind == "error-state"
    refused(failing.restore, path, "error_state")
    refused(dynamics.restore, path, "error-state")
