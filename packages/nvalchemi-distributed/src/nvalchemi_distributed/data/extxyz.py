"""Extended XYZ: one frame appended at a time, and read back.

ASE reads what is written here. Every number is written so that reading gives the same float64 (17 digits).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch

from nvalchemi_distributed.data.atomic_data import AtomicData
from nvalchemi_distributed.data.masses import ATOMIC_MASSES, CHEMICAL_SYMBOLS
from nvalchemi_distributed.errors import InputError

_NAMES = {"positions": "pos", "atomic_masses": "masses"}
_FIELDS = {"pos": "positions", "masses": "atomic_masses", "Z": "atomic_numbers"}
_KIND = {"f": "R", "i": "I", "u": "I", "b": "L"}


def format_frame(data: AtomicData, *, info: dict[str, float | int | str] | None = None, digits: int = 17) -> str:
    """One extxyz frame as text.

    Args:
        data: one system; every per-atom field becomes a column under ASE's name where ASE has one; velocities are
            written as momenta, masses only where they are not the standard atomic weights.
        info: further key=value entries of the comment line.
        digits: significant digits of floating-point columns (17 is exact for float64, 9 for float32).
    """
    columns: list[tuple[str, np.ndarray]] = []
    for name in data.node_keys:
        value = getattr(data, name).detach().cpu()
        if name == "atomic_numbers" or (name == "atomic_masses" and _standard_masses(data)):
            continue
        if name == "velocities":
            name, value = "momenta", value * data.atomic_masses.cpu().unsqueeze(-1)
        columns.append((_NAMES.get(name, name), value.numpy().reshape(data.num_nodes, math.prod(value.shape[1:]))))
    spec = ["species:S:1", *(f"{n}:{_KIND[a.dtype.kind]}:{a.shape[1]}" for n, a in columns)]
    comment = []
    cell = data.cell[0].double().cpu()
    if bool(cell.any()):
        comment.append('Lattice="' + " ".join(f"{v:.17g}" for v in cell.reshape(-1).tolist()) + '"')
    comment.append("Properties=" + ":".join(spec))
    comment.append('pbc="' + " ".join("T" if p else "F" for p in data.pbc[0].tolist()) + '"')
    if data.energy is not None:
        comment.append(f"energy={float(data.energy):.17g}")
    if data.stress is not None:
        comment.append('stress="' + " ".join(f"{v:.17g}" for v in data.stress.double().reshape(-1).tolist()) + '"')
    for key, value in (info or {}).items():
        comment.append(f"{key}={_quote(value)}")
    pattern = []
    for _, array in columns:
        pattern += {"f": [f"%.{digits}g"], "b": ["%s"]}.get(array.dtype.kind, ["%d"]) * array.shape[1]
    line = "%s " + " ".join(pattern)
    text: list[list[object]] = [[symbol] for symbol in _symbols(data)]
    for _, array in columns:
        rows = np.where(array, "T", "F").tolist() if array.dtype.kind == "b" else array.tolist()
        for row, values in zip(text, rows, strict=True):
            row.extend(values)
    return "\n".join([str(data.num_nodes), " ".join(comment), *(line % tuple(row) for row in text)]) + "\n"


def _symbols(data: AtomicData) -> list[str]:
    """Chemical symbols. The format names elements, so invented species have none."""
    numbers = data.atomic_numbers.tolist()
    unknown = sorted({z for z in numbers if not 0 <= z < len(CHEMICAL_SYMBOLS)})
    if unknown:
        raise InputError(
            f"extxyz has no symbol for atomic_numbers {unknown}; write numbers from 0 (X) to "
            f"{len(CHEMICAL_SYMBOLS) - 1}, or use another sink"
        )
    return [CHEMICAL_SYMBOLS[z] for z in numbers]


def _standard_masses(data: AtomicData) -> bool:
    numbers = data.atomic_numbers
    if bool(((numbers < 0) | (numbers >= len(ATOMIC_MASSES))).any()):
        return False
    table = torch.tensor(ATOMIC_MASSES, dtype=data.dtype)
    return bool(torch.equal(table[data.atomic_numbers.cpu()], data.atomic_masses.cpu()))


def _quote(value: float | int | str) -> str:
    if isinstance(value, float):
        return f"{value:.17g}"
    text = str(value)
    return f'"{text}"' if re.search(r"\s", text) else text


def append_extxyz(
    file: str | Path, data: AtomicData, *, info: dict[str, float | int | str] | None = None, digits: int = 17
) -> None:
    """Append one frame and flush it, so that a killed run leaves a file that is readable up to the last full frame."""
    with open(file, "a", encoding="utf-8") as stream:
        stream.write(format_frame(data, info=info, digits=digits))
        stream.flush()


def read_extxyz(file: str | Path, *, dtype: torch.dtype = torch.float64) -> Iterator[AtomicData]:
    """Every complete frame of a file, as written by :func:`append_extxyz` or ASE. A cut-off last frame ends the
    iteration.

    Raises:
        InputError: a comment line without ``Properties``, a column of an unknown type, or an unknown species.
    """
    with open(file, encoding="utf-8") as stream:
        while (frame := _read_frame(stream, dtype)) is not None:
            yield frame


def _read_frame(stream: IO[str], dtype: torch.dtype) -> AtomicData | None:
    head = stream.readline()
    if not head.strip():
        return None
    n = int(head)
    comment = stream.readline()
    lines = [stream.readline() for _ in range(n)]
    if not comment.endswith("\n") or any(not line.endswith("\n") for line in lines):
        return None
    entries = {k: (q or v) for k, q, v in re.findall(r'(\w+)=(?:"([^"]*)"|(\S+))', comment)}
    if "Properties" not in entries:
        raise InputError("extxyz comment line has no Properties entry; write the file as extended XYZ")
    spec = entries["Properties"].split(":")
    table = [line.split() for line in lines]
    fields: dict[str, torch.Tensor] = {}
    column = 0
    for name, kind, width in zip(spec[0::3], spec[1::3], map(int, spec[2::3]), strict=True):
        cells = [row[column : column + width] for row in table]
        column += width
        if kind == "S":
            if name == "species":
                numbers = {s: z for z, s in enumerate(CHEMICAL_SYMBOLS)}
                unknown = sorted({c[0] for c in cells} - set(numbers))
                if unknown:
                    raise InputError(f"extxyz species {unknown} are no chemical symbols; known are X, H … Og")
                fields["atomic_numbers"] = torch.tensor([numbers[c[0]] for c in cells], dtype=torch.int64)
            continue
        if kind == "R":
            value = torch.tensor(np.array(cells, dtype=np.float64).reshape(n, width)).to(dtype)
        elif kind == "I":
            value = torch.tensor(np.array(cells, dtype=np.int64).reshape(n, width))
        elif kind == "L":
            value = torch.tensor(np.array([[c in ("T", "True", "1") for c in row] for row in cells]).reshape(n, width))
        else:
            raise InputError(f"extxyz column {name} has type {kind!r}; known types are S, R, I, L")
        fields[_FIELDS.get(name, name)] = value[:, 0] if width == 1 else value
    if "momenta" in fields and "velocities" not in fields:
        momenta = fields.pop("momenta")
        masses = fields.get("atomic_masses")
        if masses is None:
            masses = AtomicData(fields["positions"], fields["atomic_numbers"]).atomic_masses
        fields["velocities"] = momenta / masses.unsqueeze(-1)
    lattice = [float(v) for v in entries["Lattice"].split()] if "Lattice" in entries else None
    default = "T T T" if lattice else "F F F"
    pbc = torch.tensor([v in ("T", "1", "True") for v in entries.get("pbc", default).split()])
    known = ("positions", "atomic_numbers", "atomic_masses", "velocities", "forces")
    system: dict[str, Any] = {}
    if "stress" in entries and len(entries["stress"].split()) == 9:
        system["stress"] = torch.tensor([float(v) for v in entries["stress"].split()], dtype=dtype).reshape(1, 3, 3)
    given: dict[str, Any] = {k: fields[k] for k in known if k in fields}
    return AtomicData(
        **given,
        cell=None if lattice is None else torch.tensor(lattice, dtype=dtype).reshape(3, 3),
        pbc=pbc,
        energy=torch.tensor([[float(entries["energy"])]], dtype=dtype) if "energy" in entries else None,
        node_properties={k: v for k, v in fields.items() if k not in known},
        **system,
    )
