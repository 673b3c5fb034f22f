"""torchrl's vectorised GAE by the name and signature it has in torchrl 0.14, on the scan kernel.

torchrl's `GAE` looks it up in the module where `GAE` is defined:

    import torchrl.objectives.value.advantages as theirs
    from ppo_kernels.integrations import torchrl as fused
    theirs.vec_generalized_advantage_estimate = fused.vec_generalized_advantage_estimate
"""

import torch
from torch import Tensor

from ppo_kernels.ops.gae import gae as _gae
from ppo_kernels.reference import upcast

__all__ = ["vec_generalized_advantage_estimate"]


def vec_generalized_advantage_estimate(
    gamma: float | Tensor,
    lmbda: float | Tensor,
    state_value: Tensor,
    next_state_value: Tensor,
    reward: Tensor,
    done: Tensor,
    terminated: Tensor | None = None,
    *,
    time_dim: int = -2,
) -> tuple[Tensor, Tensor]:
    """(advantages, value targets) of [.., T, F] tensors with time at `time_dim`.

    An episode ends after t where `done[t]`; it bootstraps from `next_state_value[t]` unless
    `terminated[t]`. gamma and lmbda are numbers for all tokens; as 0-d tensors they are read by
    the host.
    """
    terminated = done if terminated is None else terminated

    def rows(x: Tensor) -> Tensor:
        return x.movedim(time_dim, -1).flatten(0, -2)

    values, after = rows(state_value), rows(next_state_value)
    term = rows(terminated).bool()
    cut = rows(done).bool() & ~term
    cut[:, -1:] = ~term[:, -1:]
    # The op takes the value after t from t + 1: what another network says beyond that is a reward.
    beyond = torch.where(term | cut, 0, upcast(after) - upcast(values).roll(-1, -1))
    out = _gae(
        upcast(rows(reward)) + float(gamma) * beyond,
        values,
        gamma=float(gamma),
        lam=float(lmbda),
        bootstrap=after,
        terminated=term,
        truncated=cut,
    )
    moved = state_value.movedim(time_dim, -1).shape
    return tuple(x.reshape(moved).movedim(-1, time_dim) for x in (out.advantages, out.returns))
