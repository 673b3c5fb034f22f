"""models.py: hidden states and head of every family against the model's own logits path."""

import pytest
import tolerances
import torch

from ppo_kernels import logprobs_from_hidden
from ppo_kernels.models import (
    AutoModelForCausalLMWithValueHead,
    hidden_states,
    lm_head,
)

transformers = pytest.importorskip("transformers")


def test_gpt2_wrapper() -> None:
    config = transformers.GPT2Config(n_layer=2, n_embd=32, n_head=2, vocab_size=99)
    model = transformers.GPT2LMHeadModel(config).eval()
    ids = torch.randint(0, 99, (2, 7))
    wrapper = AutoModelForCausalLMWithValueHead.from_pretrained(model)
    out = wrapper(ids, attention_mask=torch.ones_like(ids))
    assert out.logits is None and out.values.shape == (2, 7)
    head = lm_head(model)
    ours = logprobs_from_hidden(out.hidden_states, head.weight, ids, **head.kwargs())
    want = model(ids).logits.log_softmax(-1).gather(-1, ids.unsqueeze(-1)).squeeze(-1)
    torch.testing.assert_close(ours, want, **tolerances.FP32)
    torch.testing.assert_close(hidden_states(model, input_ids=ids), out.hidden_states)
