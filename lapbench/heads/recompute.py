"""A tensor that autograd need not keep, because it is cheap to compute again from others that it keeps anyway."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

Geometry = tuple[tuple[int, ...], tuple[int, ...], int]
LEAST_BYTES = 2**20
"""Smaller tensors are kept: to make one again takes longer than its memory is worth."""


def worth_recomputing(tensor: Tensor) -> bool:
    """Whether a tensor is large, and autograd, not the compiler, decides what to keep of it."""
    # The compiler first: it knows no size in bytes where shapes vary.
    return not torch.compiler.is_compiling() and torch.is_grad_enabled() and tensor.nbytes >= LEAST_BYTES


def shares_memory(tensor: Tensor, other: Tensor) -> bool:
    """Whether both are known to be views of the same storage."""
    try:
        return tensor.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()
    except NotImplementedError:  # torch.func's transforms wrap tensors, and take no hooks either
        return False


def recomputed_in_backward(tensor: Tensor, recompute: Callable[[], Tensor]) -> saved_tensors_hooks:
    """A context in which operations save views of ``tensor`` for their gradient as a recipe, not as memory.

    Gradients are the same bit for bit, as ``recompute`` runs the same operations on the same values.

    Args:
        tensor: What would be kept.
        recompute: Makes a tensor of equal values and strides; must not hold ``tensor`` itself.
    """
    address = tensor.untyped_storage().data_ptr()  # the hooks outlive this call and must not hold the tensor

    def pack(saved: Tensor) -> Tensor | Geometry:
        if saved.untyped_storage().data_ptr() == address:
            return tuple(saved.shape), saved.stride(), int(saved.storage_offset())
        return saved

    def unpack(packed: Tensor | Geometry) -> Tensor:
        return packed if isinstance(packed, Tensor) else recompute().as_strided(*packed)

    return saved_tensors_hooks(pack, unpack)
