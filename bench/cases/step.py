"""One PPO update of a small Hugging Face model with a large vocabulary: ours and eager.

From the sampled tokens to the gradients of the last epoch: old, reference and new log-probs,
rewards, advantages, whitening, loss, backward. The optimizer's step is the same code for both and
is left out.
"""

import copy
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor, nn

import ppo_kernels as ppo
from bench.case import DTYPES, Case, Contestant, Tensors
from bench.cases import logprobs
from bench.cases.gae import loop
from ppo_kernels import models
from ppo_kernels.reference import upcast

GAMMA, LAM, KL_COEF, EPOCHS = 1.0, 0.95, 0.05, 2
COEFS = {"cliprange": 0.2, "cliprange_value": 0.2, "vf_coef": 0.1}


@dataclass
class Agent:
    policy: nn.Module
    reference: nn.Module
    value: nn.Linear

    def trained(self) -> list[Tensor]:
        return [*self.policy.parameters(), *self.value.parameters()]


@lru_cache(maxsize=1)
def agent(H: int, layers: int, V: int, dtype: str, device: torch.device) -> Agent:
    """A Qwen2 of random weights, a reference a little away from it, a value head."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=V,
        hidden_size=H,
        intermediate_size=3 * H,
        num_hidden_layers=layers,
        num_attention_heads=max(H // 64, 1),
        num_key_value_heads=max(H // 64, 1),
        tie_word_embeddings=True,
    )
    policy = Qwen2ForCausalLM(config).to(device, DTYPES[dtype]).eval()
    reference = copy.deepcopy(policy)
    with torch.no_grad():
        for p in reference.parameters():
            p.add_(0.02 * p.std(correction=0) * torch.randn_like(p))
    return Agent(policy, reference, nn.Linear(H, 1).to(device, DTYPES[dtype]))


def make(B: int, prompt: int, length: int, V: int, device: torch.device, seed: int) -> Tensors:
    """Tokens, and which tokens of the responses are actions: ragged, padded on the right."""
    g = torch.Generator().manual_seed(seed)
    lengths = torch.randint(length // 2, length + 1, (B, 1), generator=g)
    x = {
        "input_ids": torch.randint(V, (B, prompt + length), generator=g),
        "mask": torch.arange(length) < lengths,
        "scores": torch.randn(B, generator=g),
    }
    return {n: t.to(device) for n, t in x.items()}


def response(x: Tensors) -> tuple[Tensor, slice]:
    """The response's tokens [B, R], and the positions that predict them."""
    R = x["mask"].shape[1]
    return x["input_ids"][:, -R:], slice(-R - 1, -1)


def whitened(x: Tensor, m: Tensor) -> Tensor:
    n = m.sum()
    mean = (x * m).sum() / n
    var = (((x - mean) ** 2) * m).sum() / (n - 1)
    return (x - mean) * torch.rsqrt(var + 1e-8) * m


def eager_step(x: Tensors, a: Agent) -> Tensors:
    """The step as trainers write it: the model's logits, log_softmax, a loop for GAE."""
    m = x["mask"].to(x["scores"].dtype)
    labels, at = response(x)

    def logprobs_and_hidden(model: nn.Module) -> tuple[Tensor, Tensor]:
        out = model(input_ids=x["input_ids"], output_hidden_states=True, use_cache=False)
        logp = logprobs.eager(out.logits[:, at], labels)
        return logp, out.hidden_states[-1][:, at]

    def values_of(hidden: Tensor) -> Tensor:
        return upcast(a.value(hidden).squeeze(-1))

    with torch.no_grad():
        old, hidden = logprobs_and_hidden(a.policy)
        ref, _ = logprobs_and_hidden(a.reference)
        old_values = values_of(hidden)
        rewards = -KL_COEF * (old - ref) * m
        last = m.shape[1] - 1 - m.flip(1).argmax(1)
        rewards[torch.arange(len(m), device=m.device), last] += x["scores"]
        out = loop(rewards, old_values, x["mask"], GAMMA, LAM)
        advantages, returns = whitened(out["advantages"], m), out["returns"]
    for _ in range(EPOCHS):
        logp, hidden = logprobs_and_hidden(a.policy)
        values, ratio = values_of(hidden), torch.exp(logp - old)
        clip, vclip = COEFS["cliprange"], COEFS["cliprange_value"]
        surrogate = torch.max(-advantages * ratio, -advantages * ratio.clamp(1 - clip, 1 + clip))
        clipped = torch.max(torch.min(values, old_values + vclip), old_values - vclip)
        value_loss = 0.5 * torch.max((values - returns) ** 2, (clipped - returns) ** 2)
        loss = ((surrogate + COEFS["vf_coef"] * value_loss) * m).sum() / m.sum()
        grads = torch.autograd.grad(loss, a.trained())
    return {"loss": loss.detach(), "dweight": grads[0], "dvalue": grads[-2]}


def our_step(x: Tensors, a: Agent) -> Tensors:
    """The same with the ops: hidden states instead of logits."""
    labels, at = response(x)
    trained = torch.where(x["mask"], labels, -100)

    def hidden_of(model: nn.Module) -> Tensor:
        return models.hidden_states(model, input_ids=x["input_ids"])[:, at]

    def values_of(hidden: Tensor) -> Tensor:
        return a.value(hidden).squeeze(-1).float()

    def logprobs_of(model: nn.Module, hidden: Tensor) -> Tensor:
        head = models.lm_head(model)
        return ppo.logprobs_from_hidden(hidden, head.weight, trained, **head.kwargs())

    with torch.no_grad():
        hidden = hidden_of(a.policy)
        old, old_values = logprobs_of(a.policy, hidden), values_of(hidden)
        ref = logprobs_of(a.reference, hidden_of(a.reference))
        kl = {"logprobs": old, "ref_logprobs": ref, "kl_coef": KL_COEF}
        out = ppo.gae(None, old_values, x["mask"], gamma=GAMMA, lam=LAM, scores=x["scores"], **kl)
    head = models.lm_head(a.policy)
    for _ in range(EPOCHS):
        hidden = hidden_of(a.policy)
        loss = ppo.ppo_loss_from_hidden(
            hidden,
            head.weight,
            labels,
            old,
            out.advantages,
            x["mask"],
            values=values_of(hidden),
            old_values=old_values,
            returns=out.returns,
            whiten=out.stats,
            **head.kwargs(),
            **COEFS,
        ).loss
        grads = torch.autograd.grad(loss, a.trained())
    return {"loss": loss.detach(), "dweight": grads[0], "dvalue": grads[-2]}


def exact(a: Agent) -> Agent:
    return Agent(*(copy.deepcopy(m).double() for m in (a.policy, a.reference, a.value)))


def case(
    B: int, prompt: int, length: int, model: tuple, device: torch.device, **flags: object
) -> Case:
    H, layers, V, dtype = model
    N = B * length
    weight = float(V * H * DTYPES[dtype].itemsize)

    def inputs(seed: int, check: bool) -> Tensors:
        shape = (2, 4, 12) if check else (B, prompt, length)
        return make(*shape, V, device, seed)

    def fp64(x: Tensors) -> Tensors:
        return eager_step({**x, "scores": x["scores"].double()}, exact(agent(*model, device)))

    def contestant(name: str, step: object, workspace: float) -> Contestant:
        return Contestant(name, lambda: lambda x: step(x, agent(*model, device)), workspace)

    return Case(
        op="step",
        name=f"PPO update, {B} x ({prompt}+{length}) tokens, H={H} L={layers} V={V}",
        dtype=dtype,
        make=inputs,
        expected=fp64,
        contestants=[
            contestant("ours", our_step, 2.0**29),
            contestant("eager", eager_step, 16.0 * N * V),
        ],
        input_bytes=2 * weight,
        required=weight,
        tokens=N,
        **flags,
    )


def build(device: torch.device, size: str) -> list[Case]:
    if size == "small":
        return [case(2, 8, 24, (64, 1, 2048, "fp32"), device)]
    if size != "default":
        return []
    if device.type == "cuda":
        return [case(16, 128, 384, (1024, 8, 151936, "bf16"), device, headline=True)]
    return [case(8, 32, 96, (256, 2, 151936, "fp32"), device, headline=True)]
