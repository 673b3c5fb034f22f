"""The public ops against fp64 brute force, over random sizes, options, layouts and poisons.

Nothing here shares code with the package: each expectation is written out in its plainest form.
"""

import math
import random
from typing import Any

import pytest
import torch
from tolerances import FP32, FP32_SUM, FP64
from torch import Tensor

import ppo_kernels as pk

NAN = float("nan")


def log_softmax_rows(
    logits: Tensor, labels: Tensor, temperature: float, softcap: float | None, scale: float
) -> tuple[Tensor, Tensor]:
    z = logits.double() * scale
    if softcap is not None:
        z = softcap * torch.tanh(z / softcap)
    logp = torch.log_softmax(z / temperature, -1)
    return logp.gather(-1, labels.long()[..., None])[..., 0], -(logp.exp() * logp).sum(-1)


@pytest.mark.parametrize("V", [1, 7, 300, 1024, 5000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_logprobs(V: int, dtype: torch.dtype) -> None:
    padded = 3 * torch.randn(6, 9, V + 3, dtype=dtype)
    views = {
        "shifted, padded vocabulary": padded[:, :-1, :V],
        "transposed": padded[..., :V].transpose(0, 1),
        "contiguous": padded[..., :V].contiguous(),
    }
    tolerance = FP64 if dtype == torch.float64 else FP32
    for x in views.values():
        for kwargs in ((1.0, None, 1.0), (0.7, 30.0, 1.3)):
            temperature, softcap, scale = kwargs
            labels = torch.randint(0, V, x.shape[:-1])
            labels[0, 0] = -100
            leaf = x.detach().requires_grad_()
            got = pk.logprobs_from_logits(
                leaf,
                labels,
                temperature=temperature,
                softcap=softcap,
                logit_scale=scale,
                return_entropy=True,
            )
            exact = leaf.detach().double().requires_grad_()
            want = log_softmax_rows(exact, labels.clamp(min=0), *kwargs)
            want = [torch.where(labels >= 0, w, 0.0) for w in want]
            g, h = (torch.randn(labels.shape, dtype=torch.float64) for _ in range(2))
            (got[0] * g.to(dtype) + got[1] * h.to(dtype)).sum().backward()
            (want[0] * g + want[1] * h).sum().backward()
            for a, b in zip((*got, leaf.grad), (*want, exact.grad)):
                torch.testing.assert_close(a.double(), b, **tolerance)


def gae_by_definition(
    r: Tensor, v: Tensor, mask: Tensor, gamma: float, lam: float, boot: Tensor
) -> Tensor:
    """sum_k (gamma lam)^k delta_k over the valid tokens of each row, as a double loop."""
    out = torch.zeros_like(v)
    for b in range(v.shape[0]):
        at = mask[b].nonzero().flatten().tolist()
        nexts = [v[b, t] for t in at[1:]] + [boot[b]]
        delta = [r[b, t] + gamma * n - v[b, t] for t, n in zip(at, nexts)]
        for i, t in enumerate(at):
            out[b, t] = sum((gamma * lam) ** (k - i) * delta[k] for k in range(i, len(at)))
    return out


@pytest.mark.parametrize("T", [1, 2, 31, 33, 129])
@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 0.95), (1.0, 1.0), (0.99, 0.0), (0.9, 0.8)])
def test_gae_padded_and_packed(T: int, gamma: float, lam: float) -> None:
    B = 7
    r, v, boot = (torch.randn(B, T, dtype=torch.float64) for _ in range(3))
    boot = boot[:, 0]
    mask = torch.rand(B, T) < 0.6
    mask[2] = False
    scores = torch.randn(B, dtype=torch.float64)
    poison = torch.where(mask, 0.0, NAN)
    got = pk.gae(r + poison, v + poison, mask, gamma=gamma, lam=lam, scores=scores, bootstrap=boot)
    with_score = r.clone()
    for b in range(B):
        if mask[b].any():
            with_score[b, int(mask[b].nonzero()[-1])] += scores[b]
    want = gae_by_definition(with_score, v, mask, gamma, lam, boot)
    torch.testing.assert_close(got.advantages, want, **FP64)
    torch.testing.assert_close(got.returns, torch.where(mask, want + v, 0.0), **FP64)
    n, total, squares = got.stats.tolist()
    assert n == mask.sum()
    assert math.isclose(total, want.sum().item(), abs_tol=1e-9)
    assert math.isclose(squares, (want**2).sum().item(), rel_tol=1e-9, abs_tol=1e-9)

    lengths = torch.randint(0, T + 1, (B,))
    inside = torch.arange(T) < lengths[:, None]
    cu = torch.cat([torch.zeros(1), lengths.cumsum(0)]).int()
    options = {"gamma": gamma, "lam": lam, "scores": scores, "bootstrap": boot}
    packed = pk.gae(r[inside], v[inside], mask[inside], cu_seqlens=cu, **options)
    padded = pk.gae(r, v, mask & inside, **options)
    assert torch.equal(packed.advantages, padded.advantages[inside])
    assert torch.equal(packed.returns, padded.returns[inside])


def loss_by_definition(t: dict[str, Tensor], weight: Tensor, o: dict[str, Any]) -> Tensor:
    """Token by token, row by row."""
    rows, live = [], 0
    for b in range(weight.shape[0]):
        total, n = torch.zeros((), dtype=torch.float64), 0.0
        for j in range(weight.shape[1]):
            w = weight[b, j].item()
            if w == 0:
                continue
            x = {k: v[b, j] for k, v in t.items()}
            ratio = torch.exp((x["logp"] - x["old"]).clamp(-20, 20))
            clipped = ratio.clamp(1 - 0.2, 1 + o["high"])
            pg = torch.maximum(-ratio * x["adv"], -clipped * x["adv"])
            if o["dual"] is not None and x["adv"] < 0:
                pg = torch.minimum(pg, -o["dual"] * x["adv"])
            near = x["old_v"] + (x["v"] - x["old_v"]).clamp(-0.2, 0.2)
            vf = torch.maximum((x["v"] - x["ret"]) ** 2, (near - x["ret"]) ** 2) / 2
            d = x["logp"] - x["ref"]
            kl = {"k1": d, "k2": d * d / 2, "k3": torch.exp(-d) - 1 + d}[o["kl"]]
            total = total + w * (pg + 0.1 * vf - 0.01 * x["ent"] + 0.05 * kl)
            n += w
        live += n > 0
        rows.append(total / n if o["reduction"] == "seq-mean-token-mean" and n else total)
    total, n = sum(rows), weight.sum().item()
    if o["normalizer"] is not None:
        return total / o["normalizer"]
    den = {"token-mean": n, "sum": 1.0}.get(o["reduction"], live)
    return total / den if den else total * 0


REDUCTIONS = ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "sum")


@pytest.mark.parametrize("seed", range(24))
def test_loss(seed: int) -> None:
    random.seed(seed)
    B, T = random.choice([(1, 1), (3, 5), (4, 17)])
    names = ("logp", "old", "adv", "v", "old_v", "ret", "ent", "ref")
    t = {k: 0.4 * torch.randn(B, T, dtype=torch.float64) for k in names}
    mask = torch.rand(B, T) < random.choice([0.0, 0.5, 1.1])
    weight = mask.double()
    if seed % 3 == 0:
        mask = weight = weight * (0.5 + torch.rand(B, T, dtype=torch.float64))
    o = {
        "high": random.choice([0.2, 0.3]),
        "dual": random.choice([None, 1.5]),
        "kl": random.choice(["k1", "k2", "k3"]),
        "reduction": REDUCTIONS[seed % 4],
        "normalizer": random.choice([None, 3.7]),
    }
    poison = torch.where(weight > 0, 0.0, NAN)
    leaves = {k: (t[k] + poison).requires_grad_() for k in ("logp", "v", "ent")}
    out = pk.ppo_loss(
        leaves["logp"],
        t["old"] + poison,
        t["adv"] + poison,
        mask,
        values=leaves["v"],
        old_values=t["old_v"] + poison,
        returns=t["ret"] + poison,
        entropy=leaves["ent"],
        ref_logprobs=t["ref"] + poison,
        cliprange_high=o["high"],
        dual_clip=o["dual"],
        ent_coef=0.01,
        kl_coef=0.05,
        kl_penalty=o["kl"],
        reduction=o["reduction"],
        normalizer=o["normalizer"],
    )
    exact = {k: t[k].clone().requires_grad_() for k in leaves}
    want = loss_by_definition(t | exact, weight, o)
    torch.testing.assert_close(out.loss, want.detach(), **FP64)
    got = torch.autograd.grad(out.loss, list(leaves.values()))
    if want.requires_grad:
        for a, b in zip(got, torch.autograd.grad(want, list(exact.values()))):
            torch.testing.assert_close(a, b, **FP64)
    else:
        assert all((g == 0).all() for g in got)


@pytest.mark.parametrize("chunk", [1, 4, None])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_hidden(chunk: int | None, dtype: torch.dtype) -> None:
    h = torch.randn(5, 11, 16, dtype=dtype, requires_grad=True)
    w = torch.randn(53, 16, dtype=dtype, requires_grad=True)
    b = torch.randn(53, dtype=dtype, requires_grad=True)
    labels = torch.randint(0, 53, (5, 11))
    mask = torch.rand(5, 11) < 0.7
    labels[1, 2], mask[1, 2] = -100, False
    tolerance = FP64 if dtype == torch.float64 else FP32
    head = {"temperature": 0.8, "softcap": 20.0, "logit_scale": 0.9}
    got = pk.logprobs_from_hidden(
        h, w, labels, bias=b, return_entropy=True, chunk_tokens=chunk, **head
    )
    exact = [x.detach().double().requires_grad_() for x in (h, w, b)]
    logits = exact[0] @ exact[1].T + exact[2]
    want = log_softmax_rows(logits, labels.clamp(min=0), 0.8, 20.0, 0.9)
    want = [torch.where(labels >= 0, x, 0.0) for x in want]
    for a, e in zip(got, want):
        torch.testing.assert_close(a.double(), e, **tolerance)
    gradients = torch.autograd.grad((1.3 * got[0] + 0.2 * got[1]).sum(), (h, w, b))
    for a, e in zip(
        gradients, torch.autograd.grad((1.3 * want[0] + 0.2 * want[1]).sum(), exact, None, True)
    ):
        torch.testing.assert_close(a.double(), e, **(FP64 if dtype == torch.float64 else FP32_SUM))

    old = want[0].detach() + 0.1 * torch.randn(5, 11, dtype=torch.float64)
    adv = torch.randn(5, 11, dtype=torch.float64)
    args = (labels, old.to(dtype), adv.to(dtype), mask)
    options = {**head, "ent_coef": 0.01}
    fused = pk.ppo_loss_from_hidden(h, w, *args, bias=b, chunk_tokens=chunk, **options)
    ratio = torch.exp(want[0] - old)
    pg = torch.maximum(-ratio * adv, -ratio.clamp(0.8, 1.2) * adv) - 0.01 * want[1]
    plain = torch.where(mask, pg, 0.0).sum() / mask.sum()
    torch.testing.assert_close(fused.loss.double(), plain.detach(), **tolerance)
    for a, e in zip(torch.autograd.grad(fused.loss, (h, w, b)), torch.autograd.grad(plain, exact)):
        torch.testing.assert_close(a.double(), e, **tolerance)

    x = logits.detach().to(dtype).requires_grad_()
    from_logits = pk.ppo_loss_from_logits(x, *args, **options)
    torch.testing.assert_close(from_logits.loss.double(), plain.detach(), **tolerance)
    from_logits.loss.backward()
    assert (x.grad[~mask] == 0).all()
