"""What the trainer learns besides weights: the KL coefficient, and the scale of the scores."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ppo_kernels.ops._checks import number

# Below this std scores are constant up to rounding, and dividing by it would only amplify that.
MIN_STD = 1e-8


class FixedKLController:
    """beta stays what it is."""

    def __init__(self, kl_coef: float) -> None:
        self.value = number("kl_coef", kl_coef, 0)

    def update(self, current: float, n_steps: int) -> None:
        """Nothing to do."""

    def state_dict(self) -> dict[str, float]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.value = float(state["value"])


class AdaptiveKLController(FixedKLController):
    """`beta *= max(1 + clip(kl / target - 1, -0.2, 0.2) n / horizon, 0.1)`.

    Ziegler et al. 2019, section 2.2; TRL without the last max, so that its factor is zero or
    negative from n = 5 horizon on. kl must have the unit of target: nats per response (the sum over
    its tokens) or nats per token. n: responses on all ranks.
    """

    def __init__(self, init_kl_coef: float, target: float, horizon: float) -> None:
        self.value = number("init_kl_coef", init_kl_coef, 0)
        self.target = number("target", target, 0, above=True)
        self.horizon = number("horizon", horizon, 0, above=True)

    def update(self, current: float, n_steps: int) -> None:
        """Take in the mean KL of n_steps responses; a value that is not finite changes nothing."""
        if not math.isfinite(current):
            return
        error = min(max(current / self.target - 1, -0.2), 0.2)
        self.value *= max(1 + error * n_steps / self.horizon, 0.1)


@dataclass
class RunningMoments:
    """Mean and unbiased std of every score seen, in fp64 (Chan's parallel update, as in TRL)."""

    count: float = 0.0
    mean: float = 0.0
    m2: float = 0.0  # sum of squared deviations from the mean

    def update(self, scores: Tensor | Sequence[float]) -> None:
        """Take in a batch."""
        x = torch.as_tensor(scores, dtype=torch.float64)
        if x.numel():
            total, delta = self.count + x.numel(), float(x.mean()) - self.mean
            m2 = float(((x - x.mean()) ** 2).sum())
            self.m2 += m2 + delta**2 * self.count * x.numel() / total
            self.mean += delta * x.numel() / total
            self.count = total

    @property
    def std(self) -> float:
        """Unbiased; 1.0, which scales nothing, while there are fewer than two different scores."""
        std = math.sqrt(self.m2 / max(self.count - 1, 1))
        return std if std > MIN_STD else 1.0

    def state_dict(self) -> dict[str, float]:
        return vars(self).copy()

    def load_state_dict(self, state: dict[str, float]) -> None:
        vars(self).update(state)
