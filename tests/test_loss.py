"""ppo_loss and ppo_loss_from_logits: every option against autograd through the definition in fp64,
invariances, masked junk, bounds, errors, torch's own checks."""

import copy
import itertools
import pickle

import pytest
import tolerances as tol
import torch
from torch import Tensor

import ppo_kernels as pk
from ppo_kernels import reference

B, T = 4, 150
FP64 = torch.float64
NAMES = ("logprobs", "values", "entropy")


def tokens(dtype: torch.dtype = FP64, rows: int = B) -> dict[str, Tensor]:
    logp = -3 * torch.rand(rows, T, dtype=FP64)
    x = {"logprobs": logp}
    for name in ("old_logprobs", "ref_logprobs", "rollout_logprobs"):
        x[name] = logp + 0.3 * torch.randn(rows, T, dtype=FP64)
    for name in ("advantages", "values", "old_values", "returns"):
        x[name] = torch.randn(rows, T, dtype=FP64)
    x["entropy"] = torch.rand(rows, T, dtype=FP64)
    return {k: v.to(dtype) for k, v in x.items()}


def run(x: dict[str, Tensor], **options) -> tuple[Tensor, ...]:
    """(loss, stats, gradients) of the op."""
    leaves = [x[n].detach().clone().requires_grad_() for n in NAMES]
    out = pk.ppo_loss(**{**x, **dict(zip(NAMES, leaves))}, **options)
    return out.loss.detach(), out.stats.tensor, *torch.autograd.grad(out.loss, leaves)


def expected(x: dict[str, Tensor], **options) -> tuple[Tensor, ...]:
    """The same in fp64, by autograd through the definition."""
    x = {k: v.detach().double() for k, v in x.items()}
    leaves = [x[n].requires_grad_() for n in NAMES]
    options["kl_kind"] = options.pop("kl_penalty", "k3+")
    loss, stats = reference.ppo_loss(**x, **options)
    return loss.detach(), stats, *torch.autograd.grad(loss, leaves)


def close(got: tuple[Tensor, ...], want: tuple[Tensor, ...], tolerance: dict) -> None:
    for a, b in zip(got, want):
        torch.testing.assert_close(a.double(), b.double(), **tolerance)


def check_options(policy: str, dtype: torch.dtype, chosen: slice = slice(None)) -> None:
    """Against the definition, the chosen ones of 144 combinations of options."""
    x = tokens(dtype)
    mask = torch.rand(B, T) > 0.4
    mask[3] = False
    weights = torch.rand(B, T, dtype=FP64) * mask
    cu = torch.tensor([0, 3, 3, 150, 151, 599, 600], dtype=torch.int32)
    tolerance = tol.FP64 if dtype == FP64 else tol.FP32
    cases = itertools.product(
        (None, mask, weights), reference.REDUCTIONS, reference.KL_KINDS, (False, True)
    )
    for i, (m, reduction, kind, packed) in list(enumerate(cases))[chosen]:
        options = {
            "policy_loss": policy,
            "reduction": reduction,
            "kl_penalty": kind,
            "mask": m,
            "normalizer": (None, 37.5, torch.tensor(41))[i % 3],
            "dual_clip": (None, 1.2)[i % 2],
            "cliprange_high": (None, 0.28)[i // 2 % 2],
            "cliprange_value": (0.2, None)[i // 3 % 2],
            "whiten": (None, torch.tensor([400.0, 37.0, 500.0], dtype=FP64))[i // 4 % 2],
            "vf_coef": 0.3,
            "ent_coef": 0.01,
            "kl_coef": 0.2,
            "kl_old_coef": 0.7,
            "is_cap": 1.3,
        }
        y = x
        if packed:
            y = {k: v.reshape(-1) for k, v in x.items()}
            options |= {"cu_seqlens": cu, "mask": None if m is None else m.reshape(-1)}
        close(run(y, **options), expected(y, **options), tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, FP64])
@pytest.mark.parametrize("policy", reference.POLICY_LOSSES)
def test_every_option_is_the_definition(policy: str, dtype: torch.dtype) -> None:
    check_options(policy, dtype)


@pytest.mark.parametrize("policy", reference.POLICY_LOSSES)
def test_gradcheck(policy: str) -> None:
    x = {k: v[:2, :3].contiguous() for k, v in tokens().items()}
    leaves = [x[n].requires_grad_() for n in NAMES]
    for kind, reduction in itertools.product(("k1", "k2", "k3", "abs"), reference.REDUCTIONS):

        def loss(*leaves: Tensor, kind: str = kind, reduction: str = reduction) -> Tensor:
            y = {**x, **dict(zip(NAMES, leaves))}
            options = {"ent_coef": 0.1, "kl_coef": 0.2, "dual_clip": 1.5, "kl_penalty": kind}
            return pk.ppo_loss(**y, policy_loss=policy, reduction=reduction, **options).loss

        torch.autograd.gradcheck(loss, leaves)


@pytest.mark.parametrize("dtype", [torch.float32, FP64])
def test_masked_slots_may_hold_anything(dtype: torch.dtype) -> None:
    x, mask = tokens(dtype), torch.rand(B, T) > 0.3
    options = {"mask": mask, "ent_coef": 0.1, "kl_coef": 0.1, "reduction": "seq-mean-token-sum"}
    want = run(x, **options)
    for junk in (float("nan"), float("inf"), -float("inf")):
        got = run({k: torch.where(mask, v, junk) for k, v in x.items()}, **options)
        close(got, want, {"rtol": 0, "atol": 0})
        assert all((g[~mask] == 0).all() for g in got[2:])


def test_nothing_to_train_is_zero() -> None:
    x = tokens(torch.float32)
    for reduction in reference.REDUCTIONS:
        got = run(x, mask=torch.zeros(B, T, dtype=torch.bool), reduction=reduction)
        assert all((g == 0).all() for g in got)
    empty = {k: v[:0] for k, v in x.items()}
    assert run(empty)[0] == 0


@pytest.mark.parametrize("reduction", reference.REDUCTIONS)
@pytest.mark.parametrize("size", [1, 3, 7])
def test_micro_batches_add_up(reduction: str, size: int) -> None:
    x, mask = tokens(torch.float32, rows=14), torch.rand(14, T) > 0.4
    options = {"reduction": reduction, "ent_coef": 0.1, "kl_coef": 0.2}
    n = mask.any(-1).sum() if reduction.startswith("seq") else mask.sum()
    if reduction == "sum":
        n = torch.tensor(1)
    whole = run(x, mask=mask, **options)
    loss, gradients = 0.0, []
    for i in range(0, 14, size):
        part = {k: v[i : i + size] for k, v in x.items()}
        got = run(part, mask=mask[i : i + size], normalizer=n, **options)
        loss, gradients = loss + got[0].double(), [*gradients, got[2:]]
    torch.testing.assert_close(loss, whole[0].double(), **tol.SPLIT)
    for got, want in zip(zip(*gradients), whole[2:]):
        torch.testing.assert_close(torch.cat(got), want, **tol.SPLIT)


def test_on_policy_is_exact() -> None:
    x = tokens(torch.float32)
    x["old_logprobs"] = x["logprobs"]
    stats = pk.ppo_loss(**x).stats
    assert stats.ratio_mean == 1 and stats.ratio_max == 1
    assert stats.clipfrac == 0 and stats.approx_kl == 0 and stats.policy_kl == 0


def test_bounds_clip_nothing_and_beyond_them_the_gradient_is_zero() -> None:
    # With cliprange 0 the ratio of equal log-probs lies on both bounds, exactly.
    for A in (1.0, -1.0):
        x = torch.tensor([[0.0, 1e-9 * A]], dtype=FP64, requires_grad=True)
        zero = torch.zeros(1, 2, dtype=FP64)
        out = pk.ppo_loss(x, zero, zero + A, cliprange=0.0, reduction="sum")
        out.loss.backward()
        assert x.grad[0].tolist() == [-A, 0.0]
        assert out.stats.clipfrac == 0.5
    for A, far in itertools.product((1.0, -1.0), (1e4, -1e4)):
        x = torch.full((1, 2), far, requires_grad=True)
        out = pk.ppo_loss(x, torch.zeros(1, 2), torch.full((1, 2), A), cliprange=0.2)
        out.loss.backward()
        assert out.loss.isfinite() and (x.grad == 0).all()


def test_backward_twice_scaled_and_retained() -> None:
    x = tokens(torch.float32)
    logp = x.pop("logprobs").bfloat16().requires_grad_()
    loss = pk.ppo_loss(logp, **x).loss
    (once,) = torch.autograd.grad(loss, logp, retain_graph=True)
    (twice,) = torch.autograd.grad(loss * 2, logp)
    assert once.dtype == torch.bfloat16
    torch.testing.assert_close(once * 2, twice, rtol=0, atol=0)
    with pytest.raises(RuntimeError):
        torch.autograd.grad(loss, logp)


def test_same_bits_whatever_the_threads() -> None:
    x, threads = tokens(torch.float32, rows=100), torch.get_num_threads()
    want = run(x, ent_coef=0.1)
    try:
        torch.set_num_threads(1)
        close(run(x, ent_coef=0.1), want, {"rtol": 0, "atol": 0})
    finally:
        torch.set_num_threads(threads)


def test_stats_have_names_and_copies() -> None:
    stats = pk.ppo_loss(**tokens()).stats
    assert stats.n == stats["n"] == B * T and list(stats.as_dict()) == list(reference.STAT_NAMES)
    for other in (copy.copy(stats), copy.deepcopy(stats), pickle.loads(pickle.dumps(stats))):
        assert torch.equal(other.tensor, stats.tensor)
    assert "clipfrac" in stats and "nothing" not in stats
    with pytest.raises(AttributeError, match="clipfrac"):
        _ = stats.nothing
    with pytest.raises(KeyError, match="clipfrac"):
        _ = stats["nothing"]
    assert "ratio_mean=" in repr(stats)


def test_opcheck_and_compile() -> None:
    x = {k: v[:, :8].contiguous() for k, v in tokens(torch.float32).items()}
    mask = torch.rand(B, 8) > 0.3

    def step(logp: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        out = pk.ppo_loss(**{**x, "logprobs": logp}, mask=mask, ent_coef=0.1)
        return out.loss * 2, out.stats.clipfrac

    logp = x["logprobs"].requires_grad_()
    want = step(logp, mask)
    (g,) = torch.autograd.grad(want[0], logp)
    torch._dynamo.reset()
    got = torch.compile(step, fullgraph=True, backend="aot_eager")(logp, mask)
    close((*got, *torch.autograd.grad(got[0], logp)), (*want, g), tol.FP32)
    from ppo_kernels.ops.loss import loss_terms

    options = {**pk.ppo_loss.__kwdefaults__, **x, "mask": mask}
    args = (x["logprobs"].detach(), x["entropy"], *loss_terms(options, logp))
    torch.library.opcheck(torch.ops.ppo_kernels.ppo_loss.default, (*args, True, True, True))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"policy_loss": "ppo"}, "policy_loss must be one of"),
        ({"reduction": "mean"}, "reduction must be one of"),
        ({"kl_penalty": "full"}, "kl_penalty must be one of"),
        ({"cliprange": -0.1}, "cliprange must be"),
        ({"cliprange_high": -0.1}, "cliprange_high must be"),
        ({"cliprange_value": -0.1}, "cliprange_value must be"),
        ({"dual_clip": 1.0}, "dual_clip must be"),
        ({"kl_coef": 0.1}, "needs ref_logprobs"),
        ({"ent_coef": 0.1}, "needs entropy"),
        ({"ent_coef": float("nan")}, "ent_coef must be a finite number"),
        ({"reduction": torch.ones(2)}, "reduction must be one of"),
        ({"values": torch.zeros(2, 3)}, "needs returns, old_values"),
        ({"mask": torch.ones(2, 2)}, "mask must have shape"),
        ({"normalizer": 0}, "normalizer must be"),
        ({"cu_seqlens": torch.tensor([0, 6])}, "must have shape"),
    ],
)
def test_bad_input(options: dict, message: str) -> None:
    x = torch.zeros(2, 3)
    with pytest.raises(ValueError, match=message):
        pk.ppo_loss(x, x, x, **options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_coefficient_of_0_leaves_an_infinite_term_out(dtype: torch.dtype) -> None:
    x, off = tokens(dtype), {"vf_coef": 0.0, "ent_coef": 0.0, "kl_coef": 0.0}
    want = run(x, **off, kl_penalty="k2")
    for name in ("ref_logprobs", "entropy", "returns"):
        x[name][1, 3] = -torch.inf
    got = run(x, **off, kl_penalty="k2")
    for a, b in zip((got[0], *got[2:]), (want[0], *want[2:])):
        assert a.isfinite().all() and torch.equal(a, b)
    for name in ("value_loss", "entropy", "kl_ref"):
        assert got[1][reference.STAT_NAMES.index(name)].isinf()
    assert reference.ppo_loss(**x, **off, kl_kind="k2")[0].isfinite()


def test_a_tensor_is_no_coefficient() -> None:
    x = torch.zeros(2, 3)
    for name in ("ent_coef", "kl_coef"):
        with pytest.raises(TypeError, match=f"{name} must be a number, got Tensor"):
            pk.ppo_loss(x, x, x, **{name: torch.ones(2)})


def logits_case(dtype: torch.dtype, V: int = 60) -> tuple[Tensor, Tensor, dict]:
    x, y = (3 * torch.randn(3, 7, V, dtype=FP64)).to(dtype), torch.randint(0, V, (3, 7))
    y[0, 1] = -100
    old = -3 + torch.randn(3, 7, dtype=FP64) / 2
    options = {
        "old_logprobs": old,
        "advantages": torch.randn(3, 7, dtype=FP64),
        "mask": torch.rand(3, 7) > 0.3,
        "ref_logprobs": old + 0.3,
        "kl_coef": 0.1,
        "ent_coef": 0.3,
        "reduction": "seq-mean-token-mean",
    }
    return x, y, options


@pytest.mark.parametrize("dtype", [FP64, torch.float32, torch.bfloat16, torch.float16])
def test_from_logits_is_the_two_functions(dtype: torch.dtype) -> None:
    x, y, options = logits_case(dtype)
    x[~options["mask"]] = float("nan")
    transform = {"temperature": 0.7, "softcap": 9.0}
    leaf = x.clone().requires_grad_()
    got = pk.ppo_loss_from_logits(leaf, y, **options, **transform)
    got.loss.backward()
    z = x.clone().requires_grad_()
    mask = options.pop("mask") & (y != -100)
    labels = torch.where(mask, y, -100)
    logp, H = pk.logprobs_from_logits(z, labels, return_entropy=True, **transform)
    want = pk.ppo_loss(logp, mask=mask, entropy=H, **options)
    want.loss.backward()
    assert (leaf.grad[~mask] == 0).all()
    torch.testing.assert_close(got.loss, want.loss, **tol.FP32)
    torch.testing.assert_close(got.stats.tensor, want.stats.tensor, **tol.FP32)
    tolerance = tol.BF16_OUT if dtype == torch.bfloat16 else tol.FP32
    torch.testing.assert_close(leaf.grad, z.grad, **tolerance)


def test_from_logits_in_place() -> None:
    x, y, options = logits_case(torch.float32)
    leaf = x.clone().requires_grad_()
    pk.ppo_loss_from_logits(leaf, y, **options).loss.backward()
    z = x.clone().requires_grad_()
    logits = z * 1
    loss = pk.ppo_loss_from_logits(logits, y, inplace_backward=True, **options).loss
    (g,) = torch.autograd.grad(loss * 2, z, retain_graph=True)
    torch.testing.assert_close(g, 2 * leaf.grad, **tol.FP32)
    assert torch.equal(logits, g)  # the gradient stands where the logits stood
    with pytest.raises(RuntimeError, match="inplace_backward=False"):
        torch.autograd.grad(loss, z)
    with pytest.raises(TypeError, match="unexpected keyword 'entropy'"):
        pk.ppo_loss_from_logits(x, y, **options, entropy=y)


@pytest.mark.parametrize("shape", [(), (5,), (2, 3), (1, 1, 1), (2, 2, 3), (2, 1, 3, 2)])
@pytest.mark.parametrize("inplace", [False, True])
def test_from_logits_takes_any_shape(shape: tuple[int, ...], inplace: bool) -> None:
    x = torch.randn(*shape, 5, requires_grad=True)
    values = torch.randn(shape, requires_grad=True)
    labels, advantages = torch.randint(5, shape), torch.randn(shape)
    old = torch.full(shape, -1.6)
    pk.ppo_loss_from_logits(
        x * 1, labels, old, advantages, values=values, returns=advantages, cliprange_value=None,
        inplace_backward=inplace,
    ).loss.backward()  # fmt: skip
    n = max(values.numel(), 1)
    close([values.grad], [0.1 * (values.detach() - advantages) / n], tol.FP32)
    other = x.detach().requires_grad_()
    logp = torch.log_softmax(other, -1).gather(-1, labels.unsqueeze(-1)).squeeze(-1)
    pk.ppo_loss(logp, old, advantages).loss.backward()
    close([x.grad], [other.grad], tol.FP32)


def test_no_tokens_with_a_strided_vocabulary() -> None:
    x = torch.zeros(0, 4, 3).permute(0, 2, 1).requires_grad_()
    labels, zero = torch.zeros(0, 3, dtype=torch.int64), torch.zeros(0, 3)
    for inplace in (False, True):
        loss = pk.ppo_loss_from_logits(x * 1, labels, zero, zero, inplace_backward=inplace).loss
        loss.backward()
        assert loss == 0 and x.grad.shape == (0, 3, 4)
    assert pk.logprobs_from_logits(x, labels).shape == (0, 3)
