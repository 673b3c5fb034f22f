"""Hugging Face language models without their logits: hidden states, the exact head, values.

`hidden_states(model, ..)` runs the backbone alone and returns what the lm head would be given;
`lm_head(model)` returns the head as tensors, so that

    head = lm_head(model)
    logprobs_from_hidden(hidden_states(model, **inputs), head.weight, labels, **head.kwargs())

equals the log-probs of `model(**inputs).logits` while no [B, T, V] tensor ever exists. Two
families whose configurations carry the same field may use it differently (`logits_scaling` divides
in Granite and multiplies in HyperCLOVA X; MPT has a `logit_scale` and ignores it), so nothing is
guessed: the families in `KNOWN` are tested, any other model is compared once with its own logits on
two tokens and refused if they differ.

Index convention of a causal model: position j of the outputs is the state after token j. It gives
the logprob of token j + 1 and the value V(tokens <= j); the trainer's collate does that shift.
"""

import importlib
import inspect
import json
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from ppo_kernels.ops.hidden import gathered
from ppo_kernels.reference import upcast

__all__ = [
    "AutoModelForCausalLMWithValueHead",
    "AutoModelForSeq2SeqLMWithValueHead",
    "LMHead",
    "PolicyAndValue",
    "ValueHead",
    "ValueHeadOutput",
    "hidden_states",
    "lm_head",
    "position_ids",
    "sequence_scores",
    "token_values",
]

# Families, by model_type, that tests/test_models.py compares with their own logits.
_KNOWN = """
    bart bloom cohere cohere2 deepseek_v3 falcon gemma2 gemma3_text gpt2 gpt_neox granite
    granitemoe llama mistral mixtral mpt olmo2 opt phi3 qwen2 qwen3 qwen3_moe smollm3
"""
KNOWN = frozenset(_KNOWN.split())
# Factor on the logits: whether the model or its config holds it, its name, its power.
SCALED = {
    "cohere": ("model", "logit_scale", 1),
    "cohere2": ("model", "logit_scale", 1),
    "cohere2_moe": ("model", "logit_scale", 1),
    "granite": ("config", "logits_scaling", -1),
    "granite_swa": ("config", "logits_scaling", -1),
    "granitemoe": ("config", "logits_scaling", -1),
    "granitemoehybrid": ("config", "logits_scaling", -1),
    "granitemoeshared": ("config", "logits_scaling", -1),
    "hyperclovax": ("config", "logits_scaling", 1),
}
SUPPORTED = (
    "supported are Hugging Face causal and seq2seq models whose logits are "
    "softcap * tanh(scale * (hidden @ weight.T + bias) / softcap), peft's LoRA and modules_to_save "
    "included; for other models use logprobs_from_logits(model(...).logits, labels)"
)


@dataclass(frozen=True)
class LMHead:
    """`logits = softcap * tanh(logit_scale * (h @ weight.T + bias) / softcap)`; weight [V, H]."""

    weight: Tensor
    bias: Tensor | None = None
    logit_scale: float = 1.0
    softcap: float | None = None

    def kwargs(self) -> dict[str, Any]:
        """What `logprobs_from_hidden(hidden, head.weight, labels, ...)` needs besides weight."""
        return {"bias": self.bias, "logit_scale": self.logit_scale, "softcap": self.softcap}

    def logits(self, hidden: Tensor) -> Tensor:
        """The [.., V] logits the ops avoid, for inspection and for small vocabularies."""
        z = nn.functional.linear(hidden.to(self.weight.dtype), self.weight, self.bias)
        z = z * self.logit_scale
        return z if self.softcap is None else self.softcap * torch.tanh(z / self.softcap)


# ------------------------------------------------------------------------------ hidden states


def hidden_states(model: nn.Module, **inputs: Any) -> Tensor:
    """[B, T, H]: exactly what enters the lm head of a causal or seq2seq LM; no logits are made.

    inputs: those of the model's forward (input_ids, attention_mask, decoder_input_ids, ..). Where
    the model takes position_ids and none are given, they are counted from the first attended
    token, so that left padding changes nothing (right padding: the model's own default).
    Gradients flow, the model's train/eval mode and adapters are respected. Raises ValueError for
    a model that cannot be read and names the reason.
    """
    hf = _unwrap(model)
    sharded = hasattr(hf.get_input_embeddings().weight, "full_tensor")
    if sharded and any(hasattr(m, "unshard") for m in (model, hf)):
        raise ValueError(
            f"{type(model).__name__} is sharded by FSDP, which gathers parameters only inside "
            "forward; call the forward of a fully sharded value-head model instead"
        )
    return _head_input(hf, _backbone_output(hf, inputs))


def position_ids(attention_mask: Tensor) -> Tensor:
    """[B, T] int64: 0 at the first attended token of each row, then counting; 0 before it."""
    leading = (attention_mask != 0).cumsum(-1).eq(0).sum(-1, keepdim=True)
    at = torch.arange(attention_mask.shape[-1], device=attention_mask.device)
    return (at - leading).clamp(min=0)


def _unwrap(model: nn.Module) -> nn.Module:
    """The transformers LM inside one of our wrappers or a peft model; anything else raises."""
    if isinstance(model, _Policy):
        model = model.lm
    model = _peft_base(model)
    if not (hasattr(model, "config") and hasattr(model, "get_output_embeddings")):
        raise ValueError(
            f"{type(model).__name__} is not a transformers model (unwrap DistributedDataParallel "
            f"and the like); {SUPPORTED}"
        )
    return model


def _peft_base(model: nn.Module) -> nn.Module:
    """The transformers model inside a peft model, which acts with the adapters in its layers."""
    if not hasattr(model, "get_base_model"):
        return model
    peft_config = getattr(model, "active_peft_config", None)
    if getattr(peft_config, "is_prompt_learning", False):
        raise ValueError(
            f"{type(model).__name__}: {peft_config.peft_type} adds virtual tokens inside the "
            f"model's own forward; {SUPPORTED}"
        )
    return model.get_base_model()


def _backbone(hf: nn.Module) -> nn.Module:
    """The module whose output is the last hidden state."""
    if _is_t5_like(hf):
        return hf.decoder
    # Gemma 3 of transformers 4 keeps it at `model` and names another prefix.
    inner = getattr(hf, "model", hf) if hf.base_model is hf else hf.base_model
    if inner is hf:
        raise ValueError(
            f"{type(hf).__name__} has no backbone at base_model_prefix="
            f"{getattr(hf, 'base_model_prefix', None)!r} or model; {SUPPORTED}"
        )
    return inner


def _is_t5_like(hf: nn.Module) -> bool:
    """T5 and its relatives keep encoder and decoder on the LM itself: there is no backbone."""
    return hf.base_model is hf and hasattr(hf, "encoder") and hasattr(hf, "decoder")


def _backbone_output(hf: nn.Module, inputs: dict[str, Any]) -> Tensor:
    """Last hidden state after the final norm, [B, T, H]."""
    if "labels" in inputs:
        raise TypeError("labels enter no hidden state; pass decoder_input_ids to a seq2seq model")
    inputs = {"use_cache": False, **inputs}
    if _is_t5_like(hf):
        return _t5_decoder_output(hf, **inputs)
    backbone = _backbone(hf)
    accepted = inspect.signature(backbone.forward).parameters
    mask = inputs.get("attention_mask")
    # Models that see images lay out their own positions.
    text_only = not hf.config.is_encoder_decoder and hf.config.get_text_config() is hf.config
    if (
        "position_ids" in accepted
        and inputs.get("position_ids") is None
        and isinstance(mask, Tensor)
        and mask.dim() == 2
        and text_only
    ):
        named = (inputs.get(name) for name in ("input_ids", "inputs_embeds"))
        given = next((x for x in named if x is not None), mask)
        # With a cache the mask speaks of the tokens in it, too.
        inputs["position_ids"] = position_ids(mask)[:, -given.shape[1] :]
    return backbone(**inputs)[0]


def _t5_decoder_output(
    hf: nn.Module,
    input_ids: Tensor | None = None,
    attention_mask: Tensor | None = None,
    decoder_input_ids: Tensor | None = None,
    decoder_attention_mask: Tensor | None = None,
    encoder_outputs: Any = None,
    inputs_embeds: Tensor | None = None,
    decoder_inputs_embeds: Tensor | None = None,
    use_cache: bool = False,
    **unknown: Any,
) -> Tensor:
    if unknown:
        raise TypeError(f"{type(hf).__name__} does not take {', '.join(sorted(unknown))}")
    if decoder_input_ids is None and decoder_inputs_embeds is None:
        raise ValueError(f"{type(hf).__name__} needs decoder_input_ids")
    if encoder_outputs is None:
        encoder_outputs = hf.encoder(
            input_ids=input_ids, attention_mask=attention_mask, inputs_embeds=inputs_embeds
        )
    return hf.decoder(
        input_ids=decoder_input_ids,
        attention_mask=decoder_attention_mask,
        inputs_embeds=decoder_inputs_embeds,
        encoder_hidden_states=encoder_outputs[0],
        encoder_attention_mask=attention_mask,
        use_cache=use_cache,
    )[0]


def _head_input(hf: nn.Module, output: Tensor) -> Tensor:
    """T5 multiplies by d_model**-0.5 between decoder and head.

    Which configurations do it differs between releases of transformers, so it is observed.
    """
    factor = _input_factor(hf) if _needs_watching(hf) else 1.0
    return output if factor == 1.0 else output * factor


# ----------------------------------------------------------------------------------- lm head


def lm_head(model: nn.Module) -> LMHead:
    """The head of a causal or seq2seq LM as it acts now: adapters, tying and scaling included.

    weight and bias are the parameters themselves where that is possible, so gradients reach them;
    LoRA on the head gives `W + scaling * B @ A` ([V, H], made anew at each call). Call it inside
    the step, not once: an adapter that is switched off or merged changes the answer. Raises
    ValueError for a head that cannot be expressed, never drops a part of it.
    """
    hf = _unwrap(model)
    head = _read_head(hf)
    if _needs_watching(hf):
        _input_factor(hf)
    return head


def _head_module(hf: nn.Module) -> nn.Module:
    module = hf.get_output_embeddings()
    if module is None:
        raise ValueError(f"{type(hf).__name__} has no lm head; {SUPPORTED}")
    return module


def _read_head(hf: nn.Module) -> LMHead:
    weight, bias = _linear(_head_module(hf), f"the lm head of {type(hf).__name__}")
    extra = getattr(hf, "final_logits_bias", None)
    if extra is not None:
        if extra.numel() != weight.shape[0]:
            raise ValueError(
                f"{type(hf).__name__}: final_logits_bias of shape {tuple(extra.shape)} is not one "
                f"number for each of the {weight.shape[0]} rows of the lm head; {SUPPORTED}"
            )
        extra = extra.reshape(-1).to(weight.device)
        bias = extra if bias is None else bias + extra
    config = hf.config
    scale = 1.0
    if config.model_type in SCALED:
        owner, name, power = SCALED[config.model_type]
        scale = float(getattr(hf if owner == "model" else config, name)) ** power
    softcap = getattr(config, "final_logit_softcapping", None)
    return LMHead(weight, bias, scale, None if softcap is None else float(softcap))


def _inside_peft(module: nn.Module) -> nn.Module:
    """The module that peft's layers were put around."""
    while hasattr(module, "original_module") or hasattr(module, "base_layer"):
        inner = "original_module" if hasattr(module, "original_module") else "base_layer"
        module = getattr(module, inner)
    return module


def _linear(module: nn.Module, what: str) -> tuple[Tensor, Tensor | None]:
    """(weight [V, H], bias) of the linear map that `module` applies now, peft layers included."""
    if hasattr(module, "modules_to_save") and hasattr(module, "original_module"):
        names = [] if module.disable_adapters else module.active_adapters
        names = [name for name in names if name in module.modules_to_save]
        inner = module.modules_to_save[names[0]] if names else module.original_module
        return _linear(inner, what)
    if hasattr(module, "lora_A") and hasattr(module, "base_layer"):
        return _lora_linear(module, what)
    if isinstance(module, nn.Sequential) and len(module) == 1:
        return _linear(module[0], what)
    if not isinstance(module, nn.Linear):
        kind = f"{type(module).__module__}.{type(module).__name__}"
        raise ValueError(f"{what} is a {kind}, not an nn.Linear; {SUPPORTED}")
    weight = gathered(module.weight)
    if weight.is_meta:
        raise ValueError(f"{what} is on the meta device: offloaded, or not loaded yet")
    if weight.dim() != 2 or weight.numel() == 0:
        raise ValueError(
            f"{what} has a weight of shape {tuple(weight.shape)}, not [V, H]: it is sharded (FSDP "
            "flat parameters, ZeRO-3); read it where it is gathered, inside the wrapped forward"
        )
    if not weight.is_floating_point():
        raise ValueError(f"{what} is quantised ({weight.dtype}); {SUPPORTED}")
    return weight, None if module.bias is None else gathered(module.bias)


def _lora_linear(module: nn.Module, what: str) -> tuple[Tensor, Tensor | None]:
    """W + sum of scaling * B @ A over the active adapters, differentiable in all of them."""
    weight, bias = _linear(module.base_layer, what)
    if module.disable_adapters:
        if module.merged:
            raise ValueError(f"{what}: LoRA is disabled but merged into the weight; unmerge first")
        return weight, bias
    if module.merged:
        return weight, bias
    for name in module.active_adapters:
        if name not in module.lora_A:
            continue
        if getattr(module, "lora_variant", {}).get(name) or module.use_dora.get(name):
            raise ValueError(f"{what} carries a LoRA variant (DoRA or similar); {SUPPORTED}")
        dropout = getattr(module.lora_dropout[name], "p", 0.0)
        if dropout and module.training:
            raise ValueError(
                f"{what} carries LoRA with lora_dropout={dropout} in training mode, which no "
                "weight expresses; set lora_dropout=0 or call eval()"
            )
        A, B, scaling = module.lora_A[name], module.lora_B[name], module.scaling[name]
        weight = weight + (scaling * (B.weight @ A.weight)).to(weight.dtype)
        if B.bias is not None:
            added = (scaling * B.bias).to(weight.dtype)
            bias = added if bias is None else bias + added
    return weight, bias


# ------------------------------------------------------------- models that are not known by name


# Model -> the factor between its backbone's output and its head's input, once it was watched.
_INPUT_FACTORS: WeakKeyDictionary[nn.Module, float] = WeakKeyDictionary()


def _needs_watching(hf: nn.Module) -> bool:
    """False where transformers' own forward of a listed family calls a plain nn.Linear."""
    family = hf.config.model_type in KNOWN
    forward = hf.__dict__.get("forward", type(hf).forward)
    own = getattr(forward, "__module__", "").startswith("transformers.models.")
    head = _inside_peft(_head_module(hf))
    return not (family and own and type(head).forward is nn.Linear.forward)


def _input_factor(hf: nn.Module) -> float:
    """The factor on the head's input (1 but for T5), after our reading was seen to be right.

    Compares our reading of the head with the model's own logits: one forward of two tokens,
    remembered as long as the model lives. The head is given its input enlarged, so that the logits
    reach 50: a softcap that is invisible at initialisation cannot hide.
    """
    if hf in _INPUT_FACTORS:
        return _INPUT_FACTORS[hf]
    read = _read_head(hf)
    seen: dict[str, Tensor] = {}

    def enlarge(module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        x = seen["input"] = args[0]
        largest = nn.functional.linear(x.to(read.weight.dtype), read.weight).abs().max()
        seen["enlarged"] = (x * (50 / largest.clamp(min=1e-6))).to(x.dtype)
        return (seen["enlarged"], *args[1:])

    hooks = [
        _backbone(hf).register_forward_hook(lambda m, a, out: seen.__setitem__("output", out[0])),
        _head_module(hf).register_forward_pre_hook(enlarge),
    ]
    ids = torch.tensor([[0, 1]], device=read.weight.device)
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "use_cache": False}
    if hf.config.is_encoder_decoder:
        inputs["decoder_input_ids"] = ids
    try:
        with torch.no_grad(), torch.random.fork_rng([ids.device] if ids.is_cuda else []):
            logits = hf(**inputs, return_dict=True).logits
    finally:
        for hook in hooks:
            hook.remove()
    name = f"{type(hf).__name__} (model_type {hf.config.model_type!r})"
    if seen.keys() != {"output", "input", "enlarged"}:
        raise ValueError(f"{name}: its forward does not go backbone -> lm head; {SUPPORTED}")
    factor = 1.0
    if _is_t5_like(hf) and not torch.equal(seen["input"], seen["output"]):
        factor = hf.config.d_model**-0.5
    if not _close(seen["input"], seen["output"] * factor):
        raise ValueError(
            f"{name} changes the hidden states between backbone and lm head; {SUPPORTED}"
        )
    if not _close(logits, read.logits(seen["enlarged"])):
        raise ValueError(
            f"{name} computes logits that are not logit_scale={read.logit_scale} and "
            f"softcap={read.softcap} on its {tuple(read.weight.shape)} head; {SUPPORTED}"
        )
    if logits.any():  # a head of zeros shows nothing yet
        _INPUT_FACTORS[hf] = factor
    return factor


def _close(a: Tensor, b: Tensor) -> bool:
    """Equal up to a few roundings of the coarser dtype, relative to the largest entry."""
    if a.shape != b.shape:
        return False
    eps = max(torch.finfo(a.dtype).eps, torch.finfo(b.dtype).eps)
    return bool((a.float() - b.float()).abs().max() <= 8 * eps * b.float().abs().max())


# --------------------------------------------------------------------------- policy and values


class ValueHeadOutput(NamedTuple):
    """hidden_states [B, T, H] that enter the lm head, values [B, T] fp32, logits only if asked."""

    hidden_states: Tensor
    values: Tensor
    logits: Tensor | None = None


class _Policy(nn.Module):
    """What the trainer needs of a policy with values, whatever makes the values."""

    @property
    def lm(self) -> nn.Module:
        """The policy as a transformers or peft model."""
        raise NotImplementedError

    @property
    def config(self) -> Any:
        return self.lm.config

    @property
    def generation_config(self) -> Any:
        return self.lm.generation_config

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        *,
        return_logits: bool = False,
        **inputs: Any,
    ) -> ValueHeadOutput:
        """hidden_states [B, T, H] as `hidden_states()`, values [B, T] fp32, logits if asked.

        inputs: further arguments of the model, decoder_input_ids for seq2seq (where T counts
        decoder positions).
        """
        inputs |= {"input_ids": input_ids, "attention_mask": attention_mask}
        if position_ids is not None:
            inputs["position_ids"] = position_ids
        hidden, values = self._hidden_and_values(inputs)
        logits = lm_head(self.lm).logits(hidden) if return_logits else None
        return ValueHeadOutput(hidden, values, logits)

    def _hidden_and_values(self, inputs: dict[str, Any]) -> tuple[Tensor, Tensor]:
        raise NotImplementedError

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        return self.lm.generate(*args, **kwargs)

    def disable_adapter(self) -> AbstractContextManager[None]:
        """peft's context: inside it the policy is the base model (values are not concerned)."""
        if not hasattr(self.lm, "disable_adapter"):
            raise ValueError(f"disable_adapter needs a peft model, got {type(self.lm).__name__}")
        return self.lm.disable_adapter()

    def gradient_checkpointing_enable(self, **kwargs: Any) -> None:
        _checkpointing(self.lm, "enable", **kwargs)

    def gradient_checkpointing_disable(self) -> None:
        _checkpointing(self.lm, "disable")

    def policy_parameters(self) -> Iterator[nn.Parameter]:
        return self.lm.parameters()

    def value_parameters(self) -> Iterator[nn.Parameter]:
        raise NotImplementedError


def _checkpointing(model: nn.Module, verb: str, **kwargs: Any) -> None:
    """transformers 5 renames gradient_checkpointing_* to activation_checkpointing_*."""
    old = f"gradient_checkpointing_{verb}"
    new = f"activation_checkpointing_{verb}"
    getattr(model, new if hasattr(model, new) else old)(**kwargs)


class ValueHead(nn.Module):
    """Dropout -> Linear(hidden_size, 1) in fp32: `v_head` and its options as in TRL classic.

    v_head_init_strategy: None (PyTorch's own), or "normal" (weight N(0, v_head_initializer_range),
    bias 0).
    """

    def __init__(
        self,
        hidden_size: int,
        summary_dropout_prob: float = 0.1,
        v_head_init_strategy: str | None = None,
        v_head_initializer_range: float = 0.2,
    ) -> None:
        super().__init__()
        if v_head_init_strategy not in (None, "normal"):
            raise ValueError(
                f"v_head_init_strategy must be None or 'normal', got {v_head_init_strategy!r}"
            )
        self.dropout = nn.Dropout(summary_dropout_prob) if summary_dropout_prob else nn.Identity()
        self.summary = nn.Linear(hidden_size, 1, dtype=torch.float32)
        if v_head_init_strategy == "normal":
            nn.init.normal_(self.summary.weight, std=v_head_initializer_range)
            nn.init.zeros_(self.summary.bias)

    def forward(self, hidden: Tensor) -> Tensor:
        return _scalar(self.summary, self.dropout(hidden))


def _scalar(head: nn.Module, hidden: Tensor) -> Tensor:
    """[..] of a head with one output, computed in the head's own dtype, also under autocast."""
    weight = next(p for p in head.parameters() if p.is_floating_point())
    with torch.autocast(hidden.device.type, enabled=False):
        return upcast(head(hidden.to(weight)).squeeze(-1))


V_HEAD_OPTIONS = ("summary_dropout_prob", "v_head_init_strategy", "v_head_initializer_range")


class _WithValueHead(_Policy):
    auto_class: str

    def __init__(self, pretrained_model: nn.Module, **v_head_options: Any) -> None:
        super().__init__()
        unknown = sorted(set(v_head_options) - set(V_HEAD_OPTIONS))
        if unknown:
            raise TypeError(
                f"{type(self).__name__} does not take {', '.join(unknown)}; "
                f"the value head takes {', '.join(V_HEAD_OPTIONS)}"
            )
        if isinstance(pretrained_model, _Policy):
            raise TypeError(f"{type(pretrained_model).__name__} already has values; pass its LM")
        hf = _unwrap(pretrained_model)
        head = _inside_peft(_head_module(hf))
        weight = next(head.parameters())
        hidden_size = getattr(head, "in_features", weight.shape[-1])
        self.pretrained_model = pretrained_model
        self.v_head = ValueHead(hidden_size, **v_head_options).to(weight.device)

    @property
    def lm(self) -> nn.Module:
        return self.pretrained_model

    def _hidden_and_values(self, inputs: dict[str, Any]) -> tuple[Tensor, Tensor]:
        hf = _unwrap(self)
        output = _backbone_output(hf, inputs)
        return _head_input(hf, output), self.v_head(output)

    def value_parameters(self) -> Iterator[nn.Parameter]:
        return self.v_head.parameters()

    def save_pretrained(
        self,
        path: str | Path,
        *,
        state_dict: dict[str, Tensor] | None = None,
        is_main_process: bool = True,
        **kwargs: Any,
    ) -> None:
        """The LM (or its adapter) as transformers (or peft) saves it, and v_head.safetensors.

        state_dict: what is saved instead of the own weights, named as in `state_dict()`.
        """
        from safetensors.torch import save_file

        own = {f"v_head.{k}": v for k, v in self.v_head.state_dict().items()}
        given = own if state_dict is None else state_dict
        head = {k: given.get(k, v).contiguous() for k, v in own.items()}
        if state_dict is not None:
            names = {k: k.removeprefix("pretrained_model.") for k in state_dict if k not in own}
            kwargs["state_dict"] = {name: state_dict[k] for k, name in names.items()}
        self.pretrained_model.save_pretrained(path, is_main_process=is_main_process, **kwargs)
        if is_main_process:
            save_file(head, Path(path) / "v_head.safetensors", metadata={"format": "pt"})

    @classmethod
    def from_pretrained(
        cls, pretrained_model_name_or_path: Any, *, peft_config: Any = None, **kwargs: Any
    ) -> Any:
        """From a hub name, a directory (ours, TRL's, peft's, a plain LM's), or an LM in memory.

        peft_config wraps the LM by `peft.get_peft_model`. The value head's options are
        summary_dropout_prob, v_head_init_strategy and v_head_initializer_range; every other
        keyword goes to transformers' from_pretrained. A value head that lies there is loaded,
        otherwise it is fresh; `load_v_head` reads one for an LM in memory.
        """
        options = {k: kwargs.pop(k) for k in V_HEAD_OPTIONS if k in kwargs}
        lm, name = pretrained_model_name_or_path, None
        if isinstance(lm, (str, Path)):
            name = str(lm)
            lm = _load(cls.auto_class, name, kwargs)
        elif kwargs:
            raise TypeError(f"an LM in memory takes no {', '.join(sorted(kwargs))}")
        if peft_config is not None:
            lm = _extra("peft").get_peft_model(lm, peft_config)
        wrapper = cls(lm, **options)
        if name is not None:
            state = _saved_v_head(name, kwargs)
            if state:
                wrapper.v_head.load_state_dict(state)
        return wrapper

    def load_v_head(self, path: str | Path) -> None:
        """Loads the value head that `save_pretrained`, or TRL, wrote to a directory."""
        state = _saved_v_head(str(path), {})
        if not state:
            raise ValueError(f"no v_head weight is found in {path}")
        self.v_head.load_state_dict(state)


class AutoModelForCausalLMWithValueHead(_WithValueHead):
    """A causal LM (`pretrained_model`) and a value head on its last hidden state (`v_head`).

    Habits of TRL classic, with two differences: the forward returns hidden states where TRL
    returns logits, and the state dict keeps the `pretrained_model.` prefix beside `v_head.`, so
    that it loads back. `lm_head(wrapper)` gives the head that turns the hidden states into
    log-probs.
    """

    auto_class = "AutoModelForCausalLM"


class AutoModelForSeq2SeqLMWithValueHead(_WithValueHead):
    """The same for an encoder-decoder LM: outputs are per decoder position.

    The value head reads the decoder's output before T5's d_model**-0.5, as in TRL.
    """

    auto_class = "AutoModelForSeq2SeqLM"


HUB_OPTIONS = ("cache_dir", "revision", "subfolder", "token", "local_files_only")


def _find_file(name: str, file: str, options: dict[str, Any]) -> str | None:
    """The path of a file of a local directory or hub repository, None if it has none."""
    from transformers.utils import cached_file

    return cached_file(
        name,
        file,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
        **{k: v for k, v in options.items() if k in HUB_OPTIONS},
    )


def _extra(name: str) -> ModuleType:
    """A module that `pip install ppo_kernels` alone does not bring."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        hint = f"{error}; run `pip install '.[train]'` in the project's folder"
        raise ModuleNotFoundError(hint, name=error.name) from None


def _load(auto_class: str, name: str, kwargs: dict[str, Any]) -> nn.Module:
    transformers = _extra("transformers")
    if _find_file(name, "adapter_config.json", kwargs) is None:
        return getattr(transformers, auto_class).from_pretrained(name, **kwargs)
    auto = getattr(_extra("peft"), auto_class.replace("Auto", "AutoPeft", 1))
    return auto.from_pretrained(name, is_trainable=True, **kwargs)


def _saved_v_head(name: str, options: dict[str, Any]) -> dict[str, Tensor]:
    """The state of a saved value head: from our own file, or among the weights as TRL saves."""
    for file in ("v_head.safetensors", "model.safetensors", "pytorch_model.bin"):
        index = _find_file(name, f"{file}.index.json", options)
        if index is not None:
            where = json.loads(Path(index).read_text())["weight_map"]
            file = next((f for k, f in where.items() if k.startswith("v_head.")), file)
        path = _find_file(name, file, options)
        if path is not None and (state := _read_v_head(path)):
            return state
        if path is not None and file.endswith("model.safetensors"):
            return {}
    return {}


def _read_v_head(path: str) -> dict[str, Tensor]:
    prefix = "v_head."
    if path.endswith(".safetensors"):
        from safetensors import safe_open

        with safe_open(path, "pt") as f:
            names = [k for k in list(f.keys()) if k.startswith(prefix)]
            return {k.removeprefix(prefix): f.get_tensor(k) for k in names}
    weights = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    return {k.removeprefix(prefix): v for k, v in weights.items() if k.startswith(prefix)}


class PolicyAndValue(_Policy):
    """A policy and a separate value model behind the protocol of the value-head models.

    policy: a causal or seq2seq LM (peft too). value_model: a causal model with a scalar head, that
    is `AutoModelForTokenClassification` or `AutoModelForSequenceClassification` with num_labels=1
    (the head is applied at every position), or one of the value-head models. Both see the same
    inputs, so they must share the tokenizer.
    """

    def __init__(self, policy: nn.Module, value_model: nn.Module) -> None:
        super().__init__()
        _head_module(_unwrap(policy))
        if not isinstance(value_model, _WithValueHead):
            _scalar_head(value_model)
        self.policy = policy
        self.value_model = value_model

    @property
    def lm(self) -> nn.Module:
        return self.policy

    def _hidden_and_values(self, inputs: dict[str, Any]) -> tuple[Tensor, Tensor]:
        return hidden_states(self.policy, **inputs), token_values(self.value_model, **inputs)

    def value_parameters(self) -> Iterator[nn.Parameter]:
        return self.value_model.parameters()

    def save_pretrained(self, path: str | Path, **kwargs: Any) -> None:
        """The policy in `path`, the value model in `path`/value_model, each as it saves itself."""
        self.policy.save_pretrained(path, **kwargs)
        self.value_model.save_pretrained(Path(path) / "value_model", **kwargs)

    def gradient_checkpointing_enable(self, **kwargs: Any) -> None:
        super().gradient_checkpointing_enable(**kwargs)
        _checkpointing(self.value_model, "enable", **kwargs)

    def gradient_checkpointing_disable(self) -> None:
        super().gradient_checkpointing_disable()
        _checkpointing(self.value_model, "disable")


# ------------------------------------------------------------------------------ scalar heads


def token_values(value_model: nn.Module, **inputs: Any) -> Tensor:
    """[B, T] fp32: the scalar head of a value or reward model at every position."""
    if isinstance(value_model, _WithValueHead):
        return value_model(**inputs).values
    hf, head, dropout = _scalar_head(value_model)
    return _scalar(head, dropout(_backbone_output(hf, inputs)))


def sequence_scores(reward_model: nn.Module, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
    """[B] fp32: the scalar head of `reward_model` on each row's last attended token.

    The row's end comes from attention_mask [B, T]; no pad id is consulted, so pad == eos is
    harmless and the padding side does not matter. A row without any token scores NaN.
    """
    if attention_mask.shape != input_ids.shape:
        raise ValueError(
            f"attention_mask must have shape {tuple(input_ids.shape)} like input_ids, "
            f"got {tuple(attention_mask.shape)}"
        )
    values = token_values(reward_model, input_ids=input_ids, attention_mask=attention_mask)
    real = attention_mask != 0
    last = real.shape[-1] - 1 - real.flip(-1).int().argmax(-1, keepdim=True)
    return values.gather(-1, last).squeeze(-1).masked_fill(~real.any(-1), torch.nan)


def _scalar_head(model: nn.Module) -> tuple[nn.Module, nn.Module, nn.Module]:
    """(transformers model, its head with one output, the dropout before the head)."""
    hf = _peft_base(model)
    name = type(hf).__name__
    # `classifier` after a pooler (BERT's sequence classifiers) is no function of one position.
    names = ("score", "classifier") if "TokenClassification" in name else ("score",)
    for attribute in names:
        head = getattr(hf, attribute, None)
        if not isinstance(head, nn.Module):
            continue
        outputs = getattr(_inside_peft(head), "out_features", None)
        if outputs is None:
            continue
        if outputs != 1:
            raise ValueError(
                f"{attribute} of {name} has {outputs} outputs; a value or reward model "
                "needs one: load it with num_labels=1"
            )
        return hf, head, getattr(hf, "dropout", nn.Identity())
    raise ValueError(
        f"{name} has no scalar head over positions (`score`, or a token `classifier`); use "
        "AutoModelForTokenClassification or a causal AutoModelForSequenceClassification with "
        "num_labels=1, or a value-head model"
    )
