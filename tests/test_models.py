"""models.py: hidden states and head of every family against the model's own logits path."""

import copy
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from tolerances import FP32
from torch import Tensor, nn

from ppo_kernels import logprobs_from_hidden
from ppo_kernels.models import (
    AutoModelForCausalLMWithValueHead,
    AutoModelForSeq2SeqLMWithValueHead,
    PolicyAndValue,
    hidden_states,
    lm_head,
    position_ids,
    sequence_scores,
    token_values,
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
ENCODER = SMALL | {"num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 8}

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
    # Not on the list: read after a look at their own logits.
    "gptj": ("gptj", GPT2 | {"rotary_dim": 4}),
    "pegasus": ("pegasus", BART),
    "granitemoeshared": (
        "granitemoeshared",
        LLAMA
        | {"logits_scaling": 1.7, "num_local_experts": 4, "num_experts_per_tok": 2}
        | {"shared_intermediate_size": 16},
    ),
    "hyperclovax": ("hyperclovax", LLAMA | {"logits_scaling": 1.7}),
}

# Both supported lines of transformers have all of these but the newest.
KNOWN = transformers.models.auto.configuration_auto.CONFIG_MAPPING
FAMILIES = {k: v for k, v in FAMILIES.items() if v[0] != "hyperclovax" or v[0] in KNOWN}


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
    """Of every trained parameter, of a loss that weighs each token differently.

    In units of the largest entry of all (if above 1): rounding errors are of that size.
    """
    weights = torch.linspace(-1, 1, outputs[0].numel()).view_as(outputs[0])
    loss = (weights * outputs[0]).sum() + (weights.flip(0) * outputs[1]).sum()
    model.zero_grad()
    loss.backward()
    grads = {k: p.grad for k, p in model.named_parameters() if p.grad is not None}
    unit = max(1.0, *(float(g.abs().max()) for g in grads.values()))
    return {k: g / unit for k, g in grads.items()}


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
    def refuse(module: nn.Module, args: tuple[Tensor, ...]) -> None:
        # The one look at an unlisted model's own logits takes two tokens.
        assert args[0].shape[:2] == (1, 2), "the lm head was run"

    hook = model.get_output_embeddings().register_forward_pre_hook(refuse)
    yield
    hook.remove()


@pytest.mark.parametrize("family", FAMILIES)
def test_family(family: str) -> None:
    model = build(*FAMILIES[family])
    assert_same_path(model)
    with logits_forbidden(model):
        hidden_states(model, **random_inputs(model)[0])


# ------------------------------------------------------------------------------ left padding


@pytest.mark.parametrize("family", ["gpt2", "llama", "opt-projected", "bloom", "mpt", "falcon"])
def test_left_padding_changes_nothing(family: str) -> None:
    """No position_ids are given: they come from the attention mask."""
    model = build(*FAMILIES[family])
    ids = torch.randint(3, V, (1, T))
    padded = torch.cat([torch.zeros(1, 4, dtype=torch.long), ids], dim=1)
    mask = (torch.arange(T + 4) >= 4).long().unsqueeze(0)
    alone = hidden_states(model, input_ids=ids)
    within = hidden_states(model, input_ids=padded, attention_mask=mask)
    torch.testing.assert_close(within[:, 4:], alone, **FP32)


def test_right_padding_is_the_models_own_default() -> None:
    model = build(*FAMILIES["gpt2"])
    ids = torch.randint(3, V, (1, T))
    mask = (torch.arange(T) < 6).long().unsqueeze(0)
    got = lm_head(model).logits(hidden_states(model, input_ids=ids, attention_mask=mask))
    torch.testing.assert_close(got, model(ids, attention_mask=mask).logits, **FP32)


def test_position_ids() -> None:
    mask = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 0], [0, 0, 0, 0]])
    want = [[0, 0, 0, 1], [0, 1, 2, 3], [0, 0, 0, 0]]
    assert position_ids(mask).tolist() == want


def test_given_position_ids_are_kept() -> None:
    model = build(*FAMILIES["gpt2"])
    ids = torch.randint(3, V, (1, T))
    inputs = {"attention_mask": torch.ones_like(ids), "position_ids": torch.arange(5, 5 + T)[None]}
    got = lm_head(model).logits(hidden_states(model, input_ids=ids, **inputs))
    torch.testing.assert_close(got, model(ids, **inputs).logits, **FP32)


# -------------------------------------------------------------------------------------- peft

LORA = {"r": 4, "lora_alpha": 12, "init_lora_weights": False}


def lora(model: nn.Module, **fields: Any) -> nn.Module:
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(model, peft.LoraConfig(**(LORA | fields)))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.normal_(0.0, 0.2)
    return model.eval()


@pytest.mark.parametrize(
    "fields",
    [
        {"target_modules": ["q_proj"]},
        {"target_modules": ["q_proj", "lm_head"]},
        {"target_modules": ["lm_head"], "use_rslora": True},
        {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
        {"target_modules": ["embed_tokens"]},
    ],
    ids=["body", "head", "head-rslora", "modules_to_save", "embedding"],
)
@pytest.mark.filterwarnings("ignore:Model with `tie_word_embeddings:UserWarning")
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_lora(fields: dict[str, Any], tied: bool) -> None:
    base = build("llama", LLAMA | {"tie_word_embeddings": tied})
    inputs, labels = random_inputs(base)
    before = ours(base, inputs, labels)[0]
    model = lora(base, **fields)
    assert_same_path(model)
    with_adapter = ours(model, inputs, labels)[0]
    with model.disable_adapter():
        got = ours(model, inputs, labels)
        torch.testing.assert_close(got, theirs(model, inputs, labels), **FP32)
        torch.testing.assert_close(got[0], before, **FP32)
    assert (with_adapter - before).abs().max() > 0.01
    if "modules_to_save" not in fields:
        model.merge_adapter()
        got = ours(model, inputs, labels)
        torch.testing.assert_close(got, theirs(model, inputs, labels), **FP32)
        model.unmerge_adapter()


def test_lora_two_adapters_and_a_choice() -> None:
    peft = pytest.importorskip("peft")
    model = lora(build("llama", LLAMA), target_modules=["lm_head"])
    other = peft.LoraConfig(target_modules=["lm_head"], **(LORA | {"r": 2}))
    model.add_adapter("second", other)
    inputs, labels = random_inputs(model)
    first = ours(model, inputs, labels)
    model.set_adapter("second")
    second = ours(model, inputs, labels)
    torch.testing.assert_close(second, theirs(model, inputs, labels), **FP32)
    assert (first[0] - second[0]).abs().max() > 0.01
    model.base_model.set_adapter(["default", "second"])
    both = ours(model, inputs, labels)
    torch.testing.assert_close(both, theirs(model, inputs, labels), **FP32)


def test_lora_that_no_weight_expresses_is_refused() -> None:
    dora = lora(build("llama", LLAMA), target_modules=["lm_head"], use_dora=True)
    with pytest.raises(ValueError, match="LlamaForCausalLM carries a LoRA variant"):
        lm_head(dora)
    dropped = lora(build("llama", LLAMA), target_modules=["lm_head"], lora_dropout=0.5)
    assert_same_path(dropped)
    dropped.train()
    with pytest.raises(ValueError, match=r"lora_dropout=0\.5 in training mode"):
        lm_head(dropped)


def test_prompt_learning_is_refused() -> None:
    peft = pytest.importorskip("peft")
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    model = peft.get_peft_model(build("llama", LLAMA), config)
    with pytest.raises(ValueError, match="PROMPT_TUNING adds virtual tokens"):
        hidden_states(model, input_ids=torch.ones(1, 2, dtype=torch.long))


# ------------------------------------------------------------- models that are not on the list


class Upcasting(nn.Sequential):
    """The wrapper that many LoRA recipes put around the head."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).float()


class Squared(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) ** 2


def odd_llama(change: Any) -> nn.Module:
    """A Llama whose forward was replaced by one that changes the logits."""
    model = build("llama", LLAMA)
    forward = model.forward

    def changed(*args: Any, **kwargs: Any) -> Any:
        out = forward(*args, **kwargs)
        out.logits = change(out.logits)
        return out

    model.forward = changed
    return model


def test_upcasting_head_is_read() -> None:
    model = build("llama", LLAMA)
    model.lm_head = Upcasting(model.lm_head)
    assert_same_path(model)


def test_unknown_forward_that_agrees_is_read() -> None:
    assert_same_path(odd_llama(lambda logits: logits))


def test_a_head_of_zeros_is_looked_at_again() -> None:
    model = odd_llama(lambda logits: logits * 0.9)
    weight = model.lm_head.weight.detach().clone()
    nn.init.zeros_(model.lm_head.weight)
    lm_head(model)
    with torch.no_grad():
        model.lm_head.weight.copy_(weight)
    with pytest.raises(ValueError, match="computes logits that are not"):
        lm_head(model)


@pytest.mark.parametrize(
    "change",
    [
        lambda z: z * 0.9,
        lambda z: 30 * torch.tanh(z / 30),
        lambda z: z[..., :-2],
        lambda z: z + torch.arange(V) / 100,
    ],
    ids=["scaled", "capped", "cut", "shifted"],
)
def test_unknown_forward_that_differs_is_refused(change: Any) -> None:
    model = odd_llama(change)
    with torch.no_grad():
        model.lm_head.weight.mul_(1e-3)
    state = torch.get_rng_state()
    with pytest.raises(ValueError, match=r"LlamaForCausalLM .* computes logits that are not"):
        lm_head(model)
    assert torch.equal(state, torch.get_rng_state())
    assert not model.training and not model._forward_pre_hooks
    assert not model.lm_head._forward_pre_hooks and not model.model._forward_hooks


def test_layers_between_backbone_and_head_are_refused() -> None:
    model = build("bert", ENCODER | {"is_decoder": True})
    with pytest.raises(ValueError, match="changes the hidden states between backbone and lm head"):
        hidden_states(model, input_ids=torch.ones(1, 2, dtype=torch.long))


def test_heads_that_are_no_linear_layer_are_refused() -> None:
    model = build("llama", LLAMA)
    model.lm_head = Squared(H, V)
    with pytest.raises(ValueError, match="computes logits that are not"):
        lm_head(model)
    model.lm_head = nn.Sequential(nn.Linear(H, H), nn.Linear(H, V))
    with pytest.raises(ValueError, match=r"is a torch.nn.*Sequential, not an nn.Linear"):
        lm_head(model)


def test_other_refusals() -> None:
    model = build("llama", LLAMA)
    with pytest.raises(ValueError, match="Linear is not a transformers model"):
        lm_head(nn.Linear(2, 2))
    with pytest.raises(ValueError, match=r"LlamaModel has no (lm head|backbone)"):
        hidden_states(model.model, input_ids=torch.ones(1, 2, dtype=torch.long))
    with pytest.raises(TypeError, match="labels"):
        hidden_states(model, input_ids=torch.ones(1, 2, dtype=torch.long), labels=None)
    with pytest.raises(ValueError, match="needs decoder_input_ids"):
        hidden_states(build("t5", T5), input_ids=torch.ones(1, 2, dtype=torch.long))
    model.lm_head.weight = nn.Parameter(torch.zeros(V * H), requires_grad=False)
    with pytest.raises(ValueError, match=r"shape \(2144,\), not \[V, H\]: it is sharded"):
        lm_head(model)
    model.lm_head.weight = nn.Parameter(torch.zeros(V, H, dtype=torch.uint8), requires_grad=False)
    with pytest.raises(ValueError, match=r"quantised \(torch.uint8\)"):
        lm_head(model)
    bart = build("bart", BART)
    bart.final_logits_bias = torch.zeros(3, V)
    with pytest.raises(ValueError, match="final_logits_bias of shape"):
        lm_head(bart)


# -------------------------------------------------------------------------- value-head models


def wrap(family: str, **options: Any) -> Any:
    model = build(*FAMILIES[family])
    seq2seq = model.config.is_encoder_decoder
    cls = AutoModelForSeq2SeqLMWithValueHead if seq2seq else AutoModelForCausalLMWithValueHead
    return cls.from_pretrained(model, **options).eval()


@pytest.mark.parametrize("family", ["gpt2", "opt-projected", "gemma2", "t5-tied", "bart"])
def test_value_head_model(family: str) -> None:
    model = wrap(family)
    inputs, _ = random_inputs(model)
    with logits_forbidden(model.pretrained_model):
        out = model(**inputs)
    assert out.logits is None
    torch.testing.assert_close(out.hidden_states, hidden_states(model, **inputs))
    own = model.pretrained_model(**inputs, output_hidden_states=True)
    torch.testing.assert_close(model(**inputs, return_logits=True).logits, own.logits, **FP32)
    # The value head reads the last hidden state, in T5 before it is scaled for the lm head.
    last = (own.decoder_hidden_states if "decoder_input_ids" in inputs else own.hidden_states)[-1]
    want = model.v_head.summary(last).squeeze(-1)
    if family == "opt-projected":
        want = model.v_head.summary(out.hidden_states).squeeze(-1)
    torch.testing.assert_close(out.values, want, **FP32)


def test_value_head_options() -> None:
    model = wrap("gpt2", summary_dropout_prob=0.3, v_head_init_strategy="normal")
    assert model.v_head.dropout.p == 0.3
    assert not model.v_head.summary.bias.any()
    assert 0.1 < model.v_head.summary.weight.detach().std() < 0.3
    assert wrap("gpt2").v_head.dropout.p == 0.1
    with pytest.raises(ValueError, match="v_head_init_strategy must be None or 'normal'"):
        wrap("gpt2", v_head_init_strategy="uniform")
    with pytest.raises(TypeError, match="in memory takes no v_head_init"):
        wrap("gpt2", v_head_init="normal")
    with pytest.raises(TypeError, match="already has values"):
        AutoModelForCausalLMWithValueHead.from_pretrained(wrap("gpt2"))


def test_values_are_fp32_whatever_the_model() -> None:
    model = wrap("llama")
    model.pretrained_model.bfloat16()
    ids = torch.randint(3, V, (B, T))
    out = model(ids)
    assert out.hidden_states.dtype == torch.bfloat16
    assert out.values.dtype == model.v_head.summary.weight.dtype == torch.float32
    with torch.autocast("cpu", torch.bfloat16):
        values = model.v_head(out.hidden_states)
    torch.testing.assert_close(values, out.values, rtol=0, atol=0)


def test_state_dict_and_parameter_groups() -> None:
    model, other = wrap("gpt2"), wrap("gpt2")
    state = model.state_dict()
    assert "v_head.summary.weight" in state
    other.load_state_dict(state)
    ids = torch.randint(3, V, (B, T))
    torch.testing.assert_close(other(ids).values, model(ids).values)
    policy, value = list(model.policy_parameters()), list(model.value_parameters())
    assert len(value) == 2
    assert {id(p) for p in policy + value} == {id(p) for p in model.parameters()}


def test_generate_and_config_pass_through() -> None:
    model = wrap("llama")
    ids = torch.randint(3, V, (B, 3))
    options = {"max_new_tokens": 4, "do_sample": False, "attention_mask": torch.ones_like(ids)}
    got = model.generate(input_ids=ids, **options)
    assert torch.equal(got, model.pretrained_model.generate(input_ids=ids, **options))
    assert model.config is model.pretrained_model.config
    assert model.generation_config is model.pretrained_model.generation_config
    with pytest.raises(ValueError, match="disable_adapter needs a peft model"):
        model.disable_adapter()


def checkpointed(model: nn.Module) -> bool:
    return any(getattr(module, "gradient_checkpointing", False) for module in model.modules())


@pytest.mark.parametrize("family", ["llama", "t5-tied", "bart"])
def test_gradient_checkpointing_gives_the_same_gradients(family: str) -> None:
    model = wrap(family, summary_dropout_prob=0.0).train()
    inputs, labels = random_inputs(model)

    def run() -> dict[str, Tensor]:
        out, head = model(**inputs), lm_head(model)
        logp = logprobs_from_hidden(out.hidden_states, head.weight, labels, **head.kwargs())
        return gradients(model, (logp, out.values))

    plain = run()
    model.gradient_checkpointing_enable()
    assert checkpointed(model.pretrained_model)
    torch.testing.assert_close(run(), plain, **FP32)
    model.gradient_checkpointing_disable()
    assert not checkpointed(model.pretrained_model)


def test_user_objects_are_left_alone() -> None:
    model = build(*FAMILIES["t5-tied"]).train()
    config, keys = model.config.to_dict(), list(model.state_dict())
    inputs, labels = random_inputs(model)
    copies = {k: v.clone() for k, v in inputs.items()}
    ours(model, inputs, labels)
    assert model.training and model.config.to_dict() == config
    assert list(model.state_dict()) == keys
    assert inputs.keys() == copies.keys()
    assert all(torch.equal(inputs[k], copies[k]) for k in copies)


# ------------------------------------------------------------------------------------ saving


def values_of(model: nn.Module) -> Tensor:
    inputs = {"input_ids": torch.arange(3, 12).view(1, -1)}
    if model.config.is_encoder_decoder:
        inputs["decoder_input_ids"] = inputs["input_ids"]
    with torch.no_grad():
        return model.eval()(**inputs).values


@pytest.mark.parametrize("family", ["gpt2", "llama", "t5-tied"])
def test_save_and_load(family: str, tmp_path: Path) -> None:
    model = wrap(family)
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path)
    torch.testing.assert_close(values_of(again), values_of(model), **FP32)
    plain = type(model).from_pretrained(model.pretrained_model).eval()
    assert (values_of(plain) - values_of(model)).abs().max() > 0.01
    plain.load_v_head(tmp_path)
    torch.testing.assert_close(values_of(plain), values_of(model), **FP32)
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(ValueError, match="no v_head weight is found in"):
        plain.load_v_head(empty)


@pytest.mark.parametrize("family", ["gpt2", "llama", "t5-tied"])
def test_a_state_dict_takes_the_place_of_the_weights(family: str, tmp_path: Path) -> None:
    model, other = wrap(family), wrap(family)
    with torch.no_grad():
        for p in other.parameters():
            p += 0.1
    model.save_pretrained(tmp_path, state_dict=other.state_dict())
    again = type(model).from_pretrained(tmp_path)
    torch.testing.assert_close(values_of(again), values_of(other), **FP32)
    assert (values_of(again) - values_of(model)).abs().max() > 0.01


def test_only_the_main_process_writes_a_value_head(tmp_path: Path) -> None:
    wrap("gpt2").save_pretrained(tmp_path, is_main_process=False)
    assert not (tmp_path / "v_head.safetensors").exists()


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_hidden_states_go_on_from_a_cache(family: str) -> None:
    model, ids = build(*FAMILIES[family]).eval(), torch.arange(3, 17).view(2, 7)
    mask = torch.ones_like(ids)
    mask[0, :2] = 0
    with torch.no_grad():
        whole = hidden_states(model, input_ids=ids, attention_mask=mask)
        positions = position_ids(mask)[:, :5]
        start = {"input_ids": ids[:, :5], "attention_mask": mask[:, :5], "position_ids": positions}
        cache = model(**start, use_cache=True).past_key_values
        rest = {"input_ids": ids[:, 5:], "attention_mask": mask, "past_key_values": cache}
        torch.testing.assert_close(hidden_states(model, **rest), whole[:, 5:], **FP32)


@pytest.mark.parametrize("layout", ["safetensors", "sharded", "bin"])
def test_directories_of_trl_are_read(layout: str, tmp_path: Path) -> None:
    """TRL classic saves the LM's own names and `v_head.*` in one state dict."""
    safetensors = pytest.importorskip("safetensors.torch")
    model = wrap("llama")
    model.pretrained_model.save_pretrained(tmp_path)
    state = dict(model.pretrained_model.state_dict())
    head = {f"v_head.{k}": v for k, v in model.v_head.state_dict().items()}
    whole = tmp_path / "model.safetensors"
    if layout == "safetensors":
        safetensors.save_file(state | head, whole, metadata={"format": "pt"})
    elif layout == "bin":
        whole.unlink()
        torch.save(state | head, tmp_path / "pytorch_model.bin")
    else:
        whole.unlink()
        files = {
            "model-00001-of-00002.safetensors": state,
            "model-00002-of-00002.safetensors": head,
        }
        for file, part in files.items():
            safetensors.save_file(part, tmp_path / file, metadata={"format": "pt"})
        index = {k: file for file, part in files.items() for k in part}
        text = json.dumps({"metadata": {"total_size": 1}, "weight_map": index})
        (tmp_path / "model.safetensors.index.json").write_text(text)
    again = AutoModelForCausalLMWithValueHead.from_pretrained(tmp_path)
    torch.testing.assert_close(values_of(again), values_of(model), **FP32)


def test_a_plain_directory_gets_a_fresh_head(tmp_path: Path) -> None:
    build(*FAMILIES["gpt2"]).save_pretrained(tmp_path)
    model = AutoModelForCausalLMWithValueHead.from_pretrained(
        str(tmp_path), torch_dtype=torch.bfloat16, v_head_init_strategy="normal"
    )
    assert next(model.pretrained_model.parameters()).dtype == torch.bfloat16
    assert not model.v_head.summary.bias.any()


def test_peft_wrapper_saves_and_loads(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    build(*FAMILIES["llama"]).save_pretrained(tmp_path / "base")
    config = peft.LoraConfig(target_modules=["q_proj", "lm_head"], task_type="CAUSAL_LM", **LORA)
    model = AutoModelForCausalLMWithValueHead.from_pretrained(
        tmp_path / "base", peft_config=config
    ).eval()
    trained = [k for k, p in model.named_parameters() if p.requires_grad]
    assert trained and all("lora_" in k or k.startswith("v_head.") for k in trained)
    adapted = values_of(model)
    with model.disable_adapter():
        assert (values_of(model) - adapted).abs().max() > 0.01
    model.save_pretrained(tmp_path / "adapter")
    again = AutoModelForCausalLMWithValueHead.from_pretrained(tmp_path / "adapter")
    torch.testing.assert_close(values_of(again), adapted, **FP32)
    assert any(p.requires_grad for p in again.pretrained_model.parameters())


# ------------------------------------------------------------------------ separate value model


def scalar_model(auto: str, model_type: str, fields: dict[str, Any], num_labels: int = 1) -> Any:
    config = transformers.AutoConfig.for_model(model_type, **fields)
    config.num_labels = num_labels
    return getattr(transformers, auto).from_config(config).eval()


@pytest.mark.parametrize(("model_type", "fields"), [("gpt2", GPT2), ("llama", LLAMA)])
def test_policy_and_token_classifier(model_type: str, fields: dict[str, Any]) -> None:
    value_model = scalar_model("AutoModelForTokenClassification", model_type, fields)
    model = PolicyAndValue(build(*FAMILIES["llama"]), value_model)
    ids = torch.randint(3, V, (B, T))
    out = model(ids, attention_mask=torch.ones_like(ids))
    torch.testing.assert_close(out.values, value_model(ids).logits.squeeze(-1), **FP32)
    torch.testing.assert_close(out.hidden_states, hidden_states(model.policy, input_ids=ids))
    assert out.logits is None and out.values.dtype == torch.float32
    groups = [list(model.policy_parameters()), list(model.value_parameters())]
    assert sum(map(len, groups)) == len(list(model.parameters()))
    model.generate(input_ids=ids, max_new_tokens=2)
    model.gradient_checkpointing_enable()
    assert checkpointed(value_model) and checkpointed(model.policy)


def test_policy_with_value_head_model_as_critic() -> None:
    critic = wrap("gpt2")
    model = PolicyAndValue(build(*FAMILIES["llama"]), critic)
    ids = torch.randint(3, V, (B, T))
    torch.testing.assert_close(model(ids).values, critic(ids).values)


@pytest.mark.parametrize(("model_type", "fields"), [("gpt2", GPT2), ("llama", LLAMA), ("opt", OPT)])
@pytest.mark.parametrize("side", ["left", "right"])
def test_sequence_scores(model_type: str, fields: dict[str, Any], side: str) -> None:
    """Equal to the classifier's own score of the row alone, though pad == eos ends the text."""
    fields = fields | {"pad_token_id": 2, "eos_token_id": 2}
    model = scalar_model("AutoModelForSequenceClassification", model_type, fields)
    row = torch.tensor([[5, 9, 17, 2]])
    with torch.no_grad():
        want = token_values(model, input_ids=row)[0, -1]
        no_eos = model(row[:, :3]).logits[0, 0]
    pad, n = torch.full((1, 3), 2), torch.ones(1, 4, dtype=torch.long)
    parts = ((pad, 0 * pad), (row, n)) if side == "left" else ((row, n), (pad, 0 * pad))
    ids, mask = (torch.cat(x, dim=1) for x in zip(*parts))
    got = sequence_scores(model, ids, mask)
    torch.testing.assert_close(got, want.view(1), **FP32)
    assert got.dtype == torch.float32
    shorter = sequence_scores(model, row[:, :3], n[:, :3])
    torch.testing.assert_close(shorter, no_eos.view(1), **FP32)
    assert sequence_scores(model, ids, 0 * mask).isnan().all()
    with pytest.raises(ValueError, match="attention_mask must have shape"):
        sequence_scores(model, ids, mask[:, 1:])


def test_peft_reward_model() -> None:
    peft = pytest.importorskip("peft")
    base = scalar_model("AutoModelForSequenceClassification", "llama", LLAMA)
    config = peft.LoraConfig(task_type="SEQ_CLS", target_modules=["q_proj"], **LORA)
    model = peft.get_peft_model(base, config).eval()
    ids = torch.randint(3, V, (B, T))
    got = sequence_scores(model, ids, torch.ones_like(ids))
    torch.testing.assert_close(got, model(ids).logits.squeeze(-1), **FP32)


def test_models_without_a_scalar_head_are_refused() -> None:
    policy = build(*FAMILIES["llama"])
    with pytest.raises(ValueError, match="LlamaForCausalLM has no scalar head"):
        PolicyAndValue(policy, build(*FAMILIES["llama"]))
    two = scalar_model("AutoModelForTokenClassification", "llama", LLAMA, num_labels=2)
    with pytest.raises(ValueError, match=r"score of LlamaFor.* has 2 outputs.*num_labels=1"):
        PolicyAndValue(policy, two)
    bert = scalar_model("AutoModelForSequenceClassification", "bert", ENCODER)
    with pytest.raises(ValueError, match="BertForSequenceClassification has no scalar head"):
        sequence_scores(bert, torch.ones(1, 2, dtype=torch.long), torch.ones(1, 2))
    with pytest.raises(ValueError, match="LlamaForTokenClassification has no lm head"):
        PolicyAndValue(two, wrap("llama"))


# ------------------------------------------------------------------------------- two processes


def fsdp_model(tied: bool) -> Any:
    torch.manual_seed(0)
    model = build("llama", LLAMA | {"tie_word_embeddings": tied})
    return AutoModelForCausalLMWithValueHead(model, summary_dropout_prob=0.0)


def fsdp_loss(model: nn.Module, ids: Tensor) -> Tensor:
    out, head = model(ids), lm_head(model)
    hidden = out.hidden_states[:, :-1]
    logp = logprobs_from_hidden(hidden, head.weight, ids[:, 1:], **head.kwargs())
    return out.values.square().mean() - logp.mean()


def fsdp_worker(rank: int, file: str, ids: Tensor, wanted: dict[bool, dict[str, Tensor]]) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{file}", rank=rank, world_size=2
    )
    mesh = init_device_mesh("cpu", (2,))
    for tied, reshard in ((False, False), (False, True), (True, True)):
        model = fsdp_model(tied)
        for layer in model.pretrained_model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh, reshard_after_forward=reshard)
        with pytest.raises(ValueError, match="sharded by FSDP"):
            hidden_states(model, input_ids=ids)
        fsdp_loss(model, ids[rank : rank + 1]).backward()
        got = {k: p.grad.full_tensor() for k, p in model.named_parameters()}
        torch.testing.assert_close(got, wanted[tied], **FP32)
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
    # The mesh's gloo threads may outlive the interpreter's teardown, which then calls terminate().
    os._exit(0)


@pytest.mark.slow
def test_fsdp2_gradients_equal_one_process(tmp_path: Path) -> None:
    ids = torch.randint(3, V, (2, T))
    wanted = {}
    for tied in (False, True):
        model = fsdp_model(tied)
        fsdp_loss(model, ids).backward()
        wanted[tied] = {k: p.grad for k, p in model.named_parameters()}
    args = (str(tmp_path / "store"), ids, wanted)
    torch.multiprocessing.spawn(fsdp_worker, args, nprocs=2)
