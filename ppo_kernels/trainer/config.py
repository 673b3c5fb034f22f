"""PPOConfig: every setting of the trainer, validated when it is made."""

import dataclasses
from dataclasses import dataclass
from typing import Any

from ppo_kernels.ops._checks import choice, number

KL_KINDS = {
    **{"kl": "k1", "k1": "k1", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3"},
    **{"abs": "abs", "full": "full"},
}
AGG_MODES = ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "constant-divisor")
# What other trainers call it -> what it is called here.
RENAMED = {
    "forward_batch_size": "micro_batch_size",
    "gradient_accumulation_steps": "mini_batch_size (one optimizer step) and micro_batch_size",
    "num_mini_batches": "mini_batch_size",
    "num_ppo_epochs": "ppo_epochs",
    "kl_coef": "init_kl_coef, with adap_kl_ctrl=False",
    "kl_estimator": "kl_penalty",
    "clip_ratio_low": "cliprange",
    "clip_ratio_high": "cliprange_high",
    "clip_ratio_c": "dual_clip",
    "lambd": "lam",
    "gae_lambda": "lam",
    "eps_clip": "cliprange",
    "clip_range": "cliprange",
}


@dataclass
class PPOConfig:
    """Settings of PPOTrainer; "TRL" below is TRL 0.7.1, where most names and defaults come from.

    Batches (sizes count responses of one process)
      batch_size 128: the most responses one step takes, and what dataloader and train() give.
      mini_batch_size 32: responses per optimizer step; the last one of an epoch may be smaller.
      micro_batch_size None: responses per forward, for memory only. None: mini_batch_size.
      ppo_epochs 4: passes over the batch (TRL). shuffle True: a new order in each.
      steps None: how many steps train() makes. seed 0: shuffling and sampling, offset per rank.
    Optimiser
      learning_rate 1e-5: Adam without decay (TRL). value_learning_rate None: of the value
      parameters; None: the same. max_grad_norm 1.0: None does not clip (TRL's own default).
      critic_warmup_steps 0: first steps in which policy parameters stay as they are (verl).
      bf16 False: forwards under bfloat16 autocast. disable_dropout True: ratios start at 1.
    KL to the reference
      kl_penalty "kl": estimator in the reward; kl|k1, mse|k2, low_var_kl|k3, abs, or full (the
      sum over the vocabulary). kl_placement "token": at each action; or "terminal_mean".
      init_kl_coef 0.2, adap_kl_ctrl True, target 6.0, horizon 10000: the controller (TRL; Ziegler
      et al. 2019). kl_unit "sequence": target is in nats per response (TRL), or "token" (verl).
      kl_loss_coef 0.0: KL in the loss (k3 value, k2 gradient) instead of in the reward.
    GAE, rewards and scores
      gamma 1.0, lam 0.95. bootstrap_truncated False: V after the last action of a truncated
      response instead of 0. whiten_rewards False (TRL 0.7.3), whiten_advantages True.
      use_score_scaling False, use_score_norm False: divide by the running std, subtract the
      running mean first (TRL). score_clip None: then clip to [-c, c]. missing_eos_penalty None:
      then subtract it from responses without EOS (TRL 0.12).
    Loss
      cliprange 0.2, cliprange_high None (DAPO; None: cliprange), dual_clip None (Ye et al. 2020),
      cliprange_value 0.2 (None: off), vf_coef 0.1, ent_coef 0.0, ptx_coef 0.0 (InstructGPT: 27.8).
      loss_agg_mode "token-mean": over the tokens of the minibatch on all ranks; or
      "seq-mean-token-mean", "seq-mean-token-sum", "constant-divisor" (sum / loss_divisor, Dr.GRPO).
      rollout_is_cap None: truncated importance weights exp(old - rollout_logprobs), capped here.
    Guards
      ratio_threshold 10.0: a minibatch whose mean ratio exceeds it is skipped (TRL). None: off.
      early_stopping False, target_kl 0.1: leave the epochs, before stepping, once
      KL(old || new) > 1.5 target_kl.
    Sampling
      temperature 1.0: divides the logits of generate, policy and reference alike.
      min_new_tokens 0: EOS cannot be chosen before so many tokens; in all three again.
    """

    batch_size: int = 128
    mini_batch_size: int = 32
    micro_batch_size: int | None = None
    ppo_epochs: int = 4
    shuffle: bool = True
    steps: int | None = None
    seed: int = 0
    learning_rate: float = 1e-5
    value_learning_rate: float | None = None
    max_grad_norm: float | None = 1.0
    critic_warmup_steps: int = 0
    bf16: bool = False
    disable_dropout: bool = True
    kl_penalty: str = "kl"
    kl_placement: str = "token"
    init_kl_coef: float = 0.2
    adap_kl_ctrl: bool = True
    target: float = 6.0
    horizon: float = 10_000
    kl_unit: str = "sequence"
    kl_loss_coef: float = 0.0
    gamma: float = 1.0
    lam: float = 0.95
    bootstrap_truncated: bool = False
    whiten_rewards: bool = False
    whiten_advantages: bool = True
    use_score_scaling: bool = False
    use_score_norm: bool = False
    score_clip: float | None = None
    missing_eos_penalty: float | None = None
    cliprange: float = 0.2
    cliprange_high: float | None = None
    dual_clip: float | None = None
    cliprange_value: float | None = 0.2
    vf_coef: float = 0.1
    ent_coef: float = 0.0
    ptx_coef: float = 0.0
    loss_agg_mode: str = "token-mean"
    loss_divisor: float | None = None
    rollout_is_cap: float | None = None
    ratio_threshold: float | None = 10.0
    early_stopping: bool = False
    target_kl: float = 0.1
    temperature: float = 1.0
    min_new_tokens: int = 0

    def __post_init__(self) -> None:
        for name in ("batch_size", "mini_batch_size", "ppo_epochs"):
            self._integer(name, 1)
        for name in ("micro_batch_size", "steps"):
            self._integer(name, 1, optional=True)
        for name in ("critic_warmup_steps", "min_new_tokens", "seed"):
            self._integer(name, 0)
        for field in dataclasses.fields(self):
            if field.type is bool and not isinstance(getattr(self, field.name), bool):
                got = getattr(self, field.name)
                raise TypeError(f"{field.name} must be True or False, got {got!r}")
        for name in ("gamma", "lam"):
            number(name, getattr(self, name), 0, 1)
        for name in ("learning_rate", "init_kl_coef", "kl_loss_coef", "cliprange", "vf_coef"):
            number(name, getattr(self, name), 0)
        for name in ("ent_coef", "ptx_coef"):
            number(name, getattr(self, name), 0)
        for name in ("target", "horizon", "target_kl", "temperature"):
            number(name, getattr(self, name), 0, above=True)
        for name in ("value_learning_rate", "cliprange_high", "missing_eos_penalty"):
            self._optional(name, 0)
        for name in ("max_grad_norm", "score_clip", "cliprange_value", "loss_divisor"):
            self._optional(name, 0, above=True)
        for name in ("rollout_is_cap", "ratio_threshold"):
            self._optional(name, 0, above=True)
        self._optional("dual_clip", 1, above=True)
        choice("kl_penalty", self.kl_penalty, tuple(KL_KINDS))
        choice("kl_placement", self.kl_placement, ("token", "terminal_mean"))
        choice("kl_unit", self.kl_unit, ("sequence", "token"))
        choice("loss_agg_mode", self.loss_agg_mode, AGG_MODES)
        self._check_consistent()

    def _integer(self, name: str, low: int, optional: bool = False) -> None:
        value = getattr(self, name)
        if value is None and optional:
            return
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"{name} must be an integer, got {value!r}")
        if value < low:
            raise ValueError(f"{name} must be >= {low}, got {value}")

    def _optional(self, name: str, low: float, above: bool = False) -> None:
        if getattr(self, name) is not None:
            number(name, getattr(self, name), low, above=above)

    def _check_consistent(self) -> None:
        if self.mini_batch_size > self.batch_size:
            raise ValueError(
                f"mini_batch_size must be <= batch_size = {self.batch_size}, "
                f"got {self.mini_batch_size}"
            )
        if self.micro_batch_size is not None and self.micro_batch_size > self.mini_batch_size:
            raise ValueError(
                f"micro_batch_size must be <= mini_batch_size = {self.mini_batch_size}, "
                f"got {self.micro_batch_size}"
            )
        if self.use_score_norm and not self.use_score_scaling:
            raise ValueError("use_score_norm=True needs use_score_scaling=True, got False")
        if (self.loss_agg_mode == "constant-divisor") != (self.loss_divisor is not None):
            raise ValueError(
                "loss_divisor goes with loss_agg_mode='constant-divisor' and only with it, got "
                f"loss_divisor={self.loss_divisor} and loss_agg_mode={self.loss_agg_mode!r}"
            )
        if self.kl_loss_coef and self.init_kl_coef:
            raise ValueError(
                f"kl_loss_coef={self.kl_loss_coef} puts the KL into the loss and init_kl_coef="
                f"{self.init_kl_coef} into the reward: set one of them to 0"
            )
        if self.kl_penalty == "full" and self.kl_placement != "token":
            raise ValueError("kl_penalty='full' needs kl_placement='token'")

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> "PPOConfig":
        """PPOConfig(**fields); an unknown field is named, with its name here if it has one."""
        known = {f.name for f in dataclasses.fields(cls)}
        for name in fields:
            if name not in known:
                hint = f"; here it is {RENAMED[name]}" if name in RENAMED else ""
                raise ValueError(f"PPOConfig has no field {name!r}{hint}")
        return cls(**fields)
