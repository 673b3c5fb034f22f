"""models.py: hidden states and head of every family against the model's own logits path."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from tolerances import FP32
from torch import Tensor, nn

from ppo_kernels import logprobs_from_hidden
from ppo_kernels.models import (
    hidden_states,
    lm_head,
)

transformers = pytest.importorskip("transformers")

V, H, B, T = 67, 32, 2, 9

LLAMA = {
    "vocab_size": V,
    "hidden_size": H,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MOE = LLAMA | {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
GEMMA = LLAMA | {"head_dim": 8, "query_pre_attn_scalar": 8, "final_logit_softcapping": 3.0}
MLA = {
    "kv_lora_rank": 8,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
}
SEQ2SEQ = {"pad_token_id": 0, "eos_token_id": 1, "decoder_start_token_id": 0}
T5 = SEQ2SEQ | {
    "vocab_size": V,
    "d_model": H,
    "d_kv": 8,
    "d_ff": 48,
    "num_layers": 2,
    "num_heads": 4,
    "relative_attention_num_buckets": 8,
    "dropout_rate": 0.0,
}
BART = SEQ2SEQ | {
    "vocab_size": V,
    "d_model": H,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "max_position_embeddings": 64,
    "dropout": 0.0,
}
GPT2 = {
    "vocab_size": V,
    "n_embd": H,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 64,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
OPT = {k: v for k, v in LLAMA.items() if k not in ("intermediate_size", "num_key_value_heads")} | {
    "ffn_dim": 48,
    "dropout": 0.0,
}
SMALL = {"vocab_size": V, "hidden_size": H, "pad_token_id": 0, "eos_token_id": 2}

# name -> (model_type, configuration); the fields that trap a careless reading are never trivial.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("gpt2", GPT2),
    "gpt2-untied": ("gpt2", GPT2 | {"tie_word_embeddings": False}),
    "gpt_neox": (
        "gpt_neox",
        SMALL
        | {
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "intermediate_size": 48,
            "max_position_embeddings": 64,
        },
    ),
    "llama": ("llama", LLAMA),
    "llama-tied": ("llama", LLAMA | {"tie_word_embeddings": True}),
    "mistral": ("mistral", LLAMA | {"sliding_window": 4}),
    "mixtral": ("mixtral", LLAMA | {"num_local_experts": 4}),
    "qwen2": ("qwen2", LLAMA),
    "qwen3": ("qwen3", LLAMA | {"head_dim": 8}),
    "qwen3_moe": ("qwen3_moe", MOE | {"num_experts": 4, "head_dim": 8}),
    "gemma2": ("gemma2", GEMMA),
    "gemma2-uncapped": ("gemma2", GEMMA | {"final_logit_softcapping": None}),
    "gemma3_text": ("gemma3_text", GEMMA),
    "phi3": ("phi3", LLAMA),
    "olmo2": ("olmo2", LLAMA),
    "cohere": ("cohere", LLAMA | {"logit_scale": 0.37}),
    "cohere2": ("cohere2", LLAMA | {"logit_scale": 0.37}),
    "granite": ("granite", LLAMA | {"logits_scaling": 1.7, "residual_multiplier": 0.5}),
    "granitemoe": (
        "granitemoe",
        LLAMA | {"logits_scaling": 1.7, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "opt": ("opt", OPT),
    "opt-projected": ("opt", OPT | {"word_embed_proj_dim": 20}),
    "bloom": ("bloom", SMALL | {"n_layer": 2, "n_head": 4}),
    "mpt": (
        "mpt",
        {"vocab_size": V, "d_model": H, "n_heads": 4, "n_layers": 2, "max_seq_len": 64}
        # A field of the configuration that the model's forward ignores.
        | {"logit_scale": 0.5},
    ),
    "falcon": ("falcon", SMALL | {"num_hidden_layers": 2, "num_attention_heads": 4}),
    "smollm3": ("smollm3", LLAMA),
    "deepseek_v3": (
        "deepseek_v3",
        MOE
        | MLA
        | {"n_routed_experts": 4, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1}
        | {"num_key_value_heads": 4},
    ),
    "t5-tied": ("t5", T5 | {"tie_word_embeddings": True}),
    "t5-untied": (
        "t5",
        T5 | {"tie_word_embeddings": False, "feed_forward_proj": "gated-gelu"},
    ),
    "mt5": ("mt5", T5),
    "mt5-tied": ("mt5", T5 | {"tie_word_embeddings": True}),
    "bart": ("bart", BART),
}


def build(model_type: str, fields: dict[str, Any]) -> nn.Module:
    """A model from a random configuration, every parameter and buffer of the head random."""
    fields = copy.deepcopy(fields)
    config = transformers.AutoConfig.for_model(model_type, **fields)
    seq2seq = config.is_encoder_decoder
    auto = transformers.AutoModelForSeq2SeqLM if seq2seq else transformers.AutoModelForCausalLM
    model = auto.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            norm = parameter.dim() == 1 and name.endswith("weight")
            parameter.normal_(1.0 if norm else 0.0, 0.15)
        if hasattr(model, "final_logits_bias"):
            model.final_logits_bias.normal_()
    return model


def random_inputs(model: nn.Module) -> tuple[dict[str, Tensor], Tensor]:
    """(arguments of forward, labels [B, T])."""
    ids = torch.randint(3, V, (B, T))
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if model.config.is_encoder_decoder:
        inputs["attention_mask"][1, -3:] = 0
        inputs["decoder_input_ids"] = torch.randint(3, V, (B, T))
    return inputs, torch.randint(0, V, (B, T))


def ours(model: nn.Module, inputs: dict[str, Tensor], labels: Tensor) -> tuple[Tensor, Tensor]:
    head = lm_head(model)
    hidden = hidden_states(model, **inputs)
    return logprobs_from_hidden(
        hidden, head.weight, labels, return_entropy=True, chunk_tokens=5, **head.kwargs()
    )


def theirs(model: nn.Module, inputs: dict[str, Tensor], labels: Tensor) -> tuple[Tensor, Tensor]:
    logits = model(**inputs).logits
    logp = logits.log_softmax(-1)
    entropy = -(logp.exp() * logp).sum(-1)
    return logp.gather(-1, labels.unsqueeze(-1)).squeeze(-1), entropy


def gradients(model: nn.Module, outputs: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
    """Of every trained parameter, of a loss that weighs each token differently."""
    weights = torch.linspace(-1, 1, outputs[0].numel()).view_as(outputs[0])
    loss = (weights * outputs[0]).sum() + (weights.flip(0) * outputs[1]).sum()
    model.zero_grad()
    loss.backward()
    return {k: p.grad for k, p in model.named_parameters() if p.grad is not None}


def assert_same_path(model: nn.Module) -> None:
    """Log-probs, entropy and every parameter's gradient equal those of the model's own logits."""
    inputs, labels = random_inputs(model)
    got, want = ours(model, inputs, labels), theirs(model, inputs, labels)
    assert want[0].detach().std() > 0.1, "the test's logits are flat"
    torch.testing.assert_close(got, want, **FP32)
    got, want = gradients(model, got), gradients(model, want)
    assert got.keys() == want.keys() and len(want) > 0
    torch.testing.assert_close(got, want, **FP32)


@contextmanager
def logits_forbidden(model: nn.Module) -> Iterator[None]:
    def refuse(*args: Any) -> None:
        raise AssertionError("the lm head was run")

    hook = model.get_output_embeddings().register_forward_pre_hook(refuse)
    yield
    hook.remove()


@pytest.mark.parametrize("family", FAMILIES)
def test_family(family: str) -> None:
    model = build(*FAMILIES[family])
    assert_same_path(model)
    with logits_forbidden(model):
        hidden_states(model, **random_inputs(model)[0])
