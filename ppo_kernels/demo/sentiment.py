"""`ppo-kernels demo sentiment`: RLHF on real reviews, from raw text to a report.

    data -> tokenizer -> sft -> reward -> ppo -> no_kl -> evaluation -> report.md

A language model learns to write review snippets, a reward model learns from pairs of snippets
which one people rated higher, and PPO makes the language model write what the reward model likes.
Each stage leaves a folder in `out` when it is complete and a later run goes on from there; the two
PPO stages (the second without the KL term, to show what that is for) also go on from their last
checkpoint, which Ctrl-C or SIGTERM writes too.
"""

import copy
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor
from transformers import (
    GPT2ForSequenceClassification,
    GPT2LMHeadModel,
    PreTrainedTokenizerFast,
)
from transformers.utils import logging
from vaderSentiment.vaderSentiment import SentimentIntensityAnalyzer

from ppo_kernels.demo import data, report, supervised
from ppo_kernels.demo.evaluate import compound, distinct, evaluate, reward_scores
from ppo_kernels.demo.settings import Settings
from ppo_kernels.demo.stages import Stages, Tick
from ppo_kernels.models import PolicyAndValue
from ppo_kernels.train import MetricsLog, run_steps
from ppo_kernels.trainer import PPOTrainer

CHECKPOINT_EVERY = 10
EVALUATION_SEED = 1


class Reward:
    """The reward model's score, minus a penalty per token that a response is too short.

    Without the penalty the policy learns to say one nice thing and stop, which the reward model
    likes and the judge does not. `latest` describes the last batch, for the log.
    """

    def __init__(
        self, model: GPT2ForSequenceClassification, tokenizer: Any, settings: Settings
    ) -> None:
        self.model, self.tokenizer, self.settings = model, tokenizer, settings
        self.judge = SentimentIntensityAnalyzer()
        self.latest: dict[str, float] = {}

    def __call__(self, queries: Sequence[Tensor], responses: Sequence[Tensor]) -> Tensor:
        scores = reward_scores(self.model, queries, responses)
        pairs = zip(queries, responses)
        texts = [self.tokenizer.decode(torch.cat(p), skip_special_tokens=True) for p in pairs]
        self.latest = {
            "reward_model": scores.mean().item(),
            "judge": compound(self.judge, texts).mean().item(),
            "distinct_2": distinct(responses),
        }
        lengths = torch.tensor([len(r) for r in responses])
        missing = (self.settings.short_of - lengths).clamp(min=0)
        return scores - self.settings.short_penalty * missing


class Demo:
    """One run: its settings, models and stages."""

    def __init__(self, settings: Settings, seed: int, out: Path, console: Console) -> None:
        self.settings, self.seed, self.out = settings, seed, out
        self.stages = Stages(out, {"seed": seed, **asdict(settings)}, console)
        self.sampling = {"max_new_tokens": settings.response_tokens}

    def run(self) -> None:
        """All stages, then report.md and its plots."""
        cfg, stages, seed = self.settings, self.stages, self.seed
        began = time.perf_counter()
        self.split = data.load()
        train, held_out = map(len, self.split)
        seconds = time.perf_counter() - began
        stages.note("data", {"train": train, "held_out": held_out, "seconds": seconds})
        self.tokenizer = stages.run(
            "tokenizer", 1, self.make_tokenizer, PreTrainedTokenizerFast.from_pretrained
        )
        self.held_out = self.prompts(self.split.held_out)[: cfg.eval_prompts]
        self.sft = stages.run(
            "sft",
            cfg.sft_epochs * (train // cfg.sft_batch),
            lambda tick: supervised.train_language_model(
                self.split, self.tokenizer, cfg, seed, tick
            ),
            GPT2LMHeadModel.from_pretrained,
        )
        self.reward_model = stages.run(
            "reward",
            cfg.reward_epochs * (train // cfg.reward_batch),
            lambda tick: supervised.train_reward_model(
                self.sft, self.split, self.tokenizer, cfg, seed, tick
            ),
            GPT2ForSequenceClassification.from_pretrained,
        )
        policies = {"sft": self.sft}
        for name, kl_coef, steps in (
            ("ppo", cfg.kl_coef, cfg.ppo_steps),
            ("no_kl", 0.0, cfg.no_kl_steps),
        ):
            policies[name] = stages.run(
                name,
                steps,
                lambda tick, args=(name, kl_coef, steps): self.train(*args, tick),
                GPT2LMHeadModel.from_pretrained,
            )
        stages.run("evaluation", len(policies), lambda tick: self.compare(policies, tick))
        report.write(self.out, stages.infos, cfg, self.seed)

    def make_tokenizer(self, tick: Tick) -> tuple[PreTrainedTokenizerFast, dict[str, Any]]:
        tokenizer = supervised.train_tokenizer(self.split, self.settings.vocab_size)
        tick("")
        return tokenizer, {"vocabulary": len(tokenizer)}

    def prompts(self, snippets: Sequence[data.Snippet]) -> list[Tensor]:
        """BOS and the first tokens of every snippet that is longer than that."""
        n = 1 + self.settings.prompt_tokens
        rows = supervised.encode(self.tokenizer, snippets, self.settings.max_tokens)
        return [row[:n] for row in rows if len(row) > n + 1]

    def trainer(self, policy: GPT2LMHeadModel, kl_coef: float, steps: int) -> PPOTrainer:
        """The reference is the SFT model; the value model starts as the reward model."""
        cfg = self.settings
        config = cfg.ppo_config(self.seed, kl_coef, steps)
        model = PolicyAndValue(copy.deepcopy(policy), copy.deepcopy(self.reward_model))
        trainer = PPOTrainer(config, model, ref_model=self.sft, tokenizer=self.tokenizer)
        trainer.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(trainer.optimizer, cfg.schedule)
        return trainer

    def train(
        self, name: str, kl_coef: float, steps: int, tick: Tick
    ) -> tuple[GPT2LMHeadModel, dict[str, Any]]:
        """PPO from the SFT model, or from where a run that was stopped left its checkpoint."""
        trainer = self.trainer(self.sft, kl_coef, steps)
        checkpoint = self.out / "checkpoints" / f"{name}.pt"
        if checkpoint.exists():
            trainer.load_checkpoint(checkpoint)
        reward = Reward(self.reward_model, self.tokenizer, self.settings)
        log = MetricsLog(self.out, name, trainer.step_count)

        def report(stats: dict[str, float]) -> dict[str, Any]:
            step, latest = trainer.step_count, reward.latest
            line = stats | {f"batch/{k}": v for k, v in latest.items()}
            if step % self.settings.eval_every == 0 and step < steps:
                metrics, _ = self.evaluate(trainer, reward.judge)
                line |= {f"held_out/{k}": v for k, v in metrics.items()}
            tick(
                f"reward {latest['reward_model']:+.2f}  judge {latest['judge']:+.2f}  "
                f"KL {stats['objective/kl']:.1f}"
            )
            return line

        for _ in range(trainer.step_count):
            tick("")
        prompts, every = self.prompts(self.split.train), CHECKPOINT_EVERY
        run_steps(trainer, prompts, reward, log, checkpoint, every, report, **self.sampling)
        checkpoint.unlink(missing_ok=True)
        return trainer.model.policy, {"steps": steps, "kl_coefficient": kl_coef}

    def evaluate(
        self, trainer: PPOTrainer, judge: SentimentIntensityAnalyzer
    ) -> tuple[dict[str, Any], list[str]]:
        """The trainer's policy on the held-out prompts, always with the same random numbers."""
        return evaluate(
            trainer, self.reward_model, judge, self.held_out, EVALUATION_SEED, **self.sampling
        )

    def compare(
        self, policies: dict[str, GPT2LMHeadModel], tick: Tick
    ) -> tuple[None, dict[str, Any]]:
        """Every policy on the held-out prompts."""
        judge = SentimentIntensityAnalyzer()
        metrics, texts = {}, {}
        for name, policy in policies.items():
            trainer = self.trainer(policy, 0.0, 1)
            metrics[name], texts[name] = self.evaluate(trainer, judge)
            tick(name)
        asked = [self.tokenizer.decode(q, skip_special_tokens=True) for q in self.held_out]
        return None, {"metrics": metrics, "prompts": asked, "texts": texts}


def main(settings: Settings, seed: int, out: Path) -> None:
    """Run the demo, print what it changed, and say where the report is."""
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    console = Console()
    demo = Demo(settings, seed, out, console)
    demo.run()
    print("\n" + report.table(demo.stages.infos["evaluation"]["metrics"]))
    print(f"\n{out / 'report.md'}")
