"""PPOConfig, KL controllers, running moments. Numbers: items of the trainer's acceptance list."""

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
import tolerances as tol

from ppo_kernels.trainer import AdaptiveKLController, FixedKLController, PPOConfig, RunningMoments


@pytest.mark.parametrize("kl, factor", [(9.0, 1.02), (6.6, 1.01), (6.0, 1.0), (0.0, 0.98)])
def test_31_adaptive_kl_is_ziegler_s_formula(kl: float, factor: float) -> None:
    control = AdaptiveKLController(0.2, target=6.0, horizon=1000)
    control.update(kl, 100)
    assert control.value == pytest.approx(0.2 * factor, rel=1e-12)


def test_31_adaptive_kl_stays_positive_when_n_exceeds_the_horizon() -> None:
    control = AdaptiveKLController(0.2, target=6.0, horizon=10)
    for _ in range(5):
        control.update(0.0, 1000)
    assert control.value > 0


def test_31_nan_changes_nothing() -> None:
    control = AdaptiveKLController(0.2, 6.0, 10_000)
    control.update(-1.0, 8)
    before = control.value
    control.update(math.nan, 8)
    assert control.value == before
    other = AdaptiveKLController(0.5, 6.0, 10_000)
    other.load_state_dict(control.state_dict())
    assert other.value == before


def test_31_fixed_kl_stays() -> None:
    control = FixedKLController(0.07)
    control.update(100.0, 64)
    assert control.value == 0.07


def test_14_running_moments_equal_those_of_all_scores_at_once() -> None:
    scores = np.random.default_rng(0).normal(3.0, 2.0, size=40)
    moments = RunningMoments()
    for part in np.split(scores, [7, 8, 25]):
        moments.update(part.tolist())
    assert moments.mean == pytest.approx(scores.mean(), rel=tol.FP64["rtol"])
    assert moments.std == pytest.approx(scores.std(ddof=1), rel=tol.FP64["rtol"])
    copy = RunningMoments()
    copy.load_state_dict(moments.state_dict())
    assert (copy.mean, copy.std, copy.count) == (moments.mean, moments.std, 40)


@pytest.mark.parametrize("scores", [[], [0.3], [0.3] * 5, [1e4 + 0.1] * 7])
def test_14_one_score_or_equal_scores_scale_nothing(scores: list[float]) -> None:
    moments = RunningMoments()
    moments.update(scores)
    assert moments.std == 1.0


def test_mini_batch_size_follows_batch_size_until_it_is_given() -> None:
    config = PPOConfig()
    assert (config.mini_batch_size, config.minibatch) == (None, 32)
    assert dataclasses.replace(config, batch_size=16).minibatch == 16
    assert PPOConfig(mini_batch_size=8).minibatch == 8


BAD: list[tuple[dict[str, Any], str]] = [
    ({"batch_size": 0}, "batch_size must be a finite number >= 1, got 0$"),
    ({"batch_size": 2.0}, "batch_size must be an integer"),
    ({"batch_size": "64"}, "batch_size must be an integer, got '64'"),
    ({"seed": 2**63}, "seed must be a finite number >= 0 and <= 4.29"),
    ({"batch_size": 4, "mini_batch_size": 8}, "mini_batch_size must be <= batch_size = 4, got 8"),
    ({"micro_batch_size": 64}, "micro_batch_size must be <= mini_batch_size = 32"),
    ({"ppo_epochs": True}, "ppo_epochs must be an integer"),
    ({"learning_rate": -1e-5}, "learning_rate"),
    ({"learning_rate": "1e-5"}, "learning_rate must be a number, got str"),
    ({"gamma": 1.1}, "gamma"),
    ({"lam": math.nan}, "lam"),
    ({"target": 0}, "target"),
    ({"temperature": 0.0}, "temperature"),
    ({"cliprange_high": -0.1}, "cliprange_high"),
    ({"dual_clip": 1.0}, "dual_clip"),
    ({"max_grad_norm": 0}, "max_grad_norm"),
    ({"ratio_threshold": 0}, "ratio_threshold"),
    ({"kl_penalty": "k4"}, "kl_penalty must be one of"),
    ({"kl_unit": "batch"}, "kl_unit"),
    ({"loss_agg_mode": "mean"}, "loss_agg_mode"),
    ({"shuffle": 1}, "shuffle must be True or False"),
    ({"use_score_norm": True}, "use_score_norm=True needs use_score_scaling"),
    ({"loss_agg_mode": "constant-divisor"}, "loss_divisor"),
    ({"loss_divisor": 64}, "loss_divisor"),
    ({"kl_loss_coef": 0.1}, "kl_loss_coef=0.1 .*init_kl_coef"),
    ({"kl_penalty": "full", "kl_placement": "terminal_mean"}, "kl_penalty='full'"),
]


@pytest.mark.parametrize("fields, message", BAD, ids=str)
def test_39_a_bad_field_is_named_when_the_config_is_made(
    fields: dict[str, Any], message: str
) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        PPOConfig(**fields)


def test_39_an_unknown_field_is_named() -> None:
    with pytest.raises(TypeError, match="gae_lambda"):
        PPOConfig(gae_lambda=0.9)
    config = PPOConfig(lam=0.9, batch_size=64)
    assert PPOConfig(**dataclasses.asdict(config)) == config


def test_19_defaults() -> None:
    config = PPOConfig()
    assert (config.gamma, config.lam, config.vf_coef, config.cliprange) == (1.0, 0.95, 0.1, 0.2)
