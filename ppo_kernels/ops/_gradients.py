"""Losses whose op makes the gradients along with the loss; gradients that are first-order only."""

import functools
from collections.abc import Callable
from itertools import compress
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad


def first_order(backward: Callable[..., Any]) -> Callable[..., Any]:
    """A backward that raises where its results would be differentiated again (create_graph=True).

    torch's once_differentiable raises in the second differentiation, but only if that visits every
    node: asked for certain inputs, as by autograd.grad or functional.hvp, it takes the op's part
    for 0.
    """

    @functools.wraps(backward)
    def run(ctx: Any, *grads: Tensor | None) -> Any:
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            raise RuntimeError(
                "the gradient of a ppo_kernels op is not differentiable a second time: leave the "
                "op out of what is differentiated with create_graph=True"
            )
        return backward(ctx, *grads)

    return run


class _WithGradients(torch.autograd.Function):
    """The loss of an op that made it and its gradients for the inputs. A tuple hides them from
    autograd, for which the loss is new: it needs no copy."""

    @staticmethod
    def forward(ctx: Any, once: bool, results: tuple[Tensor, ...], *inputs: Tensor) -> Tensor:
        loss, *gradients = results
        ctx.once, ctx.consumed = once, False
        ctx.save_for_backward(*gradients)
        # torch 2.10 cannot compile a function that returns what came in a tuple.
        return loss.clone() if torch.compiler.is_compiling() else loss

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        compiling = torch.compiler.is_compiling()
        if ctx.once and not compiling:
            if ctx.consumed:
                raise RuntimeError(
                    "the gradient in the place of the logits is handed out once, by the first "
                    "backward; a second one needs inplace_backward=False"
                )
            ctx.consumed = True
        gradients = ctx.saved_tensors  # of any dtype: autograd hands them on in that of the input
        # Second tensors of this size only where the first are needed once more.
        keep = compiling or _is_batched(grad) or (not ctx.once and _keeps_graph())
        if keep or not _is_one(grad):
            gradients = [
                None if not need else d * grad if keep else d.mul_(grad)
                for d, need in zip(gradients, ctx.needs_input_grad[2:])
            ]
        return None, None, *gradients


def _is_batched(grad: Tensor) -> bool:
    """Whether autograd.grad(is_grads_batched=True) asks, for which nothing works in place."""
    return torch._C._functorch.is_legacy_batchedtensor(grad)


def _is_one(grad: Tensor) -> bool:
    """Whether loss.backward() asks: on the CPU a look is free. A tracer's tensor has no value."""
    return type(grad) is Tensor and grad.is_cpu and grad.item() == 1


def _keeps_graph() -> bool:
    """Whether the backward that is running keeps the graph for another one."""
    return torch._C._autograd._get_current_graph_task_keep_graph()


def _transformed() -> bool:
    """Whether torch.func (vmap, grad, batched gradients) is at work."""
    return torch._C._are_functorch_transforms_active()


def refuse_transforms() -> None:
    """Raise under torch.func, which would drop the gradients that an op keeps for backward."""
    if not torch.compiler.is_compiling() and torch.is_grad_enabled() and _transformed():
        raise RuntimeError(
            "ppo_kernels has no rules for torch.func's transforms (vmap, grad, jvp): call the op "
            "outside of them, or under torch.no_grad()"
        )


def _refuse_tangents(*inputs: Tensor | None) -> None:
    """Raise in forward mode, whose tangents a loss that needs no gradient would drop."""
    if torch.compiler.is_compiling() or forward_ad._current_level < 0:
        return
    if any(x is not None and forward_ad.unpack_dual(x).tangent is not None for x in inputs):
        raise RuntimeError("ppo_kernels has no rules for forward-mode differentiation")


def needs(*inputs: Tensor | None) -> list[bool]:
    """Which inputs want a gradient from the call at hand."""
    refuse_transforms()
    _refuse_tangents(*inputs)
    return [torch.is_grad_enabled() and x is not None and x.requires_grad for x in inputs]


def with_gradients(
    loss: Tensor,
    inputs: list[Tensor | None],
    need: list[bool],
    gradients: list[Tensor],
    once: bool = False,
) -> Tensor:
    """loss, differentiable in the inputs that need it by the given gradients; once: backward may
    run once."""
    if not any(need):
        return loss
    results = (loss, *compress(gradients, need))
    return _WithGradients.apply(once, results, *compress(inputs, need))
