"""PPOConfig: every setting of the trainer, validated when it is made."""

import dataclasses
from dataclasses import dataclass
from typing import Any

from ppo_kernels.ops._checks import choice, number

# Names of the reward's KL estimators, TRL's first -> those of ppo_kernels.kl_penalty.
KL_KINDS = {"kl": "k1", "mse": "k2", "low_var_kl": "k3", "abs": "abs", "full": "full"}
KL_KINDS |= {"k1": "k1", "k2": "k2", "k3": "k3"}
AGG_MODES = ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "constant-divisor")
CHOICES = {"kl_penalty": tuple(KL_KINDS), "kl_placement": ("token", "terminal_mean")}
CHOICES |= {"kl_unit": ("sequence", "token"), "loss_agg_mode": AGG_MODES}
# Numbers are finite and >= 0, integers >= 1, but for these: (low, high, low itself excluded).
RANGES = {"gamma": (0, 1), "lam": (0, 1), "dual_clip": (1, None, True)}
RANGES |= {"critic_warmup_steps": (0,), "seed": (0, 2**32 - 1)}
POSITIVE = "target horizon target_kl temperature max_grad_norm score_clip cliprange_value"
POSITIVE += " loss_divisor rollout_is_cap ratio_threshold"
RANGES |= dict.fromkeys(POSITIVE.split(), (0, None, True))


@dataclass
class PPOConfig:
    """Settings of PPOTrainer. Names and defaults are TRL 0.7.1's unless a comment names another
    source; "(own)" is of no other project. Each field's comment explains it.

    Batch sizes count responses on one rank. A field that may be None is off when it is.
    """

    # Batches
    batch_size: int = 128  # most responses per step; what dataloader and train() give (TRL: 256)
    mini_batch_size: int | None = None  # responses per optimizer step; None: at most 32 (TRL: 1)
    micro_batch_size: int | None = None  # responses per forward, for memory; None: mini_batch_size
    ppo_epochs: int = 4  # passes over a batch
    shuffle: bool = True  # a new order of rows in each pass
    steps: int | None = None  # steps that train() makes in all (TRL: 20000)
    seed: int = 0  # of shuffling and sampling, offset by rank
    # Optimiser
    learning_rate: float = 1e-5  # of Adam without weight decay
    value_learning_rate: float | None = None  # of value parameters; None: learning_rate (own)
    max_grad_norm: float | None = 1.0  # joint norm of all gradients (TRL: None)
    critic_warmup_steps: int = 0  # first steps that leave the policy's parameters alone (verl)
    bf16: bool = False  # forwards under bfloat16 autocast (own)
    disable_dropout: bool = True  # so that ratios start at 1 (Huang et al. 2024)
    # KL to the reference
    kl_penalty: str = "kl"  # in the reward: kl=k1, mse=k2, low_var_kl=k3, abs, full (over V)
    kl_placement: str = "token"  # or "terminal_mean": its mean on the last action (own)
    init_kl_coef: float = 0.2  # weight of the KL in the reward; where an adaptive one starts
    adap_kl_ctrl: bool = True  # steer that weight towards target (Ziegler et al. 2019)
    target: float = 6.0  # of the mean KL, in kl_unit
    horizon: float = 10_000  # responses in which the weight moves by the KL's relative error
    kl_unit: str = "sequence"  # nats per response; or "token" (verl)
    kl_loss_coef: float = 0.0  # KL in the loss instead, k3 with the gradient of k2 (verl)
    # Scores, rewards, advantages
    use_score_scaling: bool = False  # divide by the running std
    use_score_norm: bool = False  # and subtract the running mean first
    score_clip: float | None = None  # then clip to [-score_clip, score_clip]
    missing_eos_penalty: float | None = None  # then subtract from responses without EOS (TRL 0.12)
    whiten_rewards: bool = False  # masked_whiten(shift_mean=False) (TRL 0.7.3)
    gamma: float = 1.0  # discount per token
    lam: float = 0.95  # of GAE: 1 is Monte Carlo less the value, 0 the TD residual
    bootstrap_truncated: bool = False  # V, not 0, follows a truncated response (SB3, own)
    whiten_advantages: bool = True  # over the batch of all ranks
    # Loss
    cliprange: float = 0.2  # the ratio is clipped to 1 -+ cliprange (Schulman et al. 2017)
    cliprange_high: float | None = None  # upper clip; None: cliprange (DAPO)
    dual_clip: float | None = None  # bound on r where A < 0 (Ye et al. 2020; verl: 3.0)
    cliprange_value: float | None = 0.2  # how far values may move from the old ones
    vf_coef: float = 0.1  # weight of the value loss
    ent_coef: float = 0.0  # entropy bonus (Schulman et al. 2017)
    ptx_coef: float = 0.0  # weight of ptx_batch's LM loss (InstructGPT: 27.8)
    loss_agg_mode: str = "token-mean"  # of the minibatch on all ranks; see AGG_MODES (verl)
    loss_divisor: float | None = None  # of "constant-divisor": sum / loss_divisor (Dr. GRPO)
    rollout_is_cap: float | None = None  # cap of weights exp(old - rollout_logprobs) (TIS; verl: 2)
    # Guards
    ratio_threshold: float | None = 10.0  # skip a minibatch whose mean ratio exceeds it
    early_stopping: bool = False  # end the passes once KL(old || new) > 1.5 target_kl
    target_kl: float = 0.1  # of early_stopping, nats per token
    # Sampling
    temperature: float = 1.0  # of generate, policy and reference alike (TRL: generation's only)

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            setattr(self, field.name, _checked(field.name, field.type, getattr(self, field.name)))
        sizes = (self.micro_batch_size or 1, self.minibatch, self.batch_size)
        for small, large, size, most in zip(("micro_", "mini_"), ("mini_", ""), sizes, sizes[1:]):
            if size > most:
                name = f"{small}batch_size must be <= {large}batch_size"
                raise ValueError(f"{name} = {most}, got {size}")
        if self.use_score_norm and not self.use_score_scaling:
            raise ValueError("use_score_norm=True needs use_score_scaling=True, got False")
        if (self.loss_agg_mode == "constant-divisor") != (self.loss_divisor is not None):
            given = f"loss_divisor={self.loss_divisor}, loss_agg_mode={self.loss_agg_mode!r}"
            raise ValueError(f"{given}: 'constant-divisor' needs a divisor, other modes take none")
        if self.kl_loss_coef and self.init_kl_coef:
            both = f"kl_loss_coef={self.kl_loss_coef} and init_kl_coef={self.init_kl_coef}"
            raise ValueError(f"{both} put the KL into loss and reward: set one of them to 0")
        if self.kl_penalty == "full" and self.kl_placement != "token":
            raise ValueError("kl_penalty='full' needs kl_placement='token'")

    @property
    def minibatch(self) -> int:
        """mini_batch_size, or what its None stands for."""
        return self.mini_batch_size or min(self.batch_size, 32)


def _checked(name: str, kind: Any, value: Any) -> Any:
    """value, which is of the field's type and in its range; a float of any kind as Python's."""
    if value is None and "None" in str(kind):
        return value
    if kind is str:
        return choice(name, value, CHOICES[name])
    if kind is bool:
        if not isinstance(value, bool):
            raise TypeError(f"{name} must be True or False, got {value!r}")
        return value
    integer = kind in (int, int | None)
    if integer and type(value) is not int:
        raise TypeError(f"{name} must be an integer, got {value!r}")
    x = number(name, value, *RANGES.get(name, (int(integer),)))
    return value if integer else x
