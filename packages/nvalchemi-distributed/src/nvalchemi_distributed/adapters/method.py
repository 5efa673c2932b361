"""Transforms around a method of one submodule of the wrapped model."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from nvalchemi_distributed.adapters.call import with_transforms
from nvalchemi_distributed.adapters.names import qualified, resolve
from nvalchemi_distributed.context import DistributedContext
from nvalchemi_distributed.errors import AdapterError
from nvalchemi_distributed.transforms import Transform


@dataclass(frozen=True)
class MethodAdapter:
    """Changes the arguments and outputs of one method while a decomposed forward runs; the model's code is untouched.

    The message-passing layers of a model need it once each, from the second on:
    ``MethodAdapter("model.interactions.1", transforms=(GatherInputs("node_feats"),))``.

    Attributes:
        target: path of the submodule from the wrapper, as in ``named_modules``; ``""`` is the wrapper itself.
        method: its method.
        transforms: what is done to arguments and outputs.
        replacement: called instead as ``replacement(original, *args, **kwargs)``, between the transforms: a function at
            the top level of a module, or its name ``"module:function"``.

    Raises:
        AdapterError: nothing to do, or a replacement that cannot be found by name.
    """

    target: str
    method: str = "forward"
    transforms: tuple[Transform, ...] = ()
    replacement: str | Callable[..., Any] | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "transforms", tuple(self.transforms))
        if self.replacement is not None:
            object.__setattr__(self, "replacement", qualified(self.replacement))
        if not self.transforms and self.replacement is None:
            raise AdapterError(f"MethodAdapter({self.target!r}) does nothing; give transforms or a replacement")

    @property
    def where(self) -> str:
        """For messages."""
        return f"MethodAdapter {self.target or 'the wrapper'}.{self.method}"

    def install(self, model: nn.Module, context: DistributedContext, stack: ExitStack) -> None:
        """Put the changed method on the submodule until ``stack`` closes.

        Raises:
            AdapterError: no such submodule or method, or one inside TorchScript, whose calls no hook sees.
        """
        module = _submodule(model, self.target, self.where)
        original = getattr(module, self.method, None)
        if not callable(original):
            raise AdapterError(f"{self.where}: {type(module).__name__} has no such method")
        inner = original
        if self.replacement is not None:
            inner = functools.wraps(original, updated=())(functools.partial(resolve(str(self.replacement)), original))
        changed = with_transforms(inner, self.transforms, context, self.where)
        # On the instance: other instances of the class, and other threads' models, are not concerned.
        before = module.__dict__.get(self.method, _ABSENT)
        module.__dict__[self.method] = changed
        stack.callback(_restore, module, self.method, before)


_ABSENT = object()


def _restore(module: nn.Module, name: str, before: object) -> None:
    if before is _ABSENT:
        module.__dict__.pop(name, None)
    else:
        module.__dict__[name] = before


def _submodule(model: nn.Module, path: str, where: str) -> nn.Module:
    module: Any = model
    inside = False
    for part in path.split(".") if path else []:
        # A child of a scripted module is called from compiled code, which does not look at Python attributes.
        inside = inside or isinstance(module, torch.jit.ScriptModule)
        found = getattr(module, part, None) if isinstance(module, nn.Module) else None
        if not isinstance(found, nn.Module):
            children = sorted(n for n, _ in module.named_children())[:20] if isinstance(module, nn.Module) else []
            raise AdapterError(f"{where}: {type(module).__name__} has no submodule {part!r}; there are {children}")
        module = found
    if inside:
        raise AdapterError(
            f"{where} lies inside a TorchScript module, whose inner calls are compiled; use a ScriptAdapter on the "
            "scripted module, or declare hops = number of layers instead"
        )
    return module  # type: ignore[no-any-return]
