"""Questions about a tensor, answered for this rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from nvalchemi_distributed.shard_tensor.operands import refuse, shards
from nvalchemi_distributed.shard_tensor.registry import names, register
from nvalchemi_distributed.shard_tensor.tensor import ShardTensor

_PROPERTIES = (
    "shape ndim dtype device layout requires_grad grad_fn is_leaf _version is_cuda is_cpu is_sparse is_quantized "
    "is_meta "
    "is_nested itemsize nbytes names _base is_mps is_xpu is_mkldnn output_nr _backward_hooks retains_grad "
    "is_complex is_sparse_csr"
)
_METHODS = (
    "size dim ndimension numel nelement stride storage_offset is_floating_point is_complex is_contiguous element_size "
    "get_device __len__ __repr__ __format__ __hash__ data_ptr untyped_storage is_inference is_same_size is_signed "
    "has_names is_pinned is_shared is_conj is_neg can_cast result_type "
    "promote_types register_hook retain_grad __dir__ __sizeof__ _is_view"
)


@register(
    "metadata",
    "Answered for this rank's rows: shape, dtype, device, …",
    *(f"property:{p}" for p in names(_PROPERTIES)),
    *names(_METHODS),
)
def _metadata(name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return func(*args, **kwargs)


@register("metadata", "Sets a flag of this tensor", "requires_grad_", "property:requires_grad:set")
def _flag(name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    func(*args, **kwargs)
    return args[0]


@register("metadata", "Refused when there is one: it holds this rank's part", "property:grad")
def _grad(name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    x = next(iter(shards(args)))
    assert isinstance(x, ShardTensor)
    if x.is_leaf and func(*args, **kwargs) is not None:
        raise refuse(".grad", "this rank's part of a gradient (torch.autograd.grad gives the whole one)")
    return None
