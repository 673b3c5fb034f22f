"""Log-probs, entropies and values of a batch's response tokens, by one forward of any model."""

import dataclasses
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ppo_kernels import logprobs_from_hidden, logprobs_from_logits, modes
from ppo_kernels.models import LMHead, hidden_states, lm_head
from ppo_kernels.reference import CHUNK_ELEMENTS, upcast
from ppo_kernels.trainer.rollout import Batch


class States(NamedTuple):
    """What n response tokens are chosen by: hidden states x [n, H] for `head`, or logits x [n, V].

    values [B, L] are those of all positions, None if they were not asked for.
    """

    x: Tensor
    head: LMHead | None
    values: Tensor | None

    def logprobs(self, labels: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        """(logprobs, entropy) [n] fp32; [n, V] logits exist only where there is no head to read."""
        options = {"temperature": temperature, "return_entropy": True}
        if self.head is None:
            return logprobs_from_logits(self.x, labels, **options)
        weight = self.head.weight
        options |= self.head.kwargs()
        return logprobs_from_hidden(self.x.to(weight.dtype), weight, labels, **options)

    def log_softmax(self, rows: slice, temperature: float) -> Tensor:
        z = self.x[rows] if self.head is None else self.head.logits(self.x[rows])
        return (upcast(z) / temperature).log_softmax(-1)


class Reader:
    """Asks a model for States: any LM; for values, one of ppo_kernels.models or any module whose
    forward returns (logits, .., values). adapter: what peft is switched to for that time.
    """

    def __init__(self, model: nn.Module, bf16: bool, adapter: str | None = None) -> None:
        self.model, self.bf16, self.adapter = model, bf16, adapter
        try:
            lm_head(model)
            self.has_head = True
        except ValueError:
            self.has_head = False

    def __call__(self, batch: Batch, with_values: bool = False) -> States:
        inputs, head, values = batch.inputs(), None, None
        autocast = torch.autocast(batch.at.device.type, torch.bfloat16, enabled=self.bf16)
        with autocast, modes.adapter(self.model, self.adapter):
            if not self.has_head:
                out = self.model(**inputs)
                x, values = out.logits if hasattr(out, "logits") else out[0], out[-1]
                if x is None:
                    kind = type(self.model).__name__
                    raise ValueError(f"{kind} returns no logits: give the model inside it instead")
            else:
                inputs.pop("position_ids", None)  # counted from attention_mask where they are taken
                if with_values:
                    x, values, _ = self.model(**inputs)
                else:
                    x = hidden_states(self.model, **inputs)
                head = self._head()
        x = x.flatten(0, 1).index_select(0, batch.at)
        values = upcast(values.reshape(batch.input_ids.shape)) if with_values else None
        return States(x, head, values)

    def _head(self) -> LMHead:
        head = lm_head(self.model)
        dtype = torch.bfloat16 if self.bf16 else head.weight.dtype
        bias = None if head.bias is None else head.bias.to(dtype)
        return dataclasses.replace(head, weight=head.weight.to(dtype), bias=bias)


@torch.no_grad()
def full_kl(policy: States, ref: States, temperature: float) -> Tensor:
    """[n]: `sum_v p_v (ln p_v - ln q_v)`; at most about 64 MB of logits at a time."""
    n, V = len(policy.x), policy.x.shape[-1] if policy.head is None else len(policy.head.weight)
    other = ref.x.shape[-1] if ref.head is None else len(ref.head.weight)
    if other != V:
        raise ValueError(f"kl_penalty='full' needs one vocabulary, got {V} and {other} tokens")
    step = max(1, CHUNK_ELEMENTS // V)
    parts = [upcast(policy.x.new_zeros(0))]
    for rows in (slice(start, start + step) for start in range(0, n, step)):
        p, q = (states.log_softmax(rows, temperature) for states in (policy, ref))
        parts.append(torch.where(p > -torch.inf, p.exp() * (p - q), 0).sum(-1))
    return torch.cat(parts)
