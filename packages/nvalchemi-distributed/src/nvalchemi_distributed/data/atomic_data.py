"""One system: positions, species, cell and whatever the user adds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from nvalchemi_distributed.data.fields import NODE_FIELDS, SYSTEM_FIELDS
from nvalchemi_distributed.data.masses import ATOMIC_MASSES
from nvalchemi_distributed.errors import InputError

if TYPE_CHECKING:
    from ase import Atoms


class AtomicData:
    """One system of ``N`` atoms. Units: Å, eV, amu; velocities in √(eV/amu).

    Args:
        positions: (N, 3) Å.
        atomic_numbers: (N,) integers.
        atomic_masses: (N,) amu. Standard atomic weights when left out.
        velocities: (N, 3) √(eV/amu). Zero when left out.
        forces: (N, 3) eV/Å. Zero when left out.
        cell: (3, 3) or (1, 3, 3), rows are lattice vectors, Å. Zero rows stand for open axes.
        pbc: (3,) or (1, 3) booleans, or one bool. ``False`` when left out; needs ``cell`` when true.
        energy: (1, 1) eV.
        stress: (1, 3, 3) eV/Å³, positive in tension.
        virial: (1, 3, 3) eV, positive for repulsion.
        node_properties: more per-atom tensors by name, first dimension ``N``; they travel with their atoms.
        system_properties: more per-system tensors by name, first dimension 1.

    Raises:
        InputError: a field of the wrong shape or an integer dtype for the positions or a floating one for the
            numbers.
    """

    def __init__(
        self,
        positions: Tensor,
        atomic_numbers: Tensor,
        *,
        atomic_masses: Tensor | None = None,
        velocities: Tensor | None = None,
        forces: Tensor | None = None,
        cell: Tensor | None = None,
        pbc: Tensor | bool | None = None,
        energy: Tensor | None = None,
        stress: Tensor | None = None,
        virial: Tensor | None = None,
        node_properties: Mapping[str, Tensor] | None = None,
        system_properties: Mapping[str, Tensor] | None = None,
    ) -> None:
        positions = torch.as_tensor(positions)
        if not positions.is_floating_point():
            raise InputError(f"positions have dtype {positions.dtype}; give them as float32 or float64")
        if positions.dim() != 2 or positions.shape[1] != 3:
            raise InputError(f"positions have shape {tuple(positions.shape)}; expected (N, 3)")
        n, dtype, device = positions.shape[0], positions.dtype, positions.device
        numbers = torch.as_tensor(atomic_numbers, device=device)
        if numbers.is_floating_point() or numbers.is_complex() or numbers.dtype is torch.bool:
            raise InputError(f"atomic_numbers have dtype {numbers.dtype}; give them as integers")
        numbers = numbers.to(torch.int64)
        if atomic_masses is None:
            table = torch.tensor(ATOMIC_MASSES, dtype=dtype, device=device)
            if n and (int(numbers.min()) < 0 or int(numbers.max()) >= len(table)):
                raise InputError("atomic_numbers beyond 118 or below 0; give atomic_masses for invented species")
            atomic_masses = table[numbers]
        zeros = torch.zeros_like(positions)
        self._node: dict[str, Tensor] = {}
        self._system: dict[str, Tensor] = {}
        for name, value in {
            "positions": positions,
            "atomic_numbers": numbers,
            "atomic_masses": torch.as_tensor(atomic_masses, dtype=dtype, device=device),
            "velocities": zeros.clone()
            if velocities is None
            else torch.as_tensor(velocities, dtype=dtype, device=device),
            "forces": zeros.clone() if forces is None else torch.as_tensor(forces, dtype=dtype, device=device),
        }.items():
            self.add_node_property(name, value)
        self._set_cell(cell, pbc, dtype, device)
        for name, optional in {"energy": energy, "stress": stress, "virial": virial}.items():
            if optional is not None:
                self.add_system_property(name, torch.as_tensor(optional, dtype=dtype, device=device))
        for name, value in (node_properties or {}).items():
            self.add_node_property(name, value)
        for name, value in (system_properties or {}).items():
            self.add_system_property(name, value)

    def _set_cell(
        self, cell: Tensor | None, pbc: Tensor | bool | None, dtype: torch.dtype, device: torch.device
    ) -> None:
        flags = torch.as_tensor(False if pbc is None else pbc, device=device).to(torch.bool).reshape(-1)
        flags = flags.expand(3) if flags.numel() == 1 else flags
        if flags.numel() != 3:
            raise InputError(f"pbc has {flags.numel()} entries; expected one bool or three")
        if cell is None:
            if bool(flags.any()):
                raise InputError("pbc is set but there is no cell; give the lattice vectors of the periodic axes")
            matrix = torch.zeros(1, 3, 3, dtype=dtype, device=device)
        else:
            matrix = torch.as_tensor(cell, dtype=dtype, device=device)
            if matrix.numel() != 9:
                raise InputError(f"cell has shape {tuple(matrix.shape)}; expected (3, 3), rows are lattice vectors")
            matrix = matrix.reshape(1, 3, 3)
        self._system["cell"] = matrix.clone()
        self._system["pbc"] = flags.reshape(1, 3).clone()

    def add_node_property(self, name: str, value: Tensor) -> None:
        """Add or replace a per-atom field; ``value`` has first dimension ``num_nodes``."""
        value = torch.as_tensor(value)
        expected = NODE_FIELDS.get(name)
        n = self._node["positions"].shape[0] if self._node else value.shape[0]
        if value.dim() == 0 or value.shape[0] != n or (expected is not None and tuple(value.shape[1:]) != expected):
            raise InputError(
                f"{name} has shape {tuple(value.shape)}; expected ({n}, {', '.join(map(str, expected or ('…',)))})"
            )
        if name in self._system:
            raise InputError(f"{name} is a per-system field already")
        self._node[name] = value

    def add_system_property(self, name: str, value: Tensor) -> None:
        """Add or replace a per-system field; ``value`` has first dimension 1."""
        value = torch.as_tensor(value)
        expected = SYSTEM_FIELDS.get(name)
        if value.dim() == 0 or value.shape[0] != 1 or (expected is not None and tuple(value.shape[1:]) != expected):
            raise InputError(
                f"{name} has shape {tuple(value.shape)}; expected (1, {', '.join(map(str, expected or ('…',)))})"
            )
        if name in self._node:
            raise InputError(f"{name} is a per-atom field already")
        self._system[name] = value

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        for level in (self._node, self._system):
            if name in level:
                return level[name]
        if name in NODE_FIELDS or name in SYSTEM_FIELDS:
            return None
        raise AttributeError(f"no field {name!r}; there are {sorted([*self._node, *self._system])}")

    def __setattr__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            object.__setattr__(self, name, value)
        elif name in self._node or name in NODE_FIELDS:
            self.add_node_property(name, value)
        elif name in self._system or name in SYSTEM_FIELDS:
            self.add_system_property(name, value)
        else:
            # A plain attribute would be lost without a word when the system is batched.
            raise AttributeError(f"no field {name!r}; add it with add_node_property or add_system_property")

    @property
    def num_nodes(self) -> int:
        """Number of atoms."""
        return int(self._node["positions"].shape[0])

    @property
    def node_keys(self) -> tuple[str, ...]:
        """Names of the per-atom fields."""
        return tuple(self._node)

    @property
    def system_keys(self) -> tuple[str, ...]:
        """Names of the per-system fields."""
        return tuple(self._system)

    @property
    def device(self) -> torch.device:
        """Device of the positions."""
        return self._node["positions"].device

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the positions."""
        return self._node["positions"].dtype

    @classmethod
    def from_atoms(
        cls, atoms: Atoms, *, dtype: torch.dtype = torch.float64, device: torch.device | str = "cpu"
    ) -> AtomicData:
        """Read an ASE ``Atoms``: positions, numbers, masses, velocities, cell, pbc and the user's per-atom arrays.

        Arrays of numbers or booleans become node properties; integers keep their type, floats take ``dtype``. Initial
        charges and magnetic moments, arrays of text, constraints and results of a calculator are not taken.
        """
        known = {"positions", "numbers", "masses", "momenta", "initial_magmoms", "initial_charges"}
        extra: dict[str, Tensor] = {}
        for name, array in atoms.arrays.items():
            if name in known or array.dtype.kind not in "fiub":
                continue
            value = torch.as_tensor(array.copy(), device=device)
            extra[name] = value.to(dtype) if value.is_floating_point() else value
        return cls(
            torch.as_tensor(atoms.get_positions(), dtype=dtype, device=device),
            torch.as_tensor(atoms.get_atomic_numbers(), device=device),
            atomic_masses=torch.as_tensor(atoms.get_masses(), dtype=dtype, device=device),
            velocities=torch.as_tensor(atoms.get_velocities(), dtype=dtype, device=device),
            cell=torch.as_tensor(atoms.cell.array.copy(), dtype=dtype, device=device),
            pbc=torch.as_tensor(atoms.get_pbc(), device=device),
            node_properties=extra,
        )

    def to_atoms(self) -> Atoms:
        """An ASE ``Atoms`` with masses, velocities, cell, pbc and the node properties as arrays.

        Energy, forces and stress go into a ``SinglePointCalculator`` when the energy is known. Needs the ``ase`` extra.
        """
        from ase import Atoms
        from ase.calculators.singlepoint import SinglePointCalculator

        atoms = Atoms(
            numbers=self.atomic_numbers.cpu().numpy(),
            positions=self.positions.cpu().double().numpy(),
            cell=self.cell[0].cpu().double().numpy(),
            pbc=self.pbc[0].cpu().numpy(),
            masses=self.atomic_masses.cpu().double().numpy(),
            velocities=self.velocities.cpu().double().numpy(),
        )
        for name, value in self._node.items():
            if name not in ("positions", "atomic_numbers", "atomic_masses", "velocities", "forces"):
                atoms.set_array(name, value.cpu().numpy())
        if self.energy is not None:
            stress = None
            if self.stress is not None:
                s = self.stress[0].cpu().double()
                stress = torch.stack([s[0, 0], s[1, 1], s[2, 2], s[1, 2], s[0, 2], s[0, 1]]).numpy()
            atoms.calc = SinglePointCalculator(
                atoms, energy=float(self.energy), forces=self.forces.cpu().double().numpy(), stress=stress
            )
        return atoms

    def __repr__(self) -> str:
        fields = ", ".join(f"{k}{tuple(v.shape)}" for k, v in {**self._node, **self._system}.items())
        return f"AtomicData({self.num_nodes} atoms: {fields})"
