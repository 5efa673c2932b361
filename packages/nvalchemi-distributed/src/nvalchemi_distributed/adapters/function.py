"""Third-party functions that a model calls: changed or replaced at the name it calls them by."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from torch import nn

from nvalchemi_distributed.adapters.call import with_transforms
from nvalchemi_distributed.adapters.names import qualified, resolve, split
from nvalchemi_distributed.context import DistributedContext
from nvalchemi_distributed.errors import AdapterError
from nvalchemi_distributed.transforms import Transform


@dataclass(frozen=True)
class FunctionAdapter:
    """Changes the arguments and outputs of a function while a decomposed forward runs.

    Attributes:
        function: ``"module:function"``, the binding that the model calls: where a module has imported the function by
            name, that module; or the function itself, which means the module that defines it.
        transforms: what is done to arguments and outputs.
        replacement: called instead, with the same arguments, between the transforms: a function at the top level of a
            module, or its name.

    Raises:
        AdapterError: nothing to do, or names that cannot be found by another process.
    """

    function: str | Callable[..., Any]
    transforms: tuple[Transform, ...] = ()
    replacement: str | Callable[..., Any] | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "function", qualified(self.function))
        object.__setattr__(self, "transforms", tuple(self.transforms))
        if self.replacement is not None:
            object.__setattr__(self, "replacement", qualified(self.replacement))
        if not self.transforms and self.replacement is None:
            raise AdapterError(f"FunctionAdapter({self.function!r}) does nothing; give transforms or a replacement")

    @property
    def where(self) -> str:
        """For messages."""
        return f"FunctionAdapter {self.function}"

    def install(self, model: nn.Module, context: DistributedContext, stack: ExitStack) -> None:
        """Bind the changed function to the name until ``stack`` closes.

        Raises:
            AdapterError: no such function.
        """
        holder, name = split(str(self.function))
        original = getattr(holder, name)
        inner = original if self.replacement is None else resolve(str(self.replacement))
        setattr(holder, name, with_transforms(inner, self.transforms, context, self.where))
        stack.callback(setattr, holder, name, original)


@dataclass(frozen=True)
class PythonAdapter:
    """Replaces a module-level helper by one that knows about ranks, while a decomposed forward runs.

    Attributes:
        module_path: the module whose name the model calls.
        attr_name: the helper's name there.
        replacement: same signature; a function at the top level of a module, or its name ``"module:function"``.

    Raises:
        AdapterError: a replacement that cannot be found by name.
    """

    module_path: str
    attr_name: str
    replacement: str | Callable[..., Any]

    def __post_init__(self) -> None:
        object.__setattr__(self, "replacement", qualified(self.replacement))

    @property
    def where(self) -> str:
        """For messages."""
        return f"{type(self).__name__} {self.module_path}:{self.attr_name}"

    def install(self, model: nn.Module, context: DistributedContext, stack: ExitStack) -> None:
        """Bind the replacement to the name until ``stack`` closes.

        Raises:
            AdapterError: no such helper or replacement.
        """
        holder, name = split(f"{self.module_path}:{self.attr_name}")
        original = getattr(holder, name)
        new = resolve(str(self.replacement))
        setattr(holder, name, new)
        stack.callback(setattr, holder, name, original)
