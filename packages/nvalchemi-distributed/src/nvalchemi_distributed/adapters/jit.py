"""Helpers compiled with ``torch.jit.script``."""

from __future__ import annotations

from dataclasses import dataclass

from nvalchemi_distributed.adapters.function import PythonAdapter


@dataclass(frozen=True)
class JitAdapter(PythonAdapter):
    """Replaces a scripted module-level helper by a Python function while a decomposed forward runs, so that the
    operations inside it are seen.

    Attributes:
        module_path: the module whose name the model calls.
        attr_name: the helper's name there.
        replacement: same signature and meaning in plain Python; a function at the top level of a module, or its name.

    Raises:
        AdapterError: a replacement that cannot be found by name.
    """
