"""Log-probs, entropies and values of a batch's response tokens."""

from typing import NamedTuple

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
    model: nn.Module, batch: Batch, readable: bool, with_values: bool, bf16: bool
) -> States:
    """One forward: of a model whose head is readable, or that returns (logits, .., values)."""
    inputs, head, values = batch.inputs(), None, None
    with torch.autocast(batch.at.device.type, torch.bfloat16, enabled=bf16):
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


def token_logprobs(
    states: States, labels: Tensor, temperature: float, bf16: bool
) -> tuple[Tensor, Tensor]:
    """(logprobs, entropy) [n] fp32; [n, V] logits exist only where there is no head to read."""
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
    kl = reference.upcast(policy.x.new_zeros(0))
    for p, q in zip(policy.x.split(rows), ref.x.split(rows)):
        p, q = policy.head.logits(p) if policy.head else p, ref.head.logits(q) if ref.head else q
        p, q = ((reference.upcast(z) / temperature).log_softmax(-1) for z in (p, q))
        kl = torch.cat([kl, torch.where(p > -torch.inf, p.exp() * (p - q), 0).sum(-1)])
    return kl
