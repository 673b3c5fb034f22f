"""Log-probs, entropies and values of a batch's response tokens, without dropout."""

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ppo_kernels import logprobs_from_hidden, logprobs_from_logits, reference
from ppo_kernels.models import LMHead, hidden_states, lm_head
from ppo_kernels.trainer.config import PPOConfig
from ppo_kernels.trainer.rollout import Batch


class States(NamedTuple):
    """Per response token, x [n, ..]: hidden states of head, or logits and None. values [B, L]."""

    x: Tensor
    head: LMHead | None
    values: Tensor | None


def head_is_readable(model: nn.Module) -> bool:
    try:
        lm_head(model)
    except ValueError:
        return False
    return True


def action_states(
    model: nn.Module, batch: Batch, readable: bool, with_values: bool, cfg: PPOConfig
) -> States:
    """One forward: of a model whose head is readable, or that returns (logits, .., values)."""
    inputs, head, values = batch.inputs(), None, None
    with torch.autocast(batch.at.device.type, torch.bfloat16, enabled=cfg.bf16):
        if readable:
            inputs.pop("position_ids", None)  # counted from attention_mask where they are taken
            if with_values:
                x, values, _ = model(**inputs)
            else:
                x = hidden_states(model, **inputs)
            head = lm_head(model)
        else:
            out = model(**inputs)
            x = out.logits if hasattr(out, "logits") else out[0]
            values = out[-1].reshape(batch.input_ids.shape) if with_values else None
    x = x.flatten(0, 1).index_select(0, batch.at)
    return States(x, head, None if values is None else reference.upcast(values))


def logprobs_and_entropy(
    states: States, batch: Batch, cfg: PPOConfig, eos_ids: list[int]
) -> tuple[Tensor, Tensor]:
    """(logprobs, entropy) [n] fp32 of the labels, under temperature and minimum length.

    Where EOS cannot be chosen, with q = p(EOS): `ln p' = ln p - ln(1-q)` and
    `H' = (H + q ln q) / (1-q) + ln(1-q)`.
    """
    logprobs, entropy = _token_logprobs(states, batch.labels, cfg.temperature, cfg.bf16)
    early = (batch.steps < cfg.min_new_tokens).nonzero().squeeze(-1) if cfg.min_new_tokens else ()
    if not len(early):
        return logprobs, entropy
    at = States(states.x.index_select(0, early), states.head, None)
    labels = (torch.full_like(early, eos) for eos in eos_ids)
    log_q = torch.stack([_token_logprobs(at, y, cfg.temperature, cfg.bf16)[0] for y in labels])
    rest = (1 - log_q.exp().sum(0)).clamp(min=1e-6)
    H = (entropy[early] + (log_q.exp() * log_q).sum(0)) / rest + rest.log()
    return logprobs.index_add(0, early, -rest.log()), entropy.index_copy(0, early, H)


def ptx_logprobs(states: States, batch: Batch, cfg: PPOConfig) -> Tensor:
    """[n] log-probs of plain text: at temperature 1, EOS anywhere."""
    return _token_logprobs(states, batch.labels, 1.0, cfg.bf16)[0]


def _token_logprobs(
    states: States, labels: Tensor, temperature: float, bf16: bool
) -> tuple[Tensor, Tensor]:
    x, head, _ = states
    options = {"temperature": temperature, "return_entropy": True}
    if head is None:
        return logprobs_from_logits(x, labels, **options)
    dtype = torch.bfloat16 if bf16 else head.weight.dtype
    options |= head.kwargs()
    options["bias"] = None if head.bias is None else head.bias.to(dtype)
    return logprobs_from_hidden(x.to(dtype), head.weight.to(dtype), labels, **options)


@torch.no_grad()
def full_kl(policy: States, ref: States, temperature: float) -> Tensor:
    """[n]: `sum_v p_v (ln p_v - ln q_v)`; at most about 64 MB of logits at a time."""
    V = policy.x.shape[-1] if policy.head is None else policy.head.weight.shape[0]
    rows = max(1, reference.CHUNK_ELEMENTS // V)
    kl = policy.x.new_zeros(0, dtype=torch.float32)
    for p, q in zip(policy.x.split(rows), ref.x.split(rows)):
        p, q = policy.head.logits(p) if policy.head else p, ref.head.logits(q) if ref.head else q
        p, q = ((reference.upcast(z) / temperature).log_softmax(-1) for z in (p, q))
        kl = torch.cat([kl, torch.where(p > -torch.inf, p.exp() * (p - q), 0).sum(-1)])
    return kl


@contextlib.contextmanager
def without_dropout(*models: nn.Module | None, training: bool = False) -> Iterator[None]:
    """eval() everywhere, and every module's own mode again afterwards.

    training: modules that checkpoint their activations do so only in training mode. They, not
    their children, stay in it, with dropout rates of their own at 0.
    """
    modes = {m: m.training for model in models if model is not None for m in model.modules()}
    rates: list[tuple[nn.Module, str, Any]] = []
    try:
        for m in modes:
            m.training = training and bool(getattr(m, "gradient_checkpointing", False))
            for name, value in vars(m).items() if m.training else ():
                if "drop" in name and isinstance(value, float) and value:
                    rates.append((m, name, value))
        for m, name, _ in rates:
            setattr(m, name, 0.0)
        yield
    finally:
        for m, mode in modes.items():
            m.training = mode
        for m, name, value in rates:
            setattr(m, name, value)


def peft_model(model: nn.Module) -> Any | None:
    """The peft model inside a policy, or None."""
    inner = getattr(model, "pretrained_model", getattr(model, "policy", model))
    return inner if hasattr(inner, "peft_config") and hasattr(inner, "disable_adapter") else None


def adapter_is_fresh(model: nn.Module) -> bool:
    """True if the adapter is LoRA and still adds nothing, so that disabling it changes nothing."""
    lora = [(n, p) for n, p in model.named_parameters() if "lora_" in n]
    zero = [p for n, p in lora if "lora_B" in n or "lora_embedding_A" in n]
    return bool(lora) and not any(bool(p.detach().any()) for p in zero)


@contextlib.contextmanager
def adapter(model: Any, name: str) -> Iterator[None]:
    """The peft model with adapter `name` ("base": none) active, then as it was."""
    active, flags = model.active_adapter, {p: p.requires_grad for p in model.parameters()}
    try:
        with model.disable_adapter() if name == "base" else contextlib.nullcontext():
            if name != "base":
                model.set_adapter(name)
            yield
    finally:
        if name != "base":
            model.set_adapter(active)
        for p, requires_grad in flags.items():  # peft sets these at every switch
            p.requires_grad_(requires_grad)
