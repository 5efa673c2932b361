"""What the ranks run. Each function takes the communicator first and returns JSON-able results."""

from __future__ import annotations

import os
import signal
import time
import warnings
from functools import partial
from typing import Any

import harmonic
import jax
import jax.numpy as jnp
import numpy as np
import optax
import problems
from jax_md import simulate, space

from chemtrain_mpi import DifftreParallel, PrecisionWarning, process_printouts
from chemtrain_mpi.collectives import Collectives

SHORT = process_printouts(0.005, 0.25, 0.05, 0.05)


def report(trainer: Any) -> dict[str, Any]:
    """Everything that must not depend on the number of ranks."""
    return {
        "params": problems.bits(trainer.params),
        "losses": [entry["loss"].hex() for entry in trainer.history],
        "n_eff": [entry["n_eff"] for entry in trainer.history],
        "recomputed": [entry["recomputed"] for entry in trainer.history],
        "states": problems.bits([t.chains for t in trainer.trajectories]),
        "capacities": [[t.capacity.slots, t.capacity.cell] for t in trainer.trajectories],
    }


def train(comm: Any, epochs: int = 20, points: int = 4, **overrides: Any) -> dict[str, Any]:
    keywords = {"timings": SHORT, "reweight_ratio": 0.97, "comm": comm, **overrides}
    trainer = problems.trainer(points, **keywords)
    trainer.initialize_trajstates()
    trainer.train(epochs)
    return report(trainer)


def train_at_constant_pressure(comm: Any) -> dict[str, Any]:
    trainer = DifftreParallel(**problems.constant_pressure(2, reweight_ratio=0.999, comm=comm))
    trainer.initialize_trajstates()
    trainer.train(4)
    return report(trainer)


def train_with_nose_hoover_and_bounded_steps(comm: Any) -> dict[str, Any]:
    """A thermostat without noise, and updates of which every rank takes the smallest fraction."""
    _, shift = space.periodic_general(4.0, fractional_coordinates=True)
    simulator = partial(simulate.nvt_nose_hoover, shift_fn=shift, dt=0.005, kT=1.0)
    trainer = problems.trainer(
        2,
        comm=comm,
        timings=SHORT,
        simulator_template=simulator,
        optimizer=optax.sgd(0.01),
        reweight_ratio=0.95,
        allowed_reduction=0.9,
    )
    trainer.initialize_trajstates()
    trainer.train(4)
    return report(trainer) | {"steps": [float(entry["step_size"]) for entry in trainer.history]}


def train_64(comm: Any) -> dict[str, Any]:
    jax.config.update("jax_enable_x64", True)
    try:
        return train(comm)
    finally:
        jax.config.update("jax_enable_x64", False)


def train_chains(comm: Any, points: int = 2, epochs: int = 3) -> dict[str, Any]:
    """Two chains a state point that start anew from drawn snapshots, with free energies among the targets."""
    arguments = problems.arguments(points)
    free = {"target": jnp.linspace(-1.0, 1.0, points), "gamma": jnp.full(points, 1e-2)}
    trainer = problems.trainer(
        points,
        comm=comm,
        timings=SHORT,
        reweight_ratio=0.98,
        num_chains=2,
        resample_simstates=True,
        free_energies=True,
        traj_states_on_host=comm.rank == 0 and comm.size == 1,
        targets={**arguments["targets"], "free_energy": free},
    )
    trainer.initialize_trajstates(num_runs=2)
    trainer.train(epochs)
    records = [(t.free_energy.params, t.free_energy.values) for t in trainer.trajectories]
    return {**report(trainer), "records": problems.bits(records), "predicted": problems.bits(trainer.predict())}


def train_harmonic_chains(comm: Any) -> dict[str, Any]:
    """The same for oscillators, which compile in no time."""
    free = {"target": jnp.full(2, 3.0), "gamma": jnp.ones(2)}
    keywords = {"num_chains": 2, "resample_simstates": True, "free_energies": True, "reweight_ratio": 0.97}
    trainer = harmonic.trainer(
        snapshots=20, comm=comm, optimizer=optax.sgd(1.0), targets={"free_energy": free}, **keywords
    )
    trainer.initialize_trajstates(num_runs=2)
    trainer.train(4)
    records = [(t.free_energy.params, t.free_energy.values) for t in trainer.trajectories]
    return {**report(trainer), "records": problems.bits(records), "predicted": problems.bits(trainer.predict())}


def train_with_matrix_products_64(comm: Any) -> dict[str, Any]:
    jax.config.update("jax_enable_x64", True)
    try:
        return train_with_matrix_products(comm)
    finally:
        jax.config.update("jax_enable_x64", False)


def train_with_matrix_products(comm: Any, epochs: int = 20) -> dict[str, Any]:
    """A potential with products large enough that XLA would split them over threads if it had several."""
    arguments = problems.arguments(4)
    pair = arguments["energy_fn_template"]
    width = 256

    def energy_fn_template(params):
        energy_fn = pair({"epsilon": params["epsilon"], "sigma": params["sigma"]})

        def energy(position, neighbor, box, **kw):
            features = jnp.cos(2 * jnp.pi * position @ params["first"])
            return energy_fn(position, neighbor, box=box, **kw) + jnp.sum(jnp.tanh(features @ params["second"]))

        return energy

    keys = jax.random.split(jax.random.PRNGKey(0), 2)
    params = {
        **arguments["init_params"],
        # Whole numbers, so that the energy is periodic in fractional coordinates.
        "first": jnp.round(2 * jax.random.normal(keys[0], (3, width))),
        "second": 0.01 * jax.random.normal(keys[1], (width, width)),
    }
    trained = {"epsilon": 1.0, "sigma": 1.0, "first": 0.0, "second": 0.01}
    scale = optax.stateless(lambda u, _: {name: trained[name] * value for name, value in u.items()})
    quantities = {
        "energy": lambda state, neighbor, energy_params, **kw: energy_fn_template(energy_params)(
            state.position, neighbor=neighbor, **kw
        )
    }
    return train(
        comm,
        epochs=epochs,
        init_params=params,
        optimizer=optax.chain(optax.adam(0.02), scale),
        energy_fn_template=energy_fn_template,
        quantities=quantities,
        observables={"energy": arguments["observables"]["energy"]},
        targets={"energy": arguments["targets"]["energy"]},
    )


def train_by_all_reduce(comm: Any, deterministic: bool = False) -> dict[str, Any]:
    """One update by plain descent, whose step shows the gradient, with two of three state points recomputed."""
    keywords = {"timings": SHORT, "num_chains": 2, "overflow_capacity_multiplier": 3.0, "reweight_ratio": 0.9}
    trainer = problems.trainer(3, comm=comm, deterministic=deterministic, optimizer=optax.sgd(1e-3), **keywords)
    trainer.initialize_trajstates()
    for k in (0, 2):
        old = trainer.trajectories[k]
        energy = old.reference_energy + jnp.arange(8.0) * 5.0
        trainer.trajectories[k] = type(old)(**{**vars(old), "reference_energy": energy})
    start = jax.tree.map(float, trainer.params)
    trainer.train(1)
    return {
        "steps": [float(trainer.params[name]) - start[name] for name in sorted(start)],
        "loss": trainer.history[0]["loss"],
        "n_eff": list(trainer.history[0]["n_eff"].values()),
        "recomputed": trainer.history[0]["recomputed"],
        "compilations": trainer.compilations,
    }


def train_with_overflow_on_one_state_point(comm: Any) -> dict[str, Any]:
    """State point 1 is squeezed so that its first list is too small; the others are not."""
    edges = jnp.asarray([4.2, 3.5, 4.2, 4.2])
    state_kwargs = {"kT": jnp.full(4, 1.6), "box": edges}
    return train(comm, epochs=2, state_kwargs=state_kwargs, overflow_capacity_multiplier=1.05, max_neighbor_retries=12)


def simulated_here(comm: Any) -> list[int]:
    """Which state points this rank simulated when 2 of 8 were stale."""
    trainer = problems.trainer(8, timings=SHORT, reweight_ratio=0.5, comm=comm)
    trainer.initialize_trajstates()
    state = trainer._state
    for k in (3, 6):
        old = state.trajectories[k]
        energy = old.reference_energy + jnp.arange(4.0) * 50.0
        state.trajectories[k] = type(old)(**{**vars(old), "reference_energy": energy})
    seen: list[int] = []
    run = trainer._sampler.run

    def spy(params, jobs):
        seen.extend(int(job.name.split()[-1]) for job in jobs)
        return run(params, jobs)

    trainer._sampler.run = spy
    trainer.train(1)
    assert trainer.history[0]["recomputed"] == [3, 6]
    return seen


def differing_argument(comm: Any, name: str) -> str:
    overrides: dict[str, Any] = {}
    if comm.rank == comm.size - 1:
        if name == "targets":
            overrides["targets"] = problems.arguments(4)["targets"]
            overrides["targets"]["energy"]["gamma"] = jnp.full(4, 2e-3)
        elif name == "timings":
            overrides["timings"] = process_printouts(0.005, 0.3, 0.1, 0.05)
        elif name == "state_kwargs":
            overrides["state_kwargs"] = {"kT": jnp.full(4, 1.01), "box": jnp.asarray(problems.EDGES[:4])}
        elif name == "init_params":
            overrides["init_params"] = {"epsilon": jnp.asarray(1.0), "sigma": jnp.asarray([0.95])}
        elif name == "optimizer":
            overrides["optimizer"] = optax.sgd(0.02, momentum=0.9)
        elif name == "convergence_criterion":
            overrides["convergence_criterion"] = "max_loss"
        elif name == "traj_states_on_host":
            overrides["traj_states_on_host"] = True
        elif name == "key":
            overrides["key"] = jax.random.PRNGKey(4)
        elif name == "num_chains":
            overrides["num_chains"] = 2
        elif name == "simulator_template":
            overrides["simulator_template"] = problems.simulator(dt=0.004)
    try:
        problems.trainer(4, comm=comm, **overrides)
    except Exception as error:  # noqa: BLE001 - the test looks at what it is
        return f"{type(error).__name__}: {error}"
    return "no error"


def differing_function(comm: Any, name: str) -> str:
    """The last rank has another function where the arguments look alike."""
    other = comm.rank == comm.size - 1
    overrides: dict[str, Any] = {}
    template = problems.arguments(4)["energy_fn_template"]
    if name == "optimizer":
        overrides["optimizer"] = optax.adam(0.021 if other else 0.02)
    elif name == "schedule":
        overrides["optimizer"] = optax.adam(optax.exponential_decay(0.02, 100, 0.5 if other else 0.6))
    elif name == "convergence_criterion":
        overrides["convergence_criterion"] = (lambda losses: losses[-1]) if other else (lambda losses: losses[0])
    elif name == "loss_fn":
        overrides["loss_fn"] = lambda a, b: jnp.mean(jnp.abs(a - b) ** (1.0 if other else 2.0))
    elif name == "energy_fn_template" and other:
        overrides["energy_fn_template"] = lambda params: template({**params, "sigma": params["sigma"] * 1.001})
    elif name == "observable" and other:
        overrides["observables"] = {
            "energy": lambda trajectories, weights, **_: 1.001 * jnp.sum(trajectories["energy"] * weights),
            "pressure": problems.arguments(4)["observables"]["pressure"],
        }
    try:
        trainer = problems.trainer(4, comm=comm, timings=SHORT, **overrides)
        trainer.initialize_trajstates()
        trainer.train(1)
    except Exception as error:  # noqa: BLE001
        return f"{type(error).__name__}: {error}"
    return "no error"


def construction_error(comm: Any, **overrides: Any) -> str:
    try:
        problems.trainer(4, comm=comm, **overrides)
    except Exception as error:  # noqa: BLE001
        return f"{type(error).__name__}: {error}"
    return "no error"


def two_devices_on_one_rank(comm: Any) -> str:
    count = jax.local_device_count
    if comm.rank == 1:
        jax.local_device_count = lambda: 2
    try:
        return construction_error(comm)
    finally:
        jax.local_device_count = count


def one_rank_fails(comm: Any, where: str, folder: str) -> str:
    """The same error on every rank, whichever operation fails on one."""
    trainer = problems.trainer(4, timings=SHORT, comm=comm, checkpoint_path=folder)
    trainer.initialize_trajstates()
    # Everything is compiled when the failure comes, so that the time below is the failure's.
    trainer.train(1)

    def fail(*_: Any, **__: Any) -> None:
        raise ValueError("bad luck on one rank")

    last = comm.rank == comm.size - 1
    if where == "simulation" and last:
        trainer._sampler.run = fail
        trainer._rule._ratio = 2.0
    elif where == "simulation":
        trainer._rule._ratio = 2.0
    elif where == "evaluation" and last:
        trainer._points.objective.evaluate = fail
    elif where == "history" and comm.rank == 0:
        trainer._history.add = fail
    start = time.monotonic()
    try:
        trainer.train(1)
    except Exception as error:  # noqa: BLE001
        assert time.monotonic() - start < 10.0
        return f"{type(error).__name__}: {error}"
    return "no error"


def files_that_fail(comm: Any, folder: str) -> dict[str, str]:
    """What each method of files says where rank zero cannot write, or the last rank cannot read."""
    trainer = problems.trainer(2, timings=SHORT, comm=comm, checkpoint_path=folder)
    trainer.initialize_trajstates()
    trainer.train(1, checkpoint_freq=1)
    trainer.save_trajstates(f"{folder}/trajectories")
    if comm.rank == 0:
        with open(f"{folder}/blocked", "w") as file:
            file.write("")
    missing = "-gone" if comm.rank == comm.size - 1 else ""
    before, messages = report(trainer), {}
    for method, path in {
        "save": f"{folder}/blocked/c",
        "save_trajstates": f"{folder}/blocked/t",
        "restore": f"{folder}/epoch-000001{missing}",
        "load_trajstates": f"{folder}/trajectories{missing}",
    }.items():
        start = time.monotonic()
        try:
            getattr(trainer, method)(path)
        except Exception as error:  # noqa: BLE001
            assert time.monotonic() - start < 10.0
            messages[method] = f"{type(error).__name__}: {error}"
    assert report(trainer) == before
    # Nobody waits for anybody: the ranks still work together.
    trainer.train(1)
    return messages


def nan_on_one_rank(comm: Any, folder: str) -> dict[str, Any]:
    """The energy of one state point turns NaN at epoch 3."""
    trainer = problems.trainer(4, timings=SHORT, comm=comm, checkpoint_path=folder)
    trainer.initialize_trajstates()
    trainer.train(2, checkpoint_freq=1)
    before = problems.bits((trainer.params, [t.snapshots for t in trainer.trajectories]))
    evaluate = trainer._points.objective.evaluate
    unlucky = float(trainer._points.kwargs[2]["box"])

    def poisoned(params, jobs):
        # Also the trajectory that the NaN effective sample size asks for, else the trouble would be over with it.
        changed = []
        for trajectory, kwargs, targets in jobs:
            if float(kwargs["box"]) == unlucky:
                snapshots = trajectory.snapshots
                position = snapshots.position.at[1, 0, 0].set(jnp.nan)
                trajectory = type(trajectory)(**{**vars(trajectory), "snapshots": snapshots.set(position=position)})
            changed.append((trajectory, kwargs, targets))
        return evaluate(params, changed)

    trainer._points.objective.evaluate = poisoned
    try:
        trainer.train(1, checkpoint_freq=1)
        message = "no error"
    except Exception as error:  # noqa: BLE001
        message = f"{type(error).__name__}: {error}"
    after = problems.bits((trainer.params, [t.snapshots for t in trainer.trajectories]))
    return {"message": message, "unchanged": before == after, "epoch": trainer.epoch}


def save_and_report(comm: Any, folder: str, epochs: int = 2) -> dict[str, Any]:
    trainer = problems.trainer(4, timings=SHORT, reweight_ratio=0.97, comm=comm, checkpoint_path=folder)
    trainer.initialize_trajstates()
    trainer.train(epochs, checkpoint_freq=1)
    trainer.save_trajstates(f"{folder}/trajectories")
    return report(trainer)


def restore_and_train(comm: Any, path: str, epochs: int) -> Any:
    trainer = problems.trainer(4, timings=SHORT, reweight_ratio=0.97, comm=comm)
    try:
        trainer.restore(path)
    except Exception as error:  # noqa: BLE001
        return f"{type(error).__name__}: {error}"
    trainer.train(epochs)
    return report(trainer)


def load_trajectories(comm: Any, path: str) -> list[str]:
    trainer = problems.trainer(4, timings=SHORT, comm=comm)
    trainer.load_trajstates(path)
    return problems.bits([t.snapshots for t in trainer.trajectories])


def killed_in_epoch_two(comm: Any, folder: str) -> None:
    """Rank 1 vanishes in the middle of epoch 3; the others must not wait for it."""
    trainer = problems.trainer(4, timings=SHORT, reweight_ratio=0.97, comm=comm, checkpoint_path=folder)
    trainer.initialize_trajstates()
    trainer.train(2, checkpoint_freq=1)
    if comm.rank == 1:
        trainer._points.objective.evaluate = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    trainer.train(2, checkpoint_freq=1)


def mismatched_operations(comm: Any) -> str:
    collectives = Collectives(comm)
    try:
        with collectives.named("train" if comm.rank == 0 else "predict"):
            collectives.broadcast(1)
    except Exception as error:  # noqa: BLE001
        return f"{type(error).__name__}: {error}"
    return "no error"


def share_arrays(comm: Any) -> list[str]:
    collectives = Collectives(comm)
    rng = np.random.default_rng(comm.rank)
    every = {
        k: [rng.normal(size=(k, 3)).astype(np.float32), np.array(k), np.array(jnp.arange(2.0, dtype=jnp.bfloat16))]
        for k in range(5)
    }
    owners = {k: k % comm.size for k in every}
    shared = collectives.share({k: every[k] for k, owner in owners.items() if owner == comm.rank}, owners)
    return [f"{k} {a.dtype} {a.shape} {a.tobytes().hex()}" for k, bundle in shared.items() for a in bundle]


def sum_arrays(comm: Any) -> list[float]:
    return Collectives(comm).sum(np.arange(3.0) * (comm.rank + 1)).tolist()


def warnings_under_reduced_precision(comm: Any) -> list[str]:
    """Two trainers under a reduced setting in one process."""
    jax.config.update("jax_default_matmul_precision", "bfloat16")
    try:
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            problems.trainer(4, comm=comm)
            problems.trainer(4, comm=comm)
    finally:
        jax.config.update("jax_default_matmul_precision", None)
    return [str(one.message) for one in seen if issubclass(one.category, PrecisionWarning)]
