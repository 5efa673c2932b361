"""Records what a forward computes, operation by operation, so that two runs can be laid side by side."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from nvalchemi_distributed.shard_tensor import ShardTensor
from nvalchemi_distributed.shard_tensor.registry import name_of

LIMIT = 3000
_OURS = str(Path(__file__).resolve().parents[1])
_MODELS = f"{_OURS}/models/"
_TORCH = str(Path(torch.__file__).resolve().parent)


@dataclass
class Event:
    """One result, or one argument of a module.

    Attributes:
        what: the operation, or ``argument NAME of MODULE``.
        module: path of the innermost module that was running.
        caller: ``file:line function`` in the model's code.
        value: a copy.
        kind: of a row tensor; "" for a plain one.
        partial: a row tensor that is this rank's part of a sum.
    """

    what: str
    module: str
    caller: str
    value: Tensor
    kind: str = ""
    partial: bool = False


class Recorder(TorchFunctionMode):
    """Keeps every floating-point result of at most :data:`LIMIT` operations."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[Event] = []
        self.stack: list[str] = []
        self.failed = ""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run the operation and keep its result."""
        out = func(*args, **(kwargs or {}))
        name = name_of(func)
        if isinstance(out, Tensor) and not name.startswith("property:") and not name.startswith("new_"):
            where = caller(sys._getframe(1))
            if where:
                self.keep(name, where, out)
        return out

    def keep(self, what: str, where: str, value: Tensor) -> None:
        """Record one tensor."""
        if len(self.events) >= LIMIT:
            return
        sharded = isinstance(value, ShardTensor)
        info = value.row_info if isinstance(value, ShardTensor) else None
        with torch._C.DisableTorchFunction(), torch.no_grad():
            plain = value.as_subclass(torch.Tensor).detach()
            if not plain.is_floating_point() or plain.dim() == 0:
                return
            plain = (plain.movedim(info.dim, 0) if info is not None and info.dim else plain).clone()
        kind, partial = (info.kind.value, info.partial) if sharded and info is not None else ("", False)
        self.events.append(Event(what, self.stack[-1] if self.stack else "", where, plain, kind, partial))


@contextmanager
def recording(model: nn.Module) -> Iterator[Recorder]:
    """Record a forward of ``model``, and the arguments of its modules."""
    recorder = Recorder()
    with ExitStack() as stack:
        for path, module in model.named_modules():
            if path and not isinstance(module, torch.jit.ScriptModule | nn.ModuleList | nn.ModuleDict):
                before = module.register_forward_pre_hook(_enter(recorder, path), with_kwargs=True)
                after = module.register_forward_hook(_leave(recorder), always_call=True)
                stack.callback(before.remove)
                stack.callback(after.remove)
        stack.enter_context(recorder)
        yield recorder


def _enter(recorder: Recorder, path: str) -> Callable[..., None]:
    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        for name, value in [*enumerate(args), *kwargs.items()]:
            items = value.items() if isinstance(value, dict) else [("", value)]
            for key, v in items:
                if isinstance(v, Tensor):
                    label = f"argument {name!r}{f' key {key!r}' if key != '' else ''} of {path}"
                    recorder.keep(label, "", v)
        recorder.stack.append(path)

    return hook


def _leave(recorder: Recorder) -> Callable[..., None]:
    def hook(module: nn.Module, args: Any, out: Any) -> None:
        path = recorder.stack.pop()
        # Called without a result when the module raised; the innermost comes first.
        if out is None and not recorder.failed:
            recorder.failed = path

    return hook


def caller(frame: FrameType | None) -> str:
    """``file:line function`` of the line of a model that called torch; "" for a line of the framework itself."""
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith((_TORCH, "<")):
            framework = file.startswith(_OURS) and not (file.startswith(_MODELS) and not file.endswith("gradient.py"))
            return "" if framework else f"{file}:{frame.f_lineno} {frame.f_code.co_qualname}"
        frame = frame.f_back
    return ""
