"""Several systems in one set of tensors: atoms concatenated, per-system fields stacked."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from nvalchemi_distributed.data.atomic_data import AtomicData
from nvalchemi_distributed.data.edges import EDGE_FIELDS, MATRIX_FIELDS, edge_field
from nvalchemi_distributed.data.fields import NODE_FIELDS, SYSTEM_FIELDS, Level
from nvalchemi_distributed.errors import InputError

_SLOTS = ("_node", "_system", "_batch_idx", "neighbors")


class Batch:
    """``S`` systems with ``N`` atoms in all. Build one with :meth:`from_data_list`.

    Fields are attributes: ``batch.positions`` is (N, 3), ``batch.cell`` is (S, 3, 3). ``batch_idx`` (N,) says to which
    system an atom belongs and never decreases. ``neighbors`` holds the neighbour list that a hook has put there, or
    None; ``neighbor_list``, ``neighbor_list_shifts``, ``shifts`` and ``edge_ptr`` (COO format) or ``neighbor_matrix``,
    ``neighbor_matrix_shifts`` and ``num_neighbors`` (matrix format) are read from it.
    Assigning to a known field replaces it; a new field needs :meth:`add_key` with its level.
    """

    def __init__(self, node: Mapping[str, Tensor], system: Mapping[str, Tensor], batch_idx: Tensor) -> None:
        self._node: dict[str, Tensor] = dict(node)
        self._system: dict[str, Tensor] = dict(system)
        self._batch_idx = batch_idx
        self._inverse: tuple[Tensor, int, Tensor] | None = None
        self.neighbors: Any = None

    @classmethod
    def from_data_list(cls, data_list: Sequence[AtomicData]) -> Batch:
        """Concatenate systems. All must have the same fields, dtype and device.

        Raises:
            InputError: an empty list, or systems whose fields differ (the message names them).
        """
        if not data_list:
            raise InputError("from_data_list got an empty list; a batch needs at least one system")
        first = data_list[0]
        for k, data in enumerate(data_list):
            if set(data.node_keys) != set(first.node_keys) or set(data.system_keys) != set(first.system_keys):
                odd = set(data.node_keys) ^ set(first.node_keys) | set(data.system_keys) ^ set(first.system_keys)
                raise InputError(
                    f"system {k} and system 0 differ in the fields {sorted(odd)}; add them to all or to none"
                )
            if data.dtype != first.dtype or data.device != first.device:
                raise InputError(
                    f"system {k} is {data.dtype} on {data.device}, system 0 is {first.dtype} on {first.device}"
                )
        node = {k: torch.cat([getattr(d, k) for d in data_list]) for k in first.node_keys}
        system = {k: torch.cat([getattr(d, k) for d in data_list]) for k in first.system_keys}
        counts = torch.tensor([d.num_nodes for d in data_list], device=first.device)
        batch_idx = torch.repeat_interleave(torch.arange(len(data_list), device=first.device), counts)
        return cls(node, system, batch_idx)

    @classmethod
    def from_atoms(cls, atoms: Iterable[Any], *, dtype: torch.dtype = torch.float64) -> Batch:
        """A batch of ASE ``Atoms`` objects (an iterable of them)."""
        return cls.from_data_list([AtomicData.from_atoms(a, dtype=dtype) for a in atoms])

    # -- fields ------------------------------------------------------------------------------------------------------

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        for level in (self._node, self._system):
            if name in level:
                return level[name]
        if name in NODE_FIELDS or name in SYSTEM_FIELDS:
            return None
        if name in EDGE_FIELDS or name in MATRIX_FIELDS:
            return edge_field(name, self.neighbors, self.cell, self._batch_idx)
        raise AttributeError(f"no field {name!r}; there are {sorted(self.keys)}")

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _SLOTS or isinstance(getattr(type(self), name, None), property) or name.startswith("_"):
            object.__setattr__(self, name, value)
        elif name in self._node or name in NODE_FIELDS:
            self._put(self._node, name, value, self.num_nodes, NODE_FIELDS.get(name))
        elif name in self._system or name in SYSTEM_FIELDS:
            self._put(self._system, name, value, self.num_graphs, SYSTEM_FIELDS.get(name))
        else:
            raise AttributeError(f"no field {name!r}; add it with add_key({name!r}, …, level='node' or 'system')")

    def _put(
        self, level: dict[str, Tensor], name: str, value: Tensor, rows: int, shape: tuple[int, ...] | None
    ) -> None:
        if not isinstance(value, Tensor) or value.dim() == 0 or value.shape[0] != rows:
            raise InputError(
                f"{name} needs a tensor with {rows} rows, got {getattr(value, 'shape', type(value).__name__)}"
            )
        if shape is not None and tuple(value.shape[1:]) != shape:
            raise InputError(f"{name} has rows of shape {tuple(value.shape[1:])}; expected {shape}")
        level[name] = value

    def add_key(
        self, name: str, values: Tensor | Sequence[Tensor], *, level: Level = "node", overwrite: bool = False
    ) -> None:
        """Add a field. ``values``: one tensor, or one tensor a system, concatenated along the first dimension."""
        if not overwrite and name in self.keys:
            raise InputError(f"{name} exists already; pass overwrite=True to replace it")
        if name in (self._system if level == "node" else self._node):
            raise InputError(f"{name} exists on the other level")
        tensor = values if isinstance(values, Tensor) else torch.cat(list(values))
        if level == "node":
            self._put(self._node, name, tensor, self.num_nodes, NODE_FIELDS.get(name))
        elif level == "system":
            self._put(self._system, name, tensor, self.num_graphs, SYSTEM_FIELDS.get(name))
        else:
            raise InputError(f"level {level!r} is not known; use 'node' or 'system'")

    def discard(self, name: str) -> None:
        """Remove a field if it is there."""
        self._node.pop(name, None)
        self._system.pop(name, None)

    @property
    def inverse_masses(self) -> Tensor:
        """(N, 3) 1/amu, once for each component: f/m is then one pass. Made anew when the masses are others."""
        masses = self._node["atomic_masses"]
        # Another tensor, or one that was written to.
        if self._inverse is None or self._inverse[0] is not masses or self._inverse[1] != masses._version:
            spread = masses.detach().to(torch.float64).reciprocal().to(self.dtype).unsqueeze(-1).expand(-1, 3)
            self._inverse = (masses, masses._version, spread.contiguous())
        return self._inverse[2]

    @property
    def keys(self) -> tuple[str, ...]:
        """Names of all fields."""
        return (*self._node, *self._system)

    @property
    def node_fields(self) -> dict[str, Tensor]:
        """The per-atom fields by name (the tensors themselves, in a new dict)."""
        return dict(self._node)

    @property
    def system_fields(self) -> dict[str, Tensor]:
        """The per-system fields by name (the tensors themselves, in a new dict)."""
        return dict(self._system)

    # -- sizes -------------------------------------------------------------------------------------------------------

    @property
    def batch_idx(self) -> Tensor:
        """(N,) the system of each atom."""
        return self._batch_idx

    @property
    def num_nodes(self) -> int:
        """Number of atoms in all systems."""
        return int(self._batch_idx.shape[0])

    @property
    def num_graphs(self) -> int:
        """Number of systems."""
        return int(self._system["cell"].shape[0])

    @property
    def batch_size(self) -> int:
        """Number of systems, as :attr:`num_graphs`."""
        return self.num_graphs

    @property
    def num_edges(self) -> int:
        """Edges of the neighbour list (COO format)."""
        return int(self.neighbor_list.shape[0])

    @property
    def num_edges_list(self) -> list[int]:
        """Edges of each system (COO format)."""
        return torch.bincount(self._batch_idx[self.neighbor_list[:, 0]], minlength=self.num_graphs).tolist()

    @property
    def num_nodes_list(self) -> list[int]:
        """Atoms in each system."""
        return torch.bincount(self._batch_idx, minlength=self.num_graphs).tolist()

    @property
    def ptr(self) -> Tensor:
        """(S + 1,) first row of each system, and the end."""
        counts = torch.bincount(self._batch_idx, minlength=self.num_graphs)
        return torch.cat([counts.new_zeros(1), counts.cumsum(0)])

    @property
    def device(self) -> torch.device:
        """Device of the positions."""
        return self._node["positions"].device

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the positions."""
        return self._node["positions"].dtype

    def __len__(self) -> int:
        return self.num_graphs

    # -- selection and copies ----------------------------------------------------------------------------------------

    def get_data(self, index: int) -> AtomicData:
        """System ``index`` as an :class:`AtomicData` (negative counts from the end)."""
        size = self.num_graphs
        if not -size <= index < size:
            raise IndexError(f"system {index} of {size}")
        index %= size
        lo, hi = self.ptr[index : index + 2].tolist()
        node = {k: v[lo:hi] for k, v in self._node.items()}
        system = {k: v[index : index + 1] for k, v in self._system.items()}
        known = ("positions", "atomic_numbers", "atomic_masses", "velocities", "forces")
        return AtomicData(
            node["positions"],
            node["atomic_numbers"],
            atomic_masses=node["atomic_masses"],
            velocities=node["velocities"],
            forces=node["forces"],
            cell=system["cell"],
            pbc=system["pbc"],
            node_properties={k: v for k, v in node.items() if k not in known},
            system_properties={k: v for k, v in system.items() if k not in ("cell", "pbc")},
        )

    def to_data_list(self) -> list[AtomicData]:
        """Every system as an :class:`AtomicData`."""
        return [self.get_data(k) for k in range(self.num_graphs)]

    def __iter__(self) -> Iterator[AtomicData]:
        return iter(self.to_data_list())

    def __getitem__(self, index: str | int | slice | Tensor | Sequence[int]) -> Any:
        """A field by name, a system by number, or a new batch of the chosen systems."""
        if isinstance(index, str):
            return getattr(self, index)
        if isinstance(index, int):
            return self.get_data(index)
        chosen = (
            torch.arange(self.num_graphs)[index] if isinstance(index, slice | Tensor) else torch.tensor(list(index))
        )
        return Batch.from_data_list([self.get_data(int(k)) for k in chosen])

    def clone(self) -> Batch:
        """A copy that shares no memory; the neighbour list is left out."""
        return Batch(
            {k: v.detach().clone() for k, v in self._node.items()},
            {k: v.detach().clone() for k, v in self._system.items()},
            self._batch_idx.clone(),
        )

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> Batch:
        """A copy on ``device`` with floating-point fields in ``dtype``; integers and booleans keep their type."""

        def move(v: Tensor) -> Tensor:
            return v.to(device=device, dtype=dtype if dtype is not None and v.is_floating_point() else None)

        return Batch(
            {k: move(v) for k, v in self._node.items()},
            {k: move(v) for k, v in self._system.items()},
            self._batch_idx.to(device=device),
        )

    def __repr__(self) -> str:
        fields = ", ".join(f"{k}{tuple(v.shape)}" for k, v in {**self._node, **self._system}.items())
        return f"{type(self).__name__}({self.num_graphs} systems, {self.num_nodes} atoms: {fields})"
