"""What the framework puts around a model's ops, methods and helpers while a decomposed forward runs."""

from __future__ import annotations

from nvalchemi_distributed.adapters.function import FunctionAdapter, PythonAdapter
from nvalchemi_distributed.adapters.jit import JitAdapter
from nvalchemi_distributed.adapters.method import MethodAdapter
from nvalchemi_distributed.adapters.op import OpAdapter
from nvalchemi_distributed.adapters.script import ScriptAdapter

__all__ = ["FunctionAdapter", "JitAdapter", "MethodAdapter", "OpAdapter", "PythonAdapter", "ScriptAdapter"]
