"""Log-probs, entropies and values of a batch's response tokens, with dropout off."""

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ppo_kernels import logprobs_from_hidden, logprobs_from_logits, reference
from ppo_kernels.models import LMHead, hidden_states, lm_head
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
    model: nn.Module, batch: Batch, readable: bool, policy: bool, bf16: bool
) -> States:
    """One forward. policy: with values, from a model of ppo_kernels.models, or from any
    `model(input_ids, attention_mask, position_ids)` that returns (logits, .., values).
    """
    inputs, head, values = batch.inputs(), None, None
    with torch.autocast(batch.at.device.type, torch.bfloat16, enabled=bf16):
        if readable:
            inputs.pop("position_ids", None)  # counted from attention_mask where they are taken
            if policy:
                x, values, _ = model(**inputs)
            else:
                x = hidden_states(model, **inputs)
            head = lm_head(model)
        else:
            out = model(**inputs)
            x = out.logits if hasattr(out, "logits") else out[0]
            values = out[-1] if policy else None
    if values is not None:
        values = values.squeeze(-1) if values.dim() == 3 else values
        values = reference.upcast(values)
    return States(x.flatten(0, 1).index_select(0, batch.at), head, values)


def token_logprobs(
    states: States, labels: Tensor, temperature: float, bf16: bool
) -> tuple[Tensor, Tensor]:
    """(logprobs, entropy) [n] fp32 of labels [n]; the [n, V] logits exist only without a head."""
    x, head, _ = states
    if head is None:
        return logprobs_from_logits(x, labels, temperature=temperature, return_entropy=True)
    dtype = torch.bfloat16 if bf16 else head.weight.dtype
    kwargs = head.kwargs()
    if kwargs["bias"] is not None:
        kwargs["bias"] = kwargs["bias"].to(dtype)
    kwargs |= {"temperature": temperature, "return_entropy": True}
    return logprobs_from_hidden(x.to(dtype), head.weight.to(dtype), labels, **kwargs)


def without_early_eos(
    states: States,
    batch: Batch,
    logprobs: Tensor,
    entropy: Tensor,
    eos_ids: list[int],
    min_new_tokens: int,
    temperature: float,
    bf16: bool,
) -> tuple[Tensor, Tensor]:
    """The distribution in which EOS has probability 0 at the first min_new_tokens tokens.

    With q = p(EOS): `ln p' = ln p - ln(1 - q)`, `H' = (H + sum q ln q) / (1 - q) + ln(1 - q)`.
    """
    early = (batch.steps < min_new_tokens).nonzero().squeeze(-1)
    if not eos_ids or not early.numel():
        return logprobs, entropy
    at = States(states.x.index_select(0, early), states.head, None)
    log_q = torch.stack(
        [token_logprobs(at, torch.full_like(early, eos), temperature, bf16)[0] for eos in eos_ids]
    )
    rest = (1 - log_q.exp().sum(0)).clamp(min=1e-6)
    log_rest = rest.log()
    new_entropy = (entropy[early] + (log_q.exp() * log_q).sum(0)) / rest + log_rest
    return logprobs.index_add(0, early, -log_rest), entropy.index_copy(0, early, new_entropy)


@torch.no_grad()
def full_kl(policy: States, ref: States, temperature: float) -> Tensor:
    """`sum_v p_v (ln p_v - ln q_v)` per token, in chunks: at most 64 MB of logits at a time."""
    out = []
    V = policy.x.shape[-1] if policy.head is None else policy.head.weight.shape[0]
    for rows in reference._row_chunks(policy.x.shape[0], V):
        logp, logq = (_log_softmax(s, rows, temperature) for s in (policy, ref))
        p = logp.exp()
        out.append(torch.where(p > 0, p * (logp - logq), 0).sum(-1))
    return torch.cat(out) if out else policy.x.new_zeros(0)


def _log_softmax(states: States, rows: slice, temperature: float) -> Tensor:
    x = states.x[rows]
    if states.head is None:
        return (reference.upcast(x) / temperature).log_softmax(-1)
    return (reference.upcast(states.head.logits(x)) / temperature).log_softmax(-1)


@contextlib.contextmanager
def inference_mode_of(*models: nn.Module | None, checkpointing: bool = False) -> Iterator[None]:
    """eval() everywhere, and every module's own mode again afterwards.

    checkpointing: modules that checkpoint their activations do it only in training mode. They,
    and not their children, are put there, with dropout rates of their own at 0.
    """
    modes = {m: m.training for model in models if model is not None for m in model.modules()}
    rates: list[tuple[nn.Module, str, Any]] = []
    try:
        for m in modes:
            m.training = checkpointing and bool(getattr(m, "gradient_checkpointing", False))
            for name, value in vars(m).items() if m.training else ():
                if "drop" in name and isinstance(value, float) and value:
                    rates.append((m, name, value))
        for m, name, _ in rates:
            setattr(m, name, 0.0)
        yield
    finally:
        for m, training in modes.items():
            m.training = training
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
        if name == "base":
            with model.disable_adapter():
                yield
        else:
            model.set_adapter(name)
            yield
    finally:
        if name != "base":
            model.set_adapter(active)
        for p, requires_grad in flags.items():  # peft sets these on every switch
            p.requires_grad_(requires_grad)
