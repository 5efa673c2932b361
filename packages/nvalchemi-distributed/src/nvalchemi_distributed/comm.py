"""The protocol's communicator over a torch process group. Control data only: encoded bytes, never a pickle."""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from distmd_protocol import Comm, LocalComm, abort_on_uncaught, decode, encode
from nvalchemi_distributed.collectives import all_gather_equal, no_roll_call
from nvalchemi_distributed.errors import ConfigError


class GroupComm:
    """A :class:`distmd_protocol.Comm` over ``group`` (gloo; the whole default group when left out).

    Args:
        group: the ranks.
        roll_call: debug mode; called with the name of each operation before it.
    """

    def __init__(self, group: dist.ProcessGroup | None = None, roll_call: Callable[[str], None] = no_roll_call) -> None:
        self._roll_call = roll_call
        if not dist.is_initialized():
            raise ConfigError(
                "torch.distributed has no process group; call world_comm() or dist.init_process_group first"
            )
        check_backend(str(dist.get_backend_config(group)))
        # The default group is named by None, not held: a reference that outlives destroy_process_group lets gloo's
        # threads run into the end of the interpreter.
        self._group = None if group is dist.group.WORLD else group
        self._rank = dist.get_rank(self._group)
        if self._rank < 0:
            raise ConfigError("this process is not a member of the group; give each rank the group that holds it")
        self._size = dist.get_world_size(self._group)

    @property
    def rank(self) -> int:
        """Rank within the group (not the global rank on a sub-mesh)."""
        return self._rank

    @property
    def size(self) -> int:
        """Ranks in the group."""
        return self._size

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The process group; ``None`` is the default group, as in ``torch.distributed``."""
        return self._group

    def barrier(self) -> None:
        """Wait for every rank of the group."""
        self._roll_call("comm.barrier")
        dist.barrier(group=self._group)

    def broadcast(self, obj: Any, root: int = 0) -> Any:
        """``root``'s object on every rank. JSON-able values or bytes."""
        data = encode(obj) if self._rank == root else b""
        self._roll_call("comm.broadcast")
        length = torch.tensor([len(data)], dtype=torch.int64)
        source = root if self._group is None else dist.get_global_rank(self._group, root)
        dist.broadcast(length, src=source, group=self._group)
        block = _bytes_tensor(data) if self._rank == root else torch.empty(int(length), dtype=torch.uint8)
        dist.broadcast(block, src=source, group=self._group)
        return decode(block.numpy().tobytes())

    def allgather(self, obj: Any) -> list[Any]:
        """Every rank's object in rank order, on every rank."""
        data = encode(obj)
        self._roll_call("comm.allgather")
        lengths = torch.empty(self._size, dtype=torch.int64)
        all_gather_equal(lengths, torch.tensor([len(data)], dtype=torch.int64), self._group)
        most = int(lengths.max())
        padded = torch.zeros(most, dtype=torch.uint8)
        padded[: len(data)] = _bytes_tensor(data)
        out = torch.empty(self._size * most, dtype=torch.uint8)
        all_gather_equal(out, padded, self._group)
        table = out.reshape(self._size, most).numpy()
        return [decode(table[r, : int(lengths[r])].tobytes()) for r in range(self._size)]


def _bytes_tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)


def check_backend(config: str) -> None:
    """Refuse a group that cannot move tensors on the CPU, before anything is sent.

    Args:
        config: ``device:backend`` pairs as ``dist.get_backend_config`` gives them.

    Raises:
        ConfigError: names the backends.
    """
    if "cpu" not in [pair.split(":")[0] for pair in config.split(",")]:
        raise ConfigError(
            f"the process group has the backends {config!r}, none for the CPU, where this release decomposes; use a "
            'gloo group: world_comm(), init_process_group("gloo") or init_device_mesh("cpu", …)'
        )


def comm_for(group: dist.ProcessGroup | None, roll_call: Callable[[str], None] = no_roll_call) -> Comm:
    """A communicator for a group, or :class:`LocalComm` for no group."""
    return LocalComm() if group is None else GroupComm(group, roll_call)


def world_comm(timeout: float = 120.0) -> GroupComm:
    """The communicator of all ranks that ``torchrun`` started; makes the gloo group when there is none yet.

    An uncaught error on this rank then ends it at once, and gloo tells the others that their peer is gone. A group made
    here is destroyed at exit, unless the program did so.

    Args:
        timeout: seconds after which a collective that not every rank enters is an error.
    """
    if not dist.is_initialized():
        missing = [k for k in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if k not in os.environ]
        if missing:
            raise ConfigError(
                f"{', '.join(missing)} not set; start the program with torchrun, or use LocalComm on one process"
            )
        dist.init_process_group("gloo", timeout=timedelta(seconds=timeout))
        atexit.register(_leave)
    abort_on_uncaught(_abort)
    return GroupComm()


def _leave() -> None:
    # gloo's threads, left running, can meet the end of the interpreter: "terminate called", and a run that was done
    # exits as failed.
    if dist.is_initialized():
        dist.destroy_process_group()


def _abort(code: int) -> None:
    # Closing the sockets is what tells the others; a tidy shutdown of the group would wait for them.
    os._exit(code)
