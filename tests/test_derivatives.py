"""What the gradients of the ops do not do, they refuse: second derivatives, torch.func."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

import ppo_kernels as pk

LABELS = torch.arange(4)
WEIGHT = torch.randn(6, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
OLD, ADVANTAGES = torch.zeros(4, dtype=torch.float64), torch.ones(4, dtype=torch.float64)


def loss_of(x: Tensor) -> Tensor:
    return pk.ppo_loss(x[:, 0], OLD, ADVANTAGES).loss


OPS: dict[str, Callable[[Tensor], Tensor]] = {
    "logprobs": lambda x: pk.logprobs_from_logits(x, LABELS),
    "entropy": lambda x: pk.entropy_from_logits(x),
    "hidden": lambda x: pk.logprobs_from_hidden(x, WEIGHT, LABELS),
    "lm_loss": lambda x: pk.lm_loss(x, WEIGHT, LABELS),
    "ppo_loss": loss_of,
    "from_logits": lambda x: pk.ppo_loss_from_logits(x, LABELS, OLD, ADVANTAGES).loss,
    "from_hidden": lambda x: pk.ppo_loss_from_hidden(x, WEIGHT, LABELS, OLD, ADVANTAGES).loss,
}


def fresh() -> Tensor:
    return torch.randn(4, 5, dtype=torch.float64, requires_grad=True)


@pytest.mark.parametrize("name", OPS)
def test_a_second_derivative_raises_instead_of_being_zero(name: str) -> None:
    x = fresh()
    loss = OPS[name](x).sum() + x.pow(3).sum()  # of which the second derivative is not 0
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(loss, x, create_graph=True)
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.functional.hvp(lambda y: OPS[name](y).sum(), x.detach(), x.detach())


@pytest.mark.parametrize("name", OPS)
def test_a_gradient_penalty_elsewhere_in_the_graph_is_not_disturbed(name: str) -> None:
    x = fresh()
    (slope,) = torch.autograd.grad(x.pow(3).sum(), x, create_graph=True)
    (OPS[name](x).sum() + slope.pow(2).sum()).backward()
    (alone,) = torch.autograd.grad(OPS[name](x).sum(), x)
    torch.testing.assert_close(x.grad, alone + 36 * x.detach() ** 3)


@pytest.mark.parametrize("name", OPS)
def test_forward_mode_is_refused(name: str) -> None:
    with forward_ad.dual_level():
        x = forward_ad.make_dual(fresh().detach(), torch.ones(4, 5, dtype=torch.float64))
        with pytest.raises((RuntimeError, NotImplementedError)):
            OPS[name](x)
        OPS[name](fresh())  # without a tangent


@pytest.mark.parametrize("name", OPS)
def test_torch_func_is_refused_by_name(name: str) -> None:
    x = fresh()
    with pytest.raises(RuntimeError, match=r"torch\.func"):
        torch.func.grad(lambda y: OPS[name](y).sum())(x.detach())
    with pytest.raises(RuntimeError, match=r"torch\.func"):
        torch.func.vmap(lambda y: OPS[name](y))(torch.stack([x, x]))


def test_batched_gradients_of_the_loss() -> None:
    x = fresh()
    loss = loss_of(x)
    scales = torch.tensor([1.0, -2.0], dtype=torch.float64)
    one_by_one = [torch.autograd.grad(loss, x, s, retain_graph=True)[0] for s in scales]
    for keep in (True, False):
        (batched,) = torch.autograd.grad(loss, x, scales, is_grads_batched=True, retain_graph=keep)
        assert torch.equal(batched, torch.stack(one_by_one))
