"""The potential artefact: what one backend trains and the other simulates.

Formulas, units and tail corrections are written down in ``docs/protocol/potentials.md``; the test vectors in
``tests/vectors/potentials`` are what both backends reproduce.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from distmd_protocol.checkpoint import load_checkpoint, save_checkpoint
from distmd_protocol.comm import Comm
from distmd_protocol.errors import CheckpointError, ProtocolError
from distmd_protocol.families import FAMILIES, RESERVED, SMOOTHINGS
from distmd_protocol.units import Units

KIND = "potential"


@dataclass(frozen=True)
class Potential:
    """A pair potential between species. Checked when it is built.

    Axis letters: ``S`` species, ``M`` knots.

    Parameters
    ----------
    family
        ``"lennard_jones"``, ``"mie"``, ``"morse"`` or ``"tabulated_pair"``.
    species
        Names, ``S`` of them; the position in the tuple is the species index.
    masses
        Masses, shape ``(S,)``.
    parameters
        float64 arrays by name. Pair parameters have shape ``(S, S)`` and are symmetric; ``tabulated_pair`` has
        ``r`` (``M`` increasing knots) and ``energy`` (``(S, S, M)``).
    cutoff
        Distance beyond which there is no interaction.
    smoothing
        ``"none"`` truncates; ``"shift"`` also shifts the energy to zero at the cutoff.
    tail_correction
        Add the analytic correction beyond the cutoff for a homogeneous fluid.
    units
        Units of everything above.
    meta
        Free-form JSON object (where it was fitted, to what).

    Raises
    ------
    ProtocolError
        Saying what is wrong and what would be right.
    """

    family: str
    species: tuple[str, ...]
    masses: NDArray[np.float64]
    parameters: Mapping[str, NDArray[np.float64]]
    cutoff: float
    smoothing: str
    tail_correction: bool
    units: Units
    meta: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        set_field = object.__setattr__
        set_field(self, "species", tuple(self.species))
        set_field(self, "masses", _float64(self.masses, "masses"))
        set_field(self, "parameters", _in_order(self.family, self.parameters))
        set_field(self, "cutoff", float(self.cutoff))
        _check(self)

    def to_units(self, units: Units) -> Potential:
        """Return the same potential in other units."""
        family = FAMILIES[self.family]
        convert = self.units.factor_to
        return dataclasses.replace(
            self,
            masses=self.masses * convert(units, "mass"),
            parameters={
                name: value * convert(units, family.parameters[name].dimension)
                for name, value in self.parameters.items()
            },
            cutoff=self.cutoff * convert(units, "length"),
            units=units,
        )


def save_potential(
    path: str | os.PathLike[str],
    potential: Potential,
    *,
    comm: Comm | None = None,
    packages: Mapping[str, str] | None = None,
) -> Path:
    """Write the artefact: a checkpoint of kind ``"potential"``. Collective if ``comm`` is given; rank zero writes.

    Returns
    -------
    Path
        Where it is.

    Raises
    ------
    CheckpointError
        As ``save_checkpoint``.
    """
    meta = {
        "family": potential.family,
        "species": list(potential.species),
        "cutoff": potential.cutoff,
        "smoothing": potential.smoothing,
        "tail_correction": potential.tail_correction,
        "units": potential.units.to_json(),
        "meta": dict(potential.meta),
    }
    arrays = {"masses": potential.masses} | {
        f"parameters/{name}": value for name, value in potential.parameters.items()
    }
    return save_checkpoint(path, arrays, kind=KIND, step=0, comm=comm, meta=meta, packages=packages).path


def load_potential(path: str | os.PathLike[str], *, units: Units | None = None, comm: Comm | None = None) -> Potential:
    """Read the artefact. Collective if ``comm`` is given; every rank gets it.

    Parameters
    ----------
    path
        Where ``save_potential`` put it.
    units
        Units to convert to; ``None`` leaves those of the file.
    comm
        Ranks that read together.

    Raises
    ------
    CheckpointError
        If it cannot be read, or what it holds is no potential.
    """
    checkpoint = load_checkpoint(path, kind=KIND, comm=comm)
    try:
        meta = dict(checkpoint.meta)
        potential = Potential(
            family=meta["family"],
            species=tuple(meta["species"]),
            masses=checkpoint.arrays["masses"],
            parameters={
                key.removeprefix("parameters/"): value
                for key, value in checkpoint.arrays.items()
                if key.startswith("parameters/")
            },
            cutoff=meta["cutoff"],
            smoothing=meta["smoothing"],
            tail_correction=meta["tail_correction"],
            units=Units(**meta["units"]),
            meta=meta["meta"],
        )
    except (KeyError, TypeError, ValueError, ProtocolError) as error:
        raise CheckpointError(f"{path} is of kind 'potential' but does not hold one: {error!r}") from error
    return potential if units is None else potential.to_units(units)


def _float64(value: Any, name: str) -> NDArray[np.float64]:
    array = np.asarray(value)
    if array.dtype.kind not in "fiu":
        raise ProtocolError(f"{name} has the type {array.dtype}; give real numbers")
    return np.array(array, dtype=np.float64)


def _in_order(family: str, parameters: Mapping[str, Any]) -> dict[str, NDArray[np.float64]]:
    """Return the parameters in the family's order; unknown ones, which are refused later, stay at the end."""
    order = [name for name in getattr(FAMILIES.get(family), "parameters", ()) if name in parameters]
    return {name: _float64(parameters[name], name) for name in [*order, *sorted(set(parameters) - set(order))]}


def _check(potential: Potential) -> None:
    family = FAMILIES.get(potential.family)
    if family is None:
        reserved = " (reserved: it has no test vectors yet)" if potential.family in RESERVED else ""
        raise ProtocolError(f"unknown family {potential.family!r}{reserved}; use one of {', '.join(FAMILIES)}")
    count = len(potential.species)
    if (
        count == 0
        or len(set(potential.species)) != count
        or not all(isinstance(name, str) and name for name in potential.species)
    ):
        raise ProtocolError(f"species {potential.species!r}: give at least one name, each once")
    if potential.masses.shape != (count,) or not _positive(potential.masses):
        raise ProtocolError(f"masses of shape {potential.masses.shape}: give {count} positive finite masses")
    if not np.isfinite(potential.cutoff) or potential.cutoff <= 0:
        raise ProtocolError(f"cutoff {potential.cutoff}: give a positive length")
    if potential.smoothing not in SMOOTHINGS:
        raise ProtocolError(f"unknown smoothing {potential.smoothing!r}; use one of {', '.join(SMOOTHINGS)}")
    if not isinstance(potential.units, Units) or not isinstance(potential.tail_correction, bool):
        raise ProtocolError("units must be a Units and tail_correction a bool")
    if not isinstance(potential.meta, Mapping):
        raise ProtocolError(f"meta is a {type(potential.meta).__name__}; give a JSON object")
    if set(potential.parameters) != set(family.parameters):
        raise ProtocolError(
            f"{potential.family} has the parameters {', '.join(family.parameters)}, "
            f"not {', '.join(potential.parameters) or 'none'}"
        )
    family.check(potential.parameters, count, potential.cutoff)
    if potential.tail_correction:
        family.check_tail(potential.parameters)


def _positive(array: NDArray[np.float64]) -> bool:
    return bool(np.all(np.isfinite(array)) and np.all(array > 0))
