"""Pair potentials: the wrapper for every family of the potential artefact."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from distmd_protocol import Comm, Potential, Units, load_potential
from nvalchemi_distributed._typing import ModelOutputs
from nvalchemi_distributed.data.batch import Batch
from nvalchemi_distributed.data.masses import CHEMICAL_SYMBOLS
from nvalchemi_distributed.errors import InputError, ModelError
from nvalchemi_distributed.models.base import BaseModelMixin, ModelConfig
from nvalchemi_distributed.models.pair_forms import make_form
from nvalchemi_distributed.models.pair_kernel import Kernel, make_kernel
from nvalchemi_distributed.models.tail import tail_integrals, tail_per_system
from nvalchemi_distributed.neighbors.config import NeighborConfig, NeighborListFormat
from nvalchemi_distributed.neighbors.row_matrix import RowMatrix
from nvalchemi_distributed.presets import SPEC_LJ_HALO
from nvalchemi_distributed.spec import MLIPSpec

_COUNTS = "species_counts"
_ANY_SPECIES = "*"
# Where xx xy xz, yx yy yz, zx zy zz stand in xx yy zz yz xz xy.
_VOIGT = torch.tensor([0, 5, 4, 5, 1, 3, 4, 3, 2])


class PairPotentialWrapper(nn.Module, BaseModelMixin):
    """U = Σ_{i<j, images} φ(r_ij) for r < cutoff. Analytic forces and virial; no autograd.

    Args:
        family: ``lennard_jones``, ``mie``, ``morse`` or ``tabulated_pair``.
        parameters: tables over species pairs in Å and eV, as in the potential artefact.
        cutoff: Å.
        species: chemical symbols in the order of the tables; ``("*",)`` means any atom.
        smoothing: ``none`` (plain truncation) or ``shift`` (φ − φ(cutoff)).
        tail_correction: add the analytic g(r) = 1 correction to energy and virial; needs a system periodic along all
            axes. Forces have none.
        compile: fuse the kernel with ``torch.compile``. The first call then takes some seconds and a C++ compiler;
            a step of some thousand atoms becomes several times faster. Where no compiler works a warning is logged
            and the kernel runs as with ``False``.

    Raises:
        InputError: parameters that do not make the family, a table of the wrong size, or a tail where there is none.
    """

    def __init__(
        self,
        family: str,
        parameters: Mapping[str, np.ndarray],
        cutoff: float,
        *,
        species: Sequence[str] = (_ANY_SPECIES,),
        smoothing: str = "none",
        tail_correction: bool = False,
        compile: bool = False,
    ) -> None:
        super().__init__()
        if smoothing not in ("none", "shift"):
            raise InputError(f"smoothing={smoothing!r}; use 'none' or 'shift'")
        self.family, self.species, self.smoothing = family, tuple(species), smoothing
        self.tail_correction, self.compile_kernel = bool(tail_correction), bool(compile)
        self._form = make_form(family, parameters)
        n_species = len(self.species)
        for name, value in parameters.items():
            if name != "r" and np.shape(value)[:2] != (n_species, n_species):
                raise InputError(
                    f"{name} has shape {np.shape(value)}; {n_species} species need ({n_species}, {n_species})"
                )
        if family == "tabulated_pair" and cutoff > float(np.max(parameters["r"])) * (1 + 1e-12):
            raise InputError(f"cutoff {cutoff} lies beyond the last knot {float(np.max(parameters['r']))}; shorten it")
        self.model_config = ModelConfig(
            outputs=frozenset({"energy", "forces", "virial", "stress"}),
            neighbor_config=NeighborConfig(float(cutoff), NeighborListFormat.MATRIX),
        )
        square = torch.full((n_species * n_species,), float(cutoff) ** 2, dtype=torch.float64)
        at_cutoff, _ = self._form.function(square, (*self._form.by_pair, *self._form.shared))
        self._shift = at_cutoff if smoothing == "shift" else torch.zeros_like(at_cutoff)
        self._tail: tuple[Tensor, Tensor] | None = None
        if self.tail_correction:
            energy, virial = tail_integrals(family, parameters, float(cutoff))
            energy = energy + self._shift.reshape(n_species, n_species).numpy() * float(cutoff) ** 3 / 3.0
            self._tail = (torch.from_numpy(energy), torch.from_numpy(virial))
        self._numbers = self._species_numbers()
        self._known_numbers: Tensor | None = None
        self._kernels: dict[tuple[bool, bool], Kernel] = {}
        self._cast: dict[torch.dtype, tuple[Tensor, tuple[Tensor, ...], tuple[Tensor, ...]]] = {}

    @classmethod
    def from_potential(cls, potential: Potential, *, compile: bool = False) -> PairPotentialWrapper:
        """From a potential artefact in any units; they are converted to Å and eV."""
        p = potential.to_units(Units.METAL)
        return cls(
            p.family,
            p.parameters,
            float(p.cutoff),
            species=p.species,
            smoothing=p.smoothing,
            tail_correction=p.tail_correction,
            compile=compile,
        )

    @classmethod
    def from_artefact(
        cls, path: str | Path, *, comm: Comm | None = None, compile: bool = False
    ) -> PairPotentialWrapper:
        """Read the artefact folder at ``path``."""
        return cls.from_potential(load_potential(path, units=Units.METAL, comm=comm), compile=compile)

    @property
    def distribution_spec(self) -> MLIPSpec:
        """The pair preset: one hop, edges with owned receivers, no fold."""
        return SPEC_LJ_HALO

    def _species_numbers(self) -> Tensor | None:
        if self.species == (_ANY_SPECIES,):
            return None
        table = {symbol: z for z, symbol in enumerate(CHEMICAL_SYMBOLS)}
        unknown = [s for s in self.species if s not in table]
        if unknown or len(set(self.species)) != len(self.species):
            raise InputError(f"species {list(self.species)}: give different chemical symbols, or ('*',) for any atom")
        return torch.tensor([table[s] for s in self.species])

    def _types(self, atomic_numbers: Tensor) -> Tensor:
        if self._numbers is None:
            return torch.zeros_like(atomic_numbers)
        match = atomic_numbers.unsqueeze(-1) == self._numbers.to(atomic_numbers.device)
        if not bool(match.any(-1).all()):
            stranger = sorted(set(atomic_numbers[~match.any(-1)].tolist()))
            names = [CHEMICAL_SYMBOLS[z] if 0 <= z < len(CHEMICAL_SYMBOLS) else z for z in stranger]
            raise InputError(f"the potential knows {list(self.species)}, but the system holds {names}")
        return match.to(torch.int64).argmax(-1)

    def system_fields(self, batch: Batch) -> dict[str, Tensor]:
        """``species_counts`` (S, T) float64, which the tail correction needs from the whole system."""
        types = self._types(batch.atomic_numbers)
        if not self.tail_correction:
            return {}
        if not bool(batch.pbc.all()):
            raise InputError("tail_correction needs a system periodic along all axes; switch it off or set pbc")
        counts = torch.zeros(batch.num_graphs, len(self.species), dtype=torch.float64, device=batch.device)
        counts.index_put_((batch.batch_idx, types), counts.new_ones(()), accumulate=True)
        return {_COUNTS: counts}

    def _parameters_as(self, dtype: torch.dtype) -> tuple[Tensor, tuple[Tensor, ...], tuple[Tensor, ...]]:
        """What the kernel takes as constants, lookup and shared."""
        if dtype not in self._cast:
            numbers = [t for t in self._form.by_pair if t.is_floating_point()]
            cutoff2 = torch.full_like(self._shift, self.cutoff**2)
            self._cast[dtype] = (
                torch.stack([cutoff2, self._shift, *numbers]).to(dtype),
                tuple(t for t in self._form.by_pair if not t.is_floating_point()),
                tuple(t.to(dtype) for t in self._form.shared),
            )
        return self._cast[dtype]

    def pair_energy(self, r: Tensor, i: int = 0, j: int = 0) -> Tensor:
        """φ(r) in eV of species ``i`` and ``j`` for distances r in Å, without cutoff and shift."""
        k = i * len(self.species) + j
        params = tuple(p[k] for p in self._form.by_pair)
        energy, _ = self._form.function(r.to(torch.float64) ** 2, (*params, *self._form.shared))
        return energy

    def forward(self, data: Batch) -> ModelOutputs:
        """The active outputs for ``data``, whose ``neighbors`` is a :class:`RowMatrix` reaching at least the cutoff."""
        active = self.model_config.check_active()
        rows = data.neighbors
        if not isinstance(rows, RowMatrix):
            raise ModelError("no matrix neighbour list on the batch; add a NeighborListHook(model.neighbor_config, …)")
        if rows.cutoff < self.cutoff:
            raise ModelError(
                f"the neighbour list reaches {rows.cutoff} Å, the potential {self.cutoff} Å; widen the list"
            )
        with torch.no_grad():
            return self._evaluate(data, rows, active)

    def _evaluate(self, data: Batch, rows: RowMatrix, active: frozenset[str]) -> ModelOutputs:
        with_virial = bool(active & {"virial", "stress"})
        needs = ("energy" in active, with_virial)
        if needs not in self._kernels:
            self._kernels[needs] = make_kernel(
                self._form,
                len(self.species),
                with_energy=needs[0],
                with_virial=with_virial,
                compiled=self.compile_kernel,
            )
        x, y, z = rows.rows(data.positions, data.cell)
        known = self._parameters_as(data.positions.dtype)
        types = self._row_types(data, rows)
        forces, sums = self._kernels[needs](x, y, z, rows.matrix, rows.receivers, *known, types)
        out: ModelOutputs = {"forces": forces} if "forces" in active else {}
        idx, n_systems, m = rows.system[: rows.n_receivers], data.num_graphs, rows.n_receivers
        total = _per_system(sums, idx, n_systems)
        energy = total[:, :1] if needs[0] else None
        virial = total[:, -6:].index_select(1, _VOIGT).reshape(-1, 3, 3) if with_virial else None
        if self._tail is not None:
            tail_energy, tail_virial = self._tail_share(data, idx, m)
            if energy is not None:
                energy = energy + tail_energy.unsqueeze(-1)
            if virial is not None:
                virial = virial + tail_virial.reshape(-1, 1, 1) * torch.eye(3, dtype=virial.dtype)
        if energy is not None:
            out["energy"] = energy
        if virial is not None and "virial" in active:
            out["virial"] = virial
        if virial is not None and "stress" in active:
            volume = data.cell.to(torch.float64).det().abs().reshape(-1, 1, 1)
            # A cluster has no volume, hence no stress.
            out["stress"] = torch.where(volume > 0, -virial / volume, torch.zeros_like(virial))
        return out

    def _row_types(self, data: Batch, rows: RowMatrix) -> Tensor:
        if len(self.species) == 1:
            # Looked at once for each tensor of numbers, not at every step.
            if self._known_numbers is not data.atomic_numbers:
                self._types(data.atomic_numbers)
                self._known_numbers = data.atomic_numbers
            return rows.source[:0]
        types = self._types(data.atomic_numbers)[rows.source]
        return torch.cat([types, types.new_zeros(1)])

    def _tail_share(self, data: Batch, idx: Tensor, n_receivers: int) -> tuple[Tensor, Tensor]:
        """This rank's part of the tail, in proportion to the atoms it owns, so that ranks may simply be summed."""
        assert self._tail is not None
        counts = data.system_fields.get(_COUNTS)
        if counts is None:
            if n_receivers != data.num_nodes:
                raise ModelError("species_counts is missing on a decomposed batch; use DomainParallel.partition")
            counts = self.system_fields(data)[_COUNTS]
        volume = data.cell.to(torch.float64).det().abs()
        energy, virial = tail_per_system(counts, volume, *self._tail)
        owned = torch.bincount(idx, minlength=data.num_graphs).to(torch.float64)
        share = owned / counts.sum(-1).clamp_min(1.0)
        return energy * share, virial * share


def _per_system(sums: Tensor, idx: Tensor, n_systems: int) -> Tensor:
    """(C, M) to (S, C), summed in float64."""
    wide = sums.to(torch.float64)
    if n_systems == 1:
        return wide.sum(1).unsqueeze(0)
    return wide.new_zeros((n_systems, wide.shape[0])).index_add(0, idx, wide.t())
