"""Log-probs, entropies and values of a batch's response tokens, by one forward of any model."""

import dataclasses
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ppo_kernels import logprobs_from_hidden, logprobs_from_logits, modes
from ppo_kernels.models import LMHead, hidden_states, lm_head
from ppo_kernels.reference import CHUNK_ELEMENTS, upcast
from ppo_kernels.trainer.rollout import Batch


class Said(NamedTuple):
    """What a model says about a batch with n response tokens.

    tokens: logprobs, entropy and, if asked for, values of these, [B, L-1], 0 elsewhere; values
    [B, L]: of all positions; x: hidden states [n, H] for `head`, or logits [n, V], which exist only
    where there is no head to read.
    """

    tokens: dict[str, Tensor]
    values: Tensor | None
    x: Tensor
    head: LMHead | None

    def logits(self, rows: slice) -> Tensor:
        return self.x[rows] if self.head is None else self.head.logits(self.x[rows])


class Reader:
    """Asks a model: any LM; for values, one of ppo_kernels.models or any module whose forward
    returns (logits, .., values). adapter: what peft is switched to for that time.
    """

    def __init__(
        self, model: nn.Module, bf16: bool, dtype: torch.dtype, adapter: str | None = None
    ) -> None:
        self.model, self.bf16, self.dtype, self.adapter = model, bf16, dtype, adapter
        try:
            lm_head(model)
            self.has_head = True
        except ValueError:
            self.has_head = False

    def __call__(self, batch: Batch, temperature: float, with_values: bool = False) -> Said:
        inputs, head, values = batch.inputs(), None, None
        autocast = torch.autocast(batch.at.device.type, torch.bfloat16, enabled=self.bf16)
        with autocast, modes.adapter(self.model, self.adapter):
            if self.has_head:
                inputs.pop("position_ids", None)  # counted from attention_mask where they are taken
                if with_values:
                    x, values, _ = self.model(**inputs)
                else:
                    x = hidden_states(self.model, **inputs)
                head = lm_head(self.model)
                if self.bf16:
                    weight, bias = (
                        t if t is None else t.bfloat16() for t in (head.weight, head.bias)
                    )
                    head = dataclasses.replace(head, weight=weight, bias=bias)
            else:
                out = self.model(**inputs)
                x, values = out.logits if hasattr(out, "logits") else out[0], out[-1]
                if x is None:
                    kind = type(self.model).__name__
                    raise ValueError(f"{kind} returns no logits: give the model inside it instead")
        x = x.flatten(0, 1).index_select(0, batch.at)
        options = {"temperature": temperature, "return_entropy": True}
        if head is None:
            said = logprobs_from_logits(x, batch.labels, **options)
        else:
            x, options = x.to(head.weight.dtype), options | head.kwargs()
            said = logprobs_from_hidden(x, head.weight, batch.labels, **options)
        tokens = dict(zip(("logprobs", "entropy"), said))
        if with_values:
            values = upcast(values.reshape(batch.input_ids.shape))
            tokens["values"] = values.flatten()[batch.at]
        tokens = {name: batch.scatter(y.to(self.dtype)) for name, y in tokens.items()}
        return Said(tokens, values, x, head)


@torch.no_grad()
def full_kl(policy: Said, ref: Said, temperature: float) -> Tensor:
    """[n]: `sum_v p_v (ln p_v - ln q_v)`; at most about 64 MB of logits at a time."""
    V, other = (said.logits(slice(0)).shape[-1] for said in (policy, ref))
    if other != V:
        raise ValueError(f"kl_penalty='full' needs one vocabulary, got {V} and {other} tokens")
    parts = [upcast(policy.x.new_zeros(0))]
    step = max(1, CHUNK_ELEMENTS // V)
    for start in range(0, len(policy.x), step):
        z = (said.logits(slice(start, start + step)) for said in (policy, ref))
        p, q = ((upcast(y) / temperature).log_softmax(-1) for y in z)
        parts.append(torch.where(p > -torch.inf, p.exp() * (p - q), 0).sum(-1))
    return torch.cat(parts)
