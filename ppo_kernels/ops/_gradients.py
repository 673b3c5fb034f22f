"""Losses whose op makes the gradients along with the loss: backward only scales them."""

from typing import Any

import torch
from torch import Tensor

from ppo_kernels.ops._library import define


def _scale(x: Tensor, factor: Tensor) -> None:
    # On the CPU looking at a number costs nothing, and loss.backward() scales by 1.
    if factor.device.type != "cpu" or factor.item() != 1:
        x.mul_(factor)


def _scale_fake(x: Tensor, factor: Tensor) -> None:
    return None


# x *= factor, a 0-d fp32 tensor (fp64 for fp64 x); where it is 1, x is not even read.
define("scale_(Tensor(a!) x, Tensor factor) -> ()", _scale, _scale_fake)


class _WithGradients(torch.autograd.Function):
    """The identity on loss, whose gradients for the other inputs are already known."""

    @staticmethod
    def forward(
        ctx: Any, loss: Tensor, once: bool, n: int, *inputs_and_gradients: Tensor | None
    ) -> Tensor:
        inputs, gradients = inputs_and_gradients[:n], inputs_and_gradients[n:]
        ctx.dtypes = [None if x is None else x.dtype for x in inputs]
        ctx.once, ctx.consumed = once, False
        ctx.save_for_backward(*gradients)
        return loss.clone()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        compiling = torch.compiler.is_compiling()
        if ctx.once and not compiling:
            if ctx.consumed:
                raise RuntimeError(
                    "the first backward has handed out the gradient in the place of the logits; "
                    "a second one needs inplace_backward=False"
                )
            ctx.consumed = True
        # Second tensors of this size only where the first are needed once more.
        keep = compiling or (not ctx.once and _keeps_graph())
        found = []
        for d, dtype, need in zip(ctx.saved_tensors, ctx.dtypes, ctx.needs_input_grad[3:]):
            found.append(_scaled(d, grad, keep).to(dtype) if need else None)
        return None, None, None, *found, *(None for _ in ctx.dtypes)


def _scaled(d: Tensor, grad: Tensor, keep: bool) -> Tensor:
    if keep:
        return d * grad
    torch.ops.ppo_kernels.scale_(d, grad)
    return d


def _keeps_graph() -> bool:
    """Whether the backward that is running keeps the graph for another one."""
    return torch._C._autograd._get_current_graph_task_keep_graph()


def needs(*inputs: Tensor | None) -> list[bool]:
    """Which inputs want a gradient from the call at hand."""
    return [torch.is_grad_enabled() and x is not None and x.requires_grad for x in inputs]


def with_gradients(
    loss: Tensor, inputs: list[Tensor | None], gradients: list[Tensor], once: bool = False
) -> Tensor:
    """loss, differentiable in inputs by the given gradients; once: backward may run once."""
    if not any(needs(*inputs)):
        return loss
    return _WithGradients.apply(loss, once, len(inputs), *inputs, *gradients)
