"""One whole PPO update of a small Hugging Face model with a large vocabulary: ours and eager."""

import copy
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor, nn

import ppo_kernels as ppo
from bench.case import DTYPES, Case, Contestant, Tensors
from bench.cases.gae import loop
from ppo_kernels import models

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


def make(B: int, prompt: int, response: int, V: int, device: torch.device, seed: int) -> Tensors:
    """Tokens, and which of the shifted positions are actions: ragged responses, right-padded."""
    g = torch.Generator().manual_seed(seed)
    T = prompt + response
    lengths = torch.randint(response // 2, response + 1, (B, 1), generator=g)
    at = torch.arange(1, T).expand(B, -1)
    x = {
        "input_ids": torch.randint(V, (B, T), generator=g),
        "mask": (at >= prompt) & (at < prompt + lengths),
        "scores": torch.randn(B, generator=g),
    }
    return {n: t.to(device) for n, t in x.items()}


def whitened(x: Tensor, m: Tensor) -> Tensor:
    n = m.sum()
    mean = (x * m).sum() / n
    var = (((x - mean) ** 2) * m).sum() / (n - 1)
    return (x - mean) * torch.rsqrt(var + 1e-8) * m


def eager_step(x: Tensors, a: Agent) -> Tensors:
    """The step as trainers write it: full logits from each model, log_softmax, a loop for GAE."""
    ids, m = x["input_ids"], x["mask"].to(x["scores"].dtype)

    def logprobs_and_values(model: nn.Module, values: bool) -> tuple[Tensor, Tensor | None]:
        out = model(input_ids=ids, output_hidden_states=values, use_cache=False)
        logits = out.logits[:, :-1]
        logits = logits if logits.dtype == torch.float64 else logits.float()
        logp = torch.log_softmax(logits, -1).gather(-1, ids[:, 1:, None]).squeeze(-1)
        if not values:
            return logp, None
        return logp, a.value(out.hidden_states[-1][:, :-1]).squeeze(-1).to(logp.dtype)

    with torch.no_grad():
        old, old_values = logprobs_and_values(a.policy, True)
        ref, _ = logprobs_and_values(a.reference, False)
        rewards = -KL_COEF * (old - ref) * m
        last = m.shape[1] - 1 - m.flip(1).argmax(1)
        rewards[torch.arange(len(m), device=m.device), last] += x["scores"]
        out = loop(rewards, old_values, x["mask"], GAMMA, LAM)
        advantages, returns = whitened(out["advantages"], m), out["returns"]
    for _ in range(EPOCHS):
        logp, values = logprobs_and_values(a.policy, True)
        ratio = torch.exp(logp - old)
        clip, vclip = COEFS["cliprange"], COEFS["cliprange_value"]
        surrogate = torch.max(-advantages * ratio, -advantages * ratio.clamp(1 - clip, 1 + clip))
        clipped = torch.max(torch.min(values, old_values + vclip), old_values - vclip)
        value_loss = 0.5 * torch.max((values - returns) ** 2, (clipped - returns) ** 2)
        loss = ((surrogate + COEFS["vf_coef"] * value_loss) * m).sum() / m.sum()
        grads = torch.autograd.grad(loss, a.trained())
    return {"loss": loss.detach(), "dweight": grads[0], "dvalue": grads[-2]}


def our_step(x: Tensors, a: Agent) -> Tensors:
    """The same with the ops: hidden states instead of logits."""
    labels = x["input_ids"][:, 1:]
    trained = torch.where(x["mask"], labels, -100)

    def hidden_of(model: nn.Module) -> Tensor:
        return models.hidden_states(model, input_ids=x["input_ids"])[:, :-1]

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
    B: int, prompt: int, response: int, model: tuple, device: torch.device, **flags: object
) -> Case:
    H, layers, V, dtype = model
    N = B * (prompt + response)
    size = {"fp32": 4, "bf16": 2}[dtype]

    def inputs(seed: int, check: bool) -> Tensors:
        shape = (2, 4, 12) if check else (B, prompt, response)
        return make(*shape, V, device, seed)

    def fp64(x: Tensors) -> Tensors:
        return eager_step({**x, "scores": x["scores"].double()}, exact(agent(*model, device)))

    def contestant(name: str, step: object, workspace: float) -> Contestant:
        return Contestant(name, lambda: lambda x: step(x, agent(*model, device)), workspace)

    return Case(
        op="step",
        name=f"PPO update, {B} x ({prompt}+{response}) tokens, H={H} L={layers} V={V}",
        dtype=dtype,
        make=inputs,
        expected=fp64,
        contestants=[
            contestant("ours", our_step, 2.0**29),
            contestant("eager", eager_step, 4.0 * N * V * 4),
        ],
        input_bytes=2.0 * V * H * size,
        required=1.0 * V * H * size,
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
