"""What a policy's answers to the held-out prompts are worth, by several measures.

The reward model is what PPO climbs, so its score alone proves little. VADER, a lexicon that
nothing here was trained on, is the independent judge; distinct-2, the most common phrase and the
share of finished answers show what a policy gave up for its score.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from vaderSentiment.vaderSentiment import SentimentIntensityAnalyzer

from ppo_kernels import masked_mean
from ppo_kernels.demo.supervised import scores_of
from ppo_kernels.trainer import PPOTrainer, Rollout

PHRASE = 4


def compound(judge: SentimentIntensityAnalyzer, texts: Sequence[str]) -> Tensor:
    """VADER compound [B] of texts, in [-1, 1] (Hutto & Gilbert 2014)."""
    return torch.tensor([judge.polarity_scores(text)["compound"] for text in texts])


def reward_scores(
    reward_model: nn.Module, queries: Sequence[Tensor], responses: Sequence[Tensor]
) -> Tensor:
    """Reward-model score [B] of each prompt with its response."""
    with torch.no_grad():
        return scores_of(reward_model, [torch.cat(pair) for pair in zip(queries, responses)])


def correlation(x: Tensor, y: Tensor) -> float:
    """Pearson's; 0 where one of the two is constant."""
    return torch.corrcoef(torch.stack([x.cpu().double(), y.double()]))[0, 1].nan_to_num().item()


def ngrams(response: Tensor, n: int) -> list[tuple[int, ...]]:
    """All runs of n tokens, in order."""
    ids = response.tolist()
    return list(zip(*(ids[i:] for i in range(n))))


def distinct(responses: Sequence[Tensor], n: int = 2) -> float:
    """Different n-grams over all n-grams of the whole sample (Li et al. 2016); 0 if it has none."""
    grams = [gram for response in responses for gram in ngrams(response, n)]
    return len(set(grams)) / max(1, len(grams))


def top_phrase(responses: Sequence[Tensor], n: int = PHRASE) -> tuple[list[int], float]:
    """The n-gram that most responses contain, and the share of responses that contain it."""
    counts = Counter(gram for response in responses for gram in set(ngrams(response, n)))
    if not counts:
        return [], 0.0
    phrase, count = counts.most_common(1)[0]
    return list(phrase), count / len(responses)


def evaluate(
    trainer: PPOTrainer,
    reward_model: nn.Module,
    judge: SentimentIntensityAnalyzer,
    prompts: Sequence[Tensor],
    seed: int,
    **sampling: Any,
) -> tuple[dict[str, Any], list[str]]:
    """Sample one response to each prompt and measure it; the trainer's own RNG does not move.

    Returns the metrics, by their names in report.md, and the texts (prompt and response). kl is
    nats per response: the sum over its tokens of ln pi - ln pi_ref, averaged over responses.
    """
    state = trainer.generator.get_state()
    trainer.generator.manual_seed(seed)
    parts = []
    for start in range(0, len(prompts), trainer.config.batch_size):
        queries = list(prompts[start : start + trainer.config.batch_size])
        responses = trainer.generate(queries, **sampling)
        scores = reward_scores(reward_model, queries, responses)
        parts.append(trainer.rollout(queries, responses, scores))
    trainer.generator.set_state(state)
    sample = Rollout.cat(parts)
    pairs = zip(sample.queries, sample.responses)
    texts = [trainer.tokenizer.decode(torch.cat(p), skip_special_tokens=True) for p in pairs]
    judged = compound(judge, texts)
    phrase, share = top_phrase(sample.responses)
    return {
        "reward": sample.raw_scores.mean().item(),
        "judge": judged.mean().item(),
        "reward_judge_correlation": correlation(sample.raw_scores, judged),
        "kl": sample.kl.sum().item() / len(sample),
        "entropy": masked_mean(sample.entropy, sample.mask).item(),
        "length": sum(map(len, sample.responses)) / len(sample),
        "finished": sample.finished.double().mean().item(),
        "distinct_2": distinct(sample.responses),
        "top_phrase": trainer.tokenizer.decode(phrase).strip(),
        "top_phrase_share": share,
    }, texts
