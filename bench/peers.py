"""Other projects' functions behind one signature per op; each loader imports its package.

The `bench` extra installs those that come with their own dependencies. verl, OpenRLHF and PufferLib
pin versions of other packages and are added by hand, without them:

    pip install --no-deps verl openrlhf deepspeed pufferlib-core
    pip install ray omegaconf hydra-core codetiming hjson py-cpuinfo einops

quack-kernels and flash-attn are used where they are installed; rl-triton is not on PyPI.
"""

import importlib
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench.case import Unavailable

NAMES = ("trl", "liger", "cce", "torchrl", "verl", "openrlhf", "quack", "flash-attn", "pufferlib")
Loader = Callable[[torch.device], Callable[..., Any]]


def _from(module: str, name: str) -> Any:
    return getattr(importlib.import_module(module), name)


def _on_cuda(loader: Callable[[], Callable[..., Any]]) -> Loader:
    def load(device: torch.device) -> Callable[..., Any]:
        if device.type != "cuda":
            raise Unavailable("needs a CUDA device")
        return loader()

    return load


def _folder(package: str) -> Path:
    """Where a package lies whose __init__ imports more than its file used here needs."""
    spec = importlib.util.find_spec(package)
    if spec is None:
        raise ImportError(f"No module named '{package}'")
    return Path(next(iter(spec.submodule_search_locations)))


def _openrlhf(device: torch.device) -> Callable[..., Tensor]:
    file = _folder("openrlhf") / "models" / "utils.py"
    spec = importlib.util.spec_from_file_location("openrlhf_models_utils", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.log_probs_from_logits


# ------------------------------------------------- logits [N, V], labels [N] -> logprobs [N]


def _negative(function: Callable[..., Any], **options: Any) -> Callable[..., Tensor]:
    """Cross entropies are -logprob; some come in a tuple with other losses."""

    def run(*tensors: Tensor) -> Tensor:
        loss = function(*tensors, **options)
        return -(loss[0] if isinstance(loss, tuple) else loss)

    return run


def _liger() -> Callable[..., Tensor]:
    function = _from("liger_kernel.transformers.functional", "liger_cross_entropy")
    return _negative(function, reduction="none")


def _quack() -> Callable[..., Tensor]:
    function = _from("quack.cross_entropy", "cross_entropy")
    return _negative(function, reduction="none", inplace_backward=True)


def _flash_attn() -> Callable[..., Tensor]:
    function = _from("flash_attn.ops.triton.cross_entropy", "cross_entropy_loss")
    return _negative(function, inplace_backward=True)


LOGPROBS: dict[str, Loader] = {
    "trl": lambda device: _from("trl.trainer.utils", "selective_log_softmax"),
    "verl": lambda device: _from("verl.utils.torch_functional", "logprobs_from_logits"),
    "openrlhf": _openrlhf,
    "liger": _on_cuda(_liger),
    "quack": _on_cuda(_quack),
    "flash-attn": _on_cuda(_flash_attn),
}
# Their backward writes the gradient over the logits.
OVERWRITES_LOGITS = ("liger", "quack", "flash-attn")


# -------------------------------------- logits [N, V], labels [N] -> logprobs [N], entropy [N]


def _two_functions(module: str, logprobs: str, **options: Any) -> Loader:
    def load(device: torch.device) -> Callable[..., tuple[Tensor, Tensor]]:
        first, second = _from(module, logprobs), _from(module, "entropy_from_logits")
        return lambda logits, labels: (first(logits, labels, **options), second(logits))

    return load


ENTROPY: dict[str, Loader] = {
    "trl": _two_functions("trl.trainer.utils", "selective_log_softmax"),
    "verl": _two_functions(
        "verl.utils.torch_functional", "logprobs_from_logits", inplace_backward=False
    ),
}


# ------------- rewards, values, mask [B, T], gamma, lam -> {"advantages", "returns"} or either


def _verl_gae(device: torch.device) -> Callable[..., dict[str, Tensor]]:
    from verl.trainer.ppo.core_algos import compute_gae_advantage_return

    def run(
        r: Tensor, v: Tensor, mask: Tensor | None, gamma: float, lam: float
    ) -> dict[str, Tensor]:
        # Its advantages come whitened, so that only the returns can be compared.
        mask = torch.ones_like(v) if mask is None else mask.float()
        return {"returns": compute_gae_advantage_return(r, v, mask, gamma, lam)[1]}

    return run


def _torchrl_gae(device: torch.device) -> Callable[..., dict[str, Tensor]]:
    from torchrl.objectives.value.functional import vec_generalized_advantage_estimate

    def run(
        r: Tensor, v: Tensor, mask: Tensor | None, gamma: float, lam: float
    ) -> dict[str, Tensor]:
        done = torch.zeros_like(v, dtype=torch.bool)
        if mask is None:
            done[:, -1] = True
        else:
            # It knows no mask: the valid tokens are moved to the left, each row ends in `done`.
            order = torch.argsort(~mask, dim=1, stable=True)
            valid = mask.gather(1, order)
            r, v = (torch.where(valid, x.gather(1, order), 0) for x in (r, v))
            done.scatter_(1, mask.sum(1, keepdim=True).sub(1).clamp(min=0), True)
        following = torch.cat([v[:, 1:], torch.zeros_like(v[:, :1])], dim=1)
        columns = (x.unsqueeze(-1) for x in (v, following, r, done))
        found = vec_generalized_advantage_estimate(gamma, lam, *columns, time_dim=-2)
        found = [x[..., 0] for x in found]
        if mask is not None:
            back = torch.argsort(order, dim=1)
            found = [x.gather(1, back) for x in found]
        return dict(zip(("advantages", "returns"), found))

    return run


GAE: dict[str, Loader] = {"verl": _verl_gae, "torchrl": _torchrl_gae}


def pufferlib_gae(device: torch.device, gamma: float, lam: float) -> Callable[..., Any]:
    """Built from the sources that its wheel carries: the binary beside them fits one torch only."""
    from torch.utils import cpp_extension

    folder = _folder("pufferlib") / "extensions"
    files = ["pufferlib.cpp"] + (["cuda/advantage.cu"] if device.type == "cuda" else [])
    cpp_extension.load(
        "pufferlib_advantage",
        [str(folder / f) for f in files],
        extra_cflags=["-O3"],
        extra_cuda_cflags=["-O3"],
        is_python_module=False,
    )

    def run(x: dict[str, Tensor]) -> dict[str, Tensor]:
        advantages = torch.zeros_like(x["values"])
        torch.ops.pufferlib.compute_puff_advantage(
            x["values"], x["rewards"], x["dones"], x["ratio"], advantages, gamma, lam, 1.0, 1.0
        )
        return {"advantages": advantages[:, :-1]}

    return run


def pufferlib_layout(x: dict[str, Tensor]) -> dict[str, Tensor]:
    """Its buffers: the reward at t+1 belongs to the step from t, a last column is no step."""
    values = torch.nn.functional.pad(x["values"], (0, 1))
    rewards = torch.nn.functional.pad(x["rewards"], (1, 0))
    dones, ratio = torch.zeros_like(values), torch.ones_like(values)
    return {"values": values, "rewards": rewards, "dones": dones, "ratio": ratio}


# ---------------------------------------- inputs of bench.cases.loss -> the whole loss, a scalar


def _verl_loss(device: torch.device) -> Callable[..., Tensor]:
    from verl.trainer.ppo import core_algos as verl

    def run(x: dict[str, Tensor], c: dict[str, float]) -> Tensor:
        mask = x["mask"].float()
        policy, *_ = verl.compute_policy_loss(
            x["old_logprobs"], x["logprobs"], x["advantages"], mask, cliprange=c["cliprange"]
        )
        value, _ = verl.compute_value_loss(
            x["values"], x["returns"], x["old_values"], mask, c["cliprange_value"]
        )
        kl = verl.kl_penalty(x["logprobs"], x["ref_logprobs"], "low_var_kl")
        entropy, kl = (verl.agg_loss(t, mask, "token-mean") for t in (x["entropy"], kl))
        return policy + c["vf_coef"] * value - c["ent_coef"] * entropy + c["kl_coef"] * kl

    return run


LOSS: dict[str, Loader] = {"verl": _verl_loss}


# -------------------------------- hidden [N, H], weight [V, H], labels [N] -> logprobs [N]


def _cce_hidden(device: torch.device) -> Callable[..., Tensor]:
    impl = "cce" if device.type == "cuda" else "torch_compile"
    return _negative(
        _from("cut_cross_entropy", "linear_cross_entropy"), reduction="none", impl=impl
    )


def _verl_hidden(device: torch.device) -> Callable[..., Tensor]:
    fused = _from("verl.utils.experimental.torch_functional", "FusedLinearForPPO")()
    return lambda hidden, weight, labels: fused(hidden[None], weight, labels[None])[0][0]


HIDDEN: dict[str, Loader] = {
    "liger": lambda device: _negative(
        _from(
            "liger_kernel.ops.fused_linear_scaled_cross_entropy",
            "LigerFusedLinearScaledCrossEntropyFunction",
        ).apply
    ),
    "cce": _cce_hidden,
    "verl": _verl_hidden,
}


def liger_chunked_loss(device: torch.device) -> Callable[..., Tensor]:
    """Liger's chunked GRPO loss; with one advantage per sequence it is the clipped PPO loss."""
    options = {"beta": 0.0, "use_ref_model": False, "loss_type": "bnpo"}
    loss = _from("liger_kernel.chunked_loss", "LigerFusedLinearGRPOLoss")(
        **options, compiled=device.type == "cuda"
    )

    def run(
        hidden: Tensor, weight: Tensor, labels: Tensor, old: Tensor, adv: Tensor, mask: Tensor
    ) -> Tensor:
        return loss(hidden, weight, labels, mask.float(), adv[:, 0], old_per_token_logps=old)[0]

    return run
