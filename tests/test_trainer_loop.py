"""The loops people write around PPOTrainer: TRL's own, train(), resuming, saving."""

import subprocess
import sys

import pytest
import tiny
import torch

from ppo_kernels import PPOConfig, PPOTrainer


def test_the_loop_of_the_first_source_document() -> None:
    """`for batch in ppo_trainer.dataloader: ...; ppo_trainer.step(...)`, as printed there."""
    rows = [{"input_ids": torch.randint(3, tiny.VOCAB, (5,)), "query": str(i)} for i in range(8)]

    def collator(data: list[dict]) -> dict[str, list]:
        return dict((key, [d[key] for d in data]) for key in data[0])

    config = PPOConfig(batch_size=4, mini_batch_size=2, learning_rate=1e-3)
    ppo_trainer = PPOTrainer(
        config, tiny.policy(), None, tiny.Tokenizer(), dataset=rows, data_collator=collator
    )
    seen = []
    for batch in ppo_trainer.dataloader:
        query_tensors = batch["input_ids"]
        response_tensors = ppo_trainer.generate(
            query_tensors, return_prompt=False, max_new_tokens=6
        )
        rewards = [torch.tensor(float(len(r))) for r in response_tensors]
        stats = ppo_trainer.step(query_tensors, response_tensors, rewards)
        seen += batch["query"]
        assert stats["ppo/optimizer_steps"] == 8
        assert stats["objective/kl"] >= 0
    assert sorted(seen) == [str(i) for i in range(8)]


def test_39_arguments_of_train_are_named() -> None:
    trainer = tiny.trainer(tokenizer=tiny.Tokenizer())
    for prompts, steps, message in (
        ("w3 w4 w5 w6", 1, "prompts must be a list or tensor, got str"),
        (None, 1, "prompts must be a list or tensor, got NoneType"),
        (["w3"] * 4, "2", "steps must be an integer, got '2'"),
        (["w3"] * 4, 2.0, r"steps must be an integer, got 2\.0"),
    ):
        with pytest.raises(TypeError, match=message):
            trainer.train(prompts, lambda p, r: [0.0] * 4, steps=steps)


def test_39_scores_that_reward_fn_returns_are_named_so() -> None:
    trainer = tiny.trainer(tokenizer=tiny.Tokenizer())
    for scores, error, message in (
        (1.0, TypeError, "scores must be a list or tensor, got float"),
        ([1.0], ValueError, "scores must have one entry per query, 4, got 1"),
    ):
        with pytest.raises(error, match=f"reward_fn must return scores for step: {message}"):
            trainer.train(["w3"] * 4, lambda p, r, x=scores: x, steps=1, max_new_tokens=2)
    assert trainer.places["prompts"]["cursor"] == 0


def test_importing_the_ops_imports_no_transformers() -> None:
    code = "import sys, ppo_kernels; assert 'transformers' not in sys.modules; "
    code += "ppo_kernels.PPOTrainer"
    subprocess.run([sys.executable, "-c", code], check=True)
