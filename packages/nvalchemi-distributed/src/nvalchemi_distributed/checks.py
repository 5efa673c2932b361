"""What is refused before the first step. Each message names the number and the remedy."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor

from nvalchemi_distributed.config import DomainConfig
from nvalchemi_distributed.data.batch import Batch
from nvalchemi_distributed.domain.scatter import SHARED_DTYPES
from nvalchemi_distributed.dynamics.base import BaseDynamics, is_global
from nvalchemi_distributed.errors import ConfigError, InputError, ModelError
from nvalchemi_distributed.hooks.neighbor_list import NeighborListHook
from nvalchemi_distributed.neighbors.cells import complete_cell
from nvalchemi_distributed.spec import MLIPSpec


def check_batch(batch: Batch) -> None:
    """A batch that can be simulated.

    Raises:
        InputError: dtype, device, non-finite numbers, masses, cells or ids.
    """
    if batch.dtype not in (torch.float32, torch.float64):
        raise InputError(f"positions are {batch.dtype}; use float32 or float64")
    if batch.device.type != "cpu":
        raise InputError(f"the batch is on {batch.device}; this release decomposes on the CPU, use batch.to('cpu')")
    if batch.num_nodes == 0:
        raise InputError("the batch holds no atoms")
    for name, field in {**batch.node_fields, **batch.system_fields}.items():
        if field.dtype not in SHARED_DTYPES.values():
            raise InputError(f"{name} is {field.dtype}; fields that travel are one of {', '.join(SHARED_DTYPES)}")
    for name in ("positions", "velocities", "cell"):
        value = getattr(batch, name)
        bad = (~torch.isfinite(value).reshape(value.shape[0], -1).all(-1)).nonzero().squeeze(-1).tolist()
        if bad:
            who = "systems" if name == "cell" else "atoms"
            raise InputError(f"{name} of {who} {bad[:20]} are NaN or infinite; mend the input")
    light = (~(batch.atomic_masses > 0)).nonzero().squeeze(-1).tolist()
    if light:
        raise InputError(f"atoms {light[:20]} have no positive mass; give atomic_masses in amu")
    if batch.atom_id is not None:
        unique, counts = batch.atom_id.unique(return_counts=True)
        if batch.atom_id.dtype != torch.int64 or bool((unique < 0).any()) or bool((counts > 1).any()):
            raise InputError(
                f"atom_id must be different int64 numbers, 0 or more; doubled: {unique[counts > 1][:20].tolist()}"
            )
    check_cells(batch.cell, batch.pbc)


def check_cells(cell: Tensor, pbc: Tensor) -> None:
    """Right-handed cells that span their periodic directions.

    Raises:
        InputError: names the system, its pbc and its volume.
    """
    full = complete_cell(cell, pbc)
    for s in range(full.shape[0]):
        lengths = full[s].norm(dim=-1)
        volume = float(full[s].det())
        flags = pbc[s].tolist()
        if any(flags[a] and float(cell[s, a].norm()) == 0 for a in range(3)):
            raise InputError(
                f"system {s}: periodic axes {flags} need lattice vectors, but one is zero; set pbc or the cell"
            )
        if abs(volume) < 1.0e-10 * float(lengths.prod()):
            raise InputError(
                f"system {s}: its lattice vectors lie in a plane (volume {volume:.3g} Å³); give independent ones"
            )
        if volume < 0:
            raise InputError(f"system {s}: left-handed cell (volume {volume:.6g} Å³); swap two lattice vectors")


def check_dynamics(
    dynamics: BaseDynamics, config: DomainConfig, outer_hooks: list[object], spec: MLIPSpec | None = None
) -> NeighborListHook | None:
    """Model, hooks and configuration fit together, with ``spec`` or the model's own. Returns the neighbour-list hook.

    Raises:
        ConfigError, ModelError: see the messages.
    """
    model = dynamics.model
    spec = model.distribution_spec if spec is None else spec
    if spec is None:
        raise ModelError(
            f"{type(model).__name__} has no distribution_spec, so nothing says how it behaves under decomposition; "
            "declare one (a preset such as SPEC_LJ_HALO, or an MLIPSpec)"
        )
    wrong = [h for h in dynamics.hooks if is_global(h)]
    if wrong:
        raise ConfigError(
            f"{type(wrong[0]).__name__} has HookScope.GLOBAL; register it on DomainParallel, not on the integrator"
        )
    lists = [h for h in [*dynamics.hooks, *outer_hooks] if isinstance(h, NeighborListHook)]
    if model.neighbor_config is None:
        return lists[0] if lists else None
    if config.cutoff < model.cutoff:
        raise ConfigError(
            f"DomainConfig.cutoff={config.cutoff} is below the model's cutoff {model.cutoff}; give at least that"
        )
    if not lists:
        raise ConfigError(
            "the model needs a neighbour list; add NeighborListHook(model.neighbor_config, skin=…) to the hooks"
        )
    if len(lists) > 1:
        raise ConfigError(f"{len(lists)} NeighborListHooks; one list serves the model, remove the others")
    hook = lists[0]
    if hook.skin > config.skin:
        raise ConfigError(
            f"NeighborListHook skin={hook.skin} is above DomainConfig.skin={config.skin}; make them equal"
        )
    if hook.config.cutoff < model.cutoff or hook.config.format is not model.neighbor_config.format:
        raise ConfigError(
            f"NeighborListHook has cutoff {hook.config.cutoff} and format {hook.config.format.value}, the model needs "
            f"{model.cutoff} and {model.neighbor_config.format.value}; pass model.neighbor_config"
        )
    need = config.needed_width(spec.hops)
    if config.ghost_width is not None and config.ghost_width < need:
        raise ConfigError(
            f"ghost_width={config.ghost_width}, but {spec.hops} hops need hops × cutoff + skin + "
            f"migration_hysteresis = {need}; give at least {need}, or leave it out"
        )
    return hook


def tensor_state(dynamics: BaseDynamics) -> set[str]:
    """Names of the integrator's attributes that are tensors with rows."""
    return {name for name, value in vars(dynamics).items() if isinstance(value, Tensor) and value.dim() > 0}


def refuse_per_atom_state(
    dynamics: BaseDynamics, n_owned: int, n_systems: int, seen: Collection[str] = frozenset()
) -> None:
    """Refuse integrator attributes with one row an owned atom: migration would not carry them.

    Attributes in ``seen`` have been looked at before and are left alone.

    Raises:
        ConfigError: names them.
    """
    rows = {name: getattr(dynamics, name).shape[0] for name in tensor_state(dynamics) - set(seen)}
    # One row a system is legitimate, also when a rank happens to own as many atoms.
    names = sorted(name for name, n in rows.items() if n == n_owned and n != n_systems and n_owned > 0)
    if names:
        raise ConfigError(
            f"{type(dynamics).__name__} keeps {names} with one row for each of the {n_owned} owned atoms; "
            "atoms migrate, so put it into the batch instead: batch.add_key(name, tensor, level='node')"
        )
