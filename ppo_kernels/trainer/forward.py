"""Log-probs, entropies and values of a batch's response tokens, by one forward of any model."""

import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor, nn

from ppo_kernels import logprobs_from_hidden, logprobs_from_logits, modes
from ppo_kernels.models import hidden_states, lm_head
from ppo_kernels.reference import CHUNK_ELEMENTS, upcast
from ppo_kernels.trainer.rollout import Batch

# The logits of some of a batch's response tokens.
Logits = Callable[[slice], Tensor]


class Reader:
    """Asks a model: any LM; for values, one of ppo_kernels.models or any module whose forward
    returns (logits, .., values). adapter: what peft is switched to for that time.
    """

    def __init__(self, model: nn.Module, bf16: bool, adapter: str | None = None) -> None:
        self.model, self.bf16, self.adapter = model, bf16, adapter
        try:
            self.has_head = lm_head(model) is not None
        except ValueError:
            self.has_head = False

    def vocabulary(self, name: str, batch: Batch, with_values: bool = False) -> int:
        """How many logits the model has for a token; TypeError with its `name` if it has none."""
        try:
            with torch.no_grad(), modes.without_dropout(self.model):
                return self(batch, 1.0, with_values)[2](slice(0)).shape[-1]
        except Exception as error:
            kind, why = type(self.model).__name__, f"{type(error).__name__}: {error}"
            raise TypeError(f"{name} ({kind}) cannot score two tokens of a text: {why}") from error

    def __call__(
        self, batch: Batch, temperature: float, with_values: bool = False
    ) -> tuple[dict[str, Tensor], Tensor | None, Logits]:
        """logprobs, entropy and, if asked for, values of the response tokens, each [B, L-1] and 0
        elsewhere; values [B, L] of all positions; logits, as no more than a chunk is held at once.
        """
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
                head = lm_head(self.model)
                dtype = torch.bfloat16 if self.bf16 else head.weight.dtype
                bias = head.bias if head.bias is None else head.bias.to(dtype)
                head = dataclasses.replace(head, weight=head.weight.to(dtype), bias=bias)
        x = x.flatten(0, 1).index_select(0, batch.at)
        options = {"temperature": temperature, "return_entropy": True}
        if head is None:
            logprobs, entropy = logprobs_from_logits(x, batch.labels, **options)
        else:
            x, options = x.to(head.weight.dtype), options | head.kwargs()
            logprobs, entropy = logprobs_from_hidden(x, head.weight, batch.labels, **options)
        said = {"logprobs": logprobs, "entropy": entropy}
        if with_values:
            values = upcast(values.reshape(batch.input_ids.shape))
            said["values"] = values.flatten()[batch.at]

        def logits(rows: slice) -> Tensor:
            return x[rows] if head is None else head.logits(x[rows])

        return {name: batch.scatter(y) for name, y in said.items()}, values, logits


def full_kl(policy: Logits, ref: Logits, n: int, temperature: float) -> Tensor:
    """[n]: `sum_v p_v (ln p_v - ln q_v)`; at most about 64 MB of logits at a time."""
    V = policy(slice(0)).shape[-1]
    parts, step = [], max(1, CHUNK_ELEMENTS // V)
    for start in range(0, max(n, 1), step):
        z = (logits(slice(start, start + step)) for logits in (policy, ref))
        p, q = ((upcast(y) / temperature).log_softmax(-1) for y in z)
        parts.append(torch.where(p > -torch.inf, p.exp() * (p - q), 0).sum(-1))
    return torch.cat(parts)
