"""The seven-token example of the mission's second source document, as literals.

The numbers were computed once in fp64 outside this package and printed with 12 decimals.
"""

import pytest
import torch
from tolerances import LITERAL

import ppo_kernels as pk

DOUBLE = {"dtype": torch.float64}
PI = torch.tensor([[0.6, 0.8, 0.9, 0.7, 0.95, 0.8, 0.99]], **DOUBLE)
REF = torch.tensor([[0.5, 0.7, 0.9, 0.8, 0.9, 0.75, 0.95]], **DOUBLE)
V = torch.tensor([[2.1, 2.3, 2.5, 2.6, 2.7, 2.8, 2.9]], **DOUBLE)
SCORE = torch.tensor([3.0], **DOUBLE)
MASK = torch.ones(1, 7, dtype=torch.bool)

K2 = "0.016620575036 0.008915316408 0 0.008915316408 0.001461632208 0.002082610355 0.000850490814"
K3 = "0.015654890127 0.008531392625 0 0.009325750233 0.001435642323 0.002038521138 0.000838918130"
A_TERMINAL = (
    "0.794732170931 0.626033864138 0.448456699093 0.366796525361 "
    "0.280838447748 0.190356260788 0.095111853461"
)
A_TERMINAL_99 = (
    "0.642176937996 0.494605994679 0.339825619011 0.282642869761 "
    "0.222905762638 0.160452698180 0.095111853461"
)
A_TERMINAL_WHITE = (
    "1.606872782348 0.919558434018 0.196069646302 -0.136632027829 "
    "-0.486844316388 -0.855488830660 -1.243535687789"
)
A_TOKEN = (
    "0.766427004469 0.615430694893 0.451351404374 0.369843583552 "
    "0.269989941357 0.184628066826 0.095875704147"
)
A_TOKEN_99 = (
    "0.614044008000 0.484078855587 0.342830403880 0.285837750005 "
    "0.212104849275 0.154717247636 0.095875704147"
)
A_TOKEN_WHITE = (
    "1.567878832161 0.933284220533 0.243705555099 -0.098848670529 "
    "-0.518505173831 -0.877256892786 -1.250257870647"
)
A_BOOTSTRAP = (
    "2.934948081813 2.898084460518 2.854144841874 2.899099833552 "
    "2.932364941357 2.987128066826 3.045875704147"
)
A_HOLE = "0.792748284096 0.643137305027 0 0 0.269989941357 0.184628066826 0.095875704147"


def row(numbers: str) -> torch.Tensor:
    return torch.tensor([[float(x) for x in numbers.split()]], **DOUBLE)


def close(got: torch.Tensor, want: torch.Tensor) -> None:
    torch.testing.assert_close(got, want, **LITERAL)


def rewards(placement: str, mask: torch.Tensor = MASK) -> torch.Tensor:
    return pk.compute_rewards(SCORE, PI.log(), REF.log(), mask, kl_coef=0.1, kl_placement=placement)


@pytest.mark.parametrize(("kind", "numbers"), [("k2", K2), ("k3", K3)])
def test_kl_estimators(kind: str, numbers: str) -> None:
    close(pk.kl_penalty(PI.log(), REF.log(), kind), row(numbers))


def test_kl_k1_mean() -> None:
    kl = pk.kl_penalty(PI.log(), REF.log(), "k1")
    close(pk.masked_mean(kl, MASK), torch.tensor(0.048881465390836, **DOUBLE))


def test_total_reward() -> None:
    total = rewards("terminal_mean")
    close(total[0, -1], torch.tensor(2.995111853460916, **DOUBLE))
    assert (total[0, :-1] == 0).all()
    close(rewards("token").sum(), torch.tensor(2.965782974226, **DOUBLE))


@pytest.mark.parametrize(
    ("placement", "gamma", "numbers"),
    [
        ("terminal_mean", 1.0, A_TERMINAL),
        ("terminal_mean", 0.99, A_TERMINAL_99),
        ("token", 1.0, A_TOKEN),
        ("token", 0.99, A_TOKEN_99),
    ],
)
def test_advantages_and_returns(placement: str, gamma: float, numbers: str) -> None:
    out = pk.gae(rewards(placement), V, MASK, gamma=gamma, lam=0.95)
    close(out.advantages, row(numbers))
    close(out.returns, row(numbers) + V)


@pytest.mark.parametrize(
    ("placement", "numbers"), [("terminal_mean", A_TERMINAL_WHITE), ("token", A_TOKEN_WHITE)]
)
def test_whitened(placement: str, numbers: str) -> None:
    # The literals leave out the eps of 1e-8 inside the root, worth 1e-8 / (2 var) = 1e-7 relative.
    out = pk.gae(rewards(placement), V, MASK)
    white = pk.masked_whiten(out.advantages, MASK, stats=out.stats)
    torch.testing.assert_close(white, row(numbers), rtol=2e-7, atol=1e-12)


def test_fused_shaping_is_the_same() -> None:
    out = pk.gae(None, V, scores=SCORE, logprobs=PI.log(), ref_logprobs=REF.log(), kl_coef=0.1)
    close(out.advantages, row(A_TOKEN))


def test_truncated_with_bootstrap() -> None:
    boot = torch.tensor([2.95], **DOUBLE)
    close(pk.gae(rewards("token"), V, MASK, bootstrap=boot).advantages, row(A_BOOTSTRAP))


def test_interior_hole_is_no_transition() -> None:
    mask = torch.tensor([[1, 1, 0, 0, 1, 1, 1]]).bool()
    close(pk.gae(rewards("token", mask), V, mask).advantages, row(A_HOLE))


NEW_PI = torch.tensor([[0.75, 0.6, 0.9, 0.7, 0.5, 0.96, 0.99]], **DOUBLE)
NEW_V = torch.tensor([[2.5, 2.35, 2.6, 2.9, 2.65, 2.8, 3.2]], **DOUBLE)


@pytest.mark.parametrize(
    ("options", "loss", "clipfrac"),
    [
        ({}, -0.001214909644, 2 / 7),
        ({"cliprange_high": 0.28}, -0.012414044159, 1 / 7),
        ({"dual_clip": 3.0}, -0.001214909644, 2 / 7),
    ],
)
def test_policy_loss(options: dict, loss: float, clipfrac: float) -> None:
    out = pk.ppo_loss(NEW_PI.log(), PI.log(), row(A_TOKEN_WHITE), MASK, **options)
    close(out.loss, torch.tensor(loss, **DOUBLE))
    close(out.stats.clipfrac, torch.tensor(clipfrac, **DOUBLE))
    close(out.stats.policy_kl, torch.tensor(0.074867264359, **DOUBLE))
    close(out.stats.approx_kl, torch.tensor(0.035769519999, **DOUBLE))


def test_value_loss() -> None:
    returns = row(A_TOKEN) + V
    out = pk.ppo_loss(
        NEW_PI.log(),
        PI.log(),
        row(A_TOKEN_WHITE),
        MASK,
        values=NEW_V,
        old_values=V,
        returns=returns,
        vf_coef=1.0,
    )
    close(out.stats.value_loss, torch.tensor(0.069356706295, **DOUBLE))
    close(out.stats.clipfrac_value, torch.tensor(2 / 7, **DOUBLE))
    close(out.loss, torch.tensor(-0.001214909644 + 0.069356706295, **DOUBLE))
