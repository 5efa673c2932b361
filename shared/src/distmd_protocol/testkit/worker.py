"""One rank of a pool: gets functions by name from the test process, runs them, sends back what they return."""

from __future__ import annotations

import argparse
import faulthandler
import importlib
import importlib.util
import os
import queue
import shutil
import socket
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from distmd_protocol.testkit import wire

_LONGER_THAN_THE_PARENT_S = 20.0


def main() -> None:
    """Serve until told to stop, or until the test process is gone."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--address", required=True)
    parser.add_argument("--factory", required=True)
    arguments = parser.parse_args()
    # A group of its own, so that what a test starts in here can be ended with it.
    if os.getpgrp() != os.getpid():
        os.setpgid(0, 0)
    stacks = open(f"{arguments.address}.stack-{os.getpid()}", "w", encoding="utf-8")  # noqa: SIM115
    faulthandler.register(wire.STACK_SIGNAL, file=stacks, all_threads=True)
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.connect(arguments.address)
    wire.send(connection, {"pid": os.getpid()})
    try:
        comm = resolve(arguments.factory)()
    except BaseException:
        wire.send(connection, {"failed": traceback.format_exc()})
        raise
    wire.send(connection, {"rank": comm.rank, "size": comm.size})
    jobs: queue.SimpleQueue[Any] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(connection, jobs, os.path.dirname(arguments.address)), daemon=True).start()
    while (job := jobs.get()) is not None:
        # Ends this process even if the test process is gone and the interpreter lock is held for ever.
        faulthandler.dump_traceback_later(job["timeout"] + _LONGER_THAN_THE_PARENT_S, exit=True, file=stacks)
        error = _serve(connection, comm, job)
        if job["fresh"]:
            if error is not None:
                raise error
            break
        faulthandler.cancel_dump_traceback_later()


def resolve(reference: str) -> Callable[..., Any]:
    """Return what ``"module:name"`` names."""
    module, _, name = reference.partition(":")
    return _attribute(importlib.import_module(module), name)


def _listen(connection: socket.socket, jobs: queue.SimpleQueue[Any], folder: str) -> None:
    while True:
        try:
            job = wire.receive(connection)
        except EOFError:
            # Nobody is left to answer to, or to clean up; the main thread may be waiting in a collective for ever.
            shutil.rmtree(folder, ignore_errors=True)
            os._exit(1)
        jobs.put(job)
        if job is None:
            return


def _serve(connection: socket.socket, comm: Any, job: dict[str, Any]) -> BaseException | None:
    for folder in reversed(job["sys_path"]):
        if folder not in sys.path:
            sys.path.insert(0, folder)
    try:
        function = _attribute(_load(job["module"], job["file"]), job["name"])
        result = function(comm, *job["args"], **job["kwargs"])
        wire.send(connection, {"result": result})
    # Sent to the test process; a fresh rank raises it again.
    except BaseException as error:  # noqa: BLE001
        report = {"type": type(error).__name__, "message": str(error), "traceback": traceback.format_exc()}
        wire.send(connection, {"error": report})
        return error
    return None


def _load(name: str, file: str | None) -> ModuleType:
    """Import a module; one of the same name from another file is not mistaken for it."""
    if file is None:
        return importlib.import_module(name)
    known = sys.modules.get(name) if name != "__main__" else None
    if known is None and name != "__main__":
        try:
            known = importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name is None or not name.startswith(error.name):
                raise
    if known is not None and _same_file(getattr(known, "__file__", None), file):
        return known
    alias = "testkit_" + "".join(letter if letter.isalnum() else "_" for letter in file)
    if alias not in sys.modules:
        spec = importlib.util.spec_from_file_location(alias, file)
        if spec is None or spec.loader is None:
            raise ImportError(f"{file} is not a Python module")
        module = importlib.util.module_from_spec(spec)
        sys.modules[alias] = module
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[alias]
            raise
    return sys.modules[alias]


def _same_file(first: str | None, second: str) -> bool:
    return first is not None and Path(first).resolve() == Path(second).resolve()


def _attribute(module: Any, name: str) -> Callable[..., Any]:
    value = module
    for part in name.split("."):
        value = getattr(value, part)
    function: Callable[..., Any] = value
    return function


if __name__ == "__main__":
    main()
