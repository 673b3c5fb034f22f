"""Sizes and rates of the sentiment demo, in full and quick."""

from dataclasses import dataclass, replace

from ppo_kernels.trainer import PPOConfig


@dataclass(frozen=True)
class Settings:
    """Everything a run depends on, apart from its seed."""

    # Tokenizer and model: GPT-2's architecture.
    vocab_size: int = 4000
    width: int = 128
    layers: int = 2
    heads: int = 4
    max_tokens: int = 32
    # Language model.
    sft_epochs: int = 3
    sft_batch: int = 16
    sft_lr: float = 1e-3
    sft_embedding_lr: float = 1e-2
    # Reward model.
    reward_epochs: int = 2
    reward_batch: int = 64
    reward_lr: float = 5e-4
    reward_embedding_lr: float = 2e-3
    # PPO.
    prompt_tokens: int = 4
    response_tokens: int = 24
    ppo_steps: int = 80
    no_kl_steps: int = 40
    ppo_lr: float = 4e-4
    value_lr: float = 1e-3
    kl_coef: float = 0.085
    warmup: float = 0.1
    short_of: int = 15
    short_penalty: float = 0.15
    # Evaluation.
    eval_prompts: int = 512
    eval_every: int = 20

    def schedule(self, step: int) -> float:
        """Factor on the PPO learning rates: linear warm-up, then linear decay to 0."""
        rise = (step + 1) / (self.warmup * self.ppo_steps)
        fall = (self.ppo_steps - step) / ((1 - self.warmup) * self.ppo_steps)
        return max(0.0, min(rise, 1.0, fall))

    def ppo_config(self, seed: int, kl_coef: float, steps: int) -> PPOConfig:
        """The trainer's configuration; everything that is not named keeps its default."""
        return PPOConfig(
            batch_size=64,
            mini_batch_size=32,
            ppo_epochs=2,
            steps=steps,
            seed=seed,
            learning_rate=self.ppo_lr,
            value_learning_rate=self.value_lr,
            adap_kl_ctrl=False,
            init_kl_coef=kl_coef,
            # Below 1, so that a language model this small writes sentences rather than noise.
            temperature=0.85,
        )


FULL = Settings()
QUICK = replace(
    FULL,
    vocab_size=3000,
    sft_epochs=1,
    reward_epochs=1,
    ppo_steps=20,
    no_kl_steps=10,
    ppo_lr=6e-4,
    eval_prompts=256,
    eval_every=10,
)
