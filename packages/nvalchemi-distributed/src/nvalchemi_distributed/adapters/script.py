"""Calls between the submodules of a TorchScript module, which no Python hook sees."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from nvalchemi_distributed.context import DistributedContext, current_dd_context
from nvalchemi_distributed.errors import AdapterError

_KEPT = "_refreshing_scripts"


@torch.library.custom_op("nvalchemi_distributed::refresh_in_scope", mutates_args=())
def _refresh_in_scope(x: Tensor) -> Tensor:
    context = current_dd_context()
    return context.refresh(x) if context.is_distributed else x.clone()


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    # The forward's own: a gradient may be taken after the scope has closed.
    ctx.context = current_dd_context()


def _backward(ctx: Any, grad: Tensor) -> Tensor:
    return ctx.context.fold(grad.contiguous())  # type: ignore[no-any-return]


_refresh_in_scope.register_autograd(_backward, setup_context=_setup)


@dataclass(frozen=True)
class ScriptAdapter:
    """Refreshes an argument of one submodule call inside a TorchScript module while a decomposed forward runs.

    A copy of the scripted module, with the same parameters and one more operation in its graph, stands in for it; the
    module itself is not touched.

    Attributes:
        target: path of the scripted module from the wrapper.
        submodule: path of the called submodule from there, such as ``interactions.1``.
        argument: its argument with node rows, by name or position.
    """

    target: str
    submodule: str
    argument: str | int

    @property
    def where(self) -> str:
        """For messages."""
        return f"ScriptAdapter {self.target}: {self.submodule}({self.argument!r})"

    def install(self, model: nn.Module, context: DistributedContext, stack: ExitStack) -> None:
        """Put the copy in place until ``stack`` closes.

        Raises:
            AdapterError: no scripted module there, no such call, or no such argument.
        """
        *path, name = self.target.split(".")
        try:
            parent = _below(model, path)
            script = _below(parent, [name])
        except KeyError as error:
            raise AdapterError(f"{self.where}: no submodule {error}; paths are as in named_modules") from None
        if not isinstance(script, torch.jit.ScriptModule):
            raise AdapterError(f"{self.where}: {type(script).__name__} is no TorchScript module; use a MethodAdapter")
        # Copies live with the model: making one takes as long as loading it.
        kept: dict[Any, nn.Module] = model.__dict__.setdefault(_KEPT, {})
        # Several adapters of one module edit one copy after the other: the key is the copy they start from.
        key = (id(script), self)
        if key not in kept:
            kept[key] = self._edited(script)
        parent._modules[name] = kept[key]
        stack.callback(parent._modules.__setitem__, name, script)

    def _edited(self, script: torch.jit.ScriptModule) -> torch.jit.ScriptModule:
        buffer = io.BytesIO()
        torch.jit.save(script, buffer)
        buffer.seek(0)
        copy = torch.jit.load(buffer)
        copy.train(script.training)
        _share(copy, script)
        done = 0
        try:
            calls = list(_calls(copy, self.submodule.split(".")))
        except KeyError:
            calls = []
        for graph, call in calls:
            k = self._position(_below(copy, self.submodule.split(".")), self.submodule)
            value = list(call.inputs())[k]
            node = graph.create("nvalchemi_distributed::refresh_in_scope", [value], 1)
            node.insertBefore(call)
            node.output().setType(value.type())
            call.replaceInput(k, node.output())
            done += 1
        if not done:
            children = [n for n, _ in script.named_children()]
            raise AdapterError(f"{self.where}: the scripted code calls no such submodule; its children are {children}")
        return copy

    def _position(self, submodule: nn.Module, path: str) -> int:
        names = [a.name for a in submodule._c._get_method("forward").schema.arguments]  # type: ignore[union-attr, operator]
        if isinstance(self.argument, int) and 0 <= self.argument < len(names) - 1:
            return self.argument + 1
        if self.argument in names[1:]:
            return names.index(str(self.argument))
        raise AdapterError(f"{self.where}: {path} has the arguments {names[1:]}")


def _share(copy: nn.Module, script: nn.Module) -> None:
    """The copy's parameters and buffers become the original's, so that gradients and later changes meet there."""
    for (path, module), (_, original) in zip(copy.named_modules(), script.named_modules(), strict=True):
        del path
        for name, value in [*original.named_parameters(recurse=False), *original.named_buffers(recurse=False)]:
            module._c.setattr(name, value)  # type: ignore[union-attr, operator]


def _calls(script: nn.Module, path: list[str]) -> Iterator[tuple[Any, Any]]:
    """Every (graph, call node) of the submodule's ``forward``, in the code of the module or of one on the way to it."""
    for k in range(len(path)):
        holder = _below(script, path[:k])
        if not hasattr(holder, "_c") or not holder._c._has_method("forward"):  # type: ignore[operator]
            continue
        graph = holder._c._get_method("forward").graph  # type: ignore[operator]
        for call in graph.findAllNodes("prim::CallMethod"):
            if call.s("name") == "forward" and _attributes(next(iter(call.inputs()))) == path[k:]:
                yield graph, call


def _below(module: nn.Module, path: list[str]) -> nn.Module:
    for part in path:
        found = dict(module.named_children()).get(part)
        if found is None:
            raise KeyError(part)
        module = found
    return module


def _attributes(value: Any) -> list[str]:
    """Names along the chain of attribute look-ups that a value comes from."""
    names: list[str] = []
    node = value.node()
    while node.kind() == "prim::GetAttr":
        names.insert(0, node.s("name"))
        node = next(iter(node.inputs())).node()
    return names
