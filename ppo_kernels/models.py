"""Hugging Face language models without their logits: hidden states, the exact head, values.

`hidden_states(model, ..)` runs the backbone alone and returns what the lm head would be given;
`lm_head(model)` returns the head as tensors, so that

    head = lm_head(model)
    logprobs_from_hidden(hidden_states(model, **inputs), head.weight, labels, **head.kwargs())

equals the log-probs of `model(**inputs).logits` while no [B, T, V] tensor ever exists. Two
families whose configurations carry the same field may use it differently (`logits_scaling` divides
in Granite and multiplies in HyperCLOVA X; MPT has a `logit_scale` and ignores it), so nothing is
guessed: the families in `PLAIN` and `SCALED` are known and tested, any other model is compared
once with its own logits on two tokens and refused if they differ.

Index convention of a causal model: position j of the outputs is the state after token j. It gives
the logprob of token j + 1 and the value V(tokens <= j); the trainer's collate does that shift.
"""

import inspect
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

# model_type of the families whose head is weight (+ bias), with final_logit_softcapping if set.
PLAIN = frozenset(
    [
        "gpt2",
        "gpt_neox",
        "llama",
        "mistral",
        "mixtral",
        "qwen2",
        "qwen3",
        "qwen3_moe",
        "gemma",
        "gemma2",
        "gemma3_text",
        "phi3",
        "olmo2",
        "opt",
        "bloom",
        "mpt",
        "falcon",
        "smollm3",
        "deepseek_v3",
        "bart",
    ]
)
# model_type -> where the factor on the logits is; "model" or "config", attribute, power.
SCALED = {
    "cohere": ("model", "logit_scale", 1),
    "cohere2": ("model", "logit_scale", 1),
    "granite": ("config", "logits_scaling", -1),
    "granitemoe": ("config", "logits_scaling", -1),
}
SOFTCAPPED = ("gemma2", "gemma3_text")
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
    return _head_input(hf, _backbone_output(hf, inputs))


def position_ids(attention_mask: Tensor) -> Tensor:
    """[B, T] int64: 0 at the first attended token of each row, then counting; 0 before it."""
    leading = (attention_mask != 0).cumsum(-1).eq(0).sum(-1, keepdim=True)
    at = torch.arange(attention_mask.shape[-1], device=attention_mask.device)
    return (at - leading).clamp(min=0)


def _unwrap(model: nn.Module) -> nn.Module:
    """The transformers model inside one of our wrappers or a peft model; anything else raises."""
    if isinstance(model, _WithValueHead):
        model = model.pretrained_model
    elif isinstance(model, PolicyAndValue):
        return _unwrap(model.policy)
    if hasattr(model, "get_base_model"):
        if getattr(model.active_peft_config, "is_prompt_learning", False):
            raise ValueError(
                f"{type(model).__name__}: prompt learning ({model.active_peft_config.peft_type}) "
                f"adds tokens inside the model's own forward; {SUPPORTED}"
            )
        model = model.get_base_model()
    if not (hasattr(model, "config") and hasattr(model, "get_output_embeddings")):
        raise ValueError(f"{type(model).__name__} is not a transformers model; {SUPPORTED}")
    return model


def _is_t5_like(hf: nn.Module) -> bool:
    """T5 and its relatives keep encoder and decoder on the LM itself: there is no backbone."""
    return hf.base_model is hf and hasattr(hf, "encoder") and hasattr(hf, "decoder")


def _backbone_output(hf: nn.Module, inputs: dict[str, Any]) -> Tensor:
    """Last hidden state after the final norm, [B, T, H]."""
    inputs = {"use_cache": False, **inputs}
    if _is_t5_like(hf):
        return _t5_decoder_output(hf, **inputs)
    backbone = hf.base_model
    if backbone is hf:
        raise ValueError(
            f"{type(hf).__name__} has no backbone at base_model_prefix="
            f"{getattr(hf, 'base_model_prefix', None)!r}; {SUPPORTED}"
        )
    accepted = inspect.signature(backbone.forward).parameters
    mask = inputs.get("attention_mask")
    if (
        "position_ids" in accepted
        and inputs.get("position_ids") is None
        and isinstance(mask, Tensor)
        and mask.dim() == 2
        and not hf.config.is_encoder_decoder
    ):
        inputs["position_ids"] = position_ids(mask)
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
    """T5 multiplies by d_model**-0.5 between decoder and head, when its configuration says so."""
    factor = _watched(hf).input_factor if _needs_watching(hf) else 1.0
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
        _watched(hf)
    return head


def _read_head(hf: nn.Module) -> LMHead:
    module = hf.get_output_embeddings()
    if module is None:
        raise ValueError(f"{type(hf).__name__} has no lm head; {SUPPORTED}")
    weight, bias = _linear(module, f"the lm head of {type(hf).__name__}")
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
    weight = getattr(module, "weight", None)
    if not isinstance(weight, Tensor) or not isinstance(module, nn.Linear):
        raise ValueError(f"{what} is a {type(module).__name__}, not a linear layer; {SUPPORTED}")
    if weight.dim() != 2 or weight.numel() == 0:
        raise ValueError(
            f"{what} has a weight of shape {tuple(weight.shape)}, not [V, H]: it is sharded (FSDP "
            "flat parameters, ZeRO-3); read it where it is gathered, inside the wrapped forward"
        )
    if not weight.is_floating_point():
        raise ValueError(f"{what} is quantised ({weight.dtype}); {SUPPORTED}")
    return weight, module.bias


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


class _Watched(NamedTuple):
    input_factor: float


_WATCHED: WeakKeyDictionary[nn.Module, _Watched] = WeakKeyDictionary()


def _needs_watching(hf: nn.Module) -> bool:
    known = hf.config.model_type in PLAIN or hf.config.model_type in SCALED
    return not known or not type(hf).__module__.startswith("transformers.models.")


def _watched(hf: nn.Module) -> _Watched:
    """What one forward of two tokens showed, remembered as long as the model lives."""
    if hf not in _WATCHED:
        _WATCHED[hf] = _watch(hf)
    return _WATCHED[hf]


def _watch(hf: nn.Module) -> _Watched:
    """Compares our reading of the head with the model's own logits on two tokens."""
    head_module = hf.get_output_embeddings()
    backbone = hf.decoder if _is_t5_like(hf) else hf.base_model
    seen: dict[str, Tensor] = {}
    hooks = [
        backbone.register_forward_hook(lambda m, a, out: seen.__setitem__("output", out[0])),
        head_module.register_forward_pre_hook(lambda m, a: seen.__setitem__("input", a[0])),
    ]
    ids = torch.tensor([[0, 1]], device=next(hf.parameters()).device)
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "use_cache": False}
    if hf.config.is_encoder_decoder:
        inputs["decoder_input_ids"] = ids
    devices = [ids.device] if ids.device.type == "cuda" else []
    try:
        with torch.no_grad(), torch.random.fork_rng(devices):
            logits = hf(**inputs)
            logits = getattr(logits, "logits", None)
    finally:
        for hook in hooks:
            hook.remove()
    name = f"{type(hf).__name__} (model_type {hf.config.model_type!r})"
    if logits is None or seen.keys() != {"output", "input"}:
        raise ValueError(f"{name}: its forward does not go backbone -> lm head; {SUPPORTED}")
    factor = 1.0
    if _is_t5_like(hf) and not torch.equal(seen["input"], seen["output"]):
        factor = hf.config.d_model**-0.5
    expected = seen["output"] * factor
    if not _close(seen["input"], expected):
        raise ValueError(
            f"{name} changes the hidden states between backbone and lm head (by up to "
            f"{(seen['input'] - expected).abs().max():.2g}); {SUPPORTED}"
        )
    ours = _read_head(hf).logits(seen["input"])
    if logits.shape != ours.shape or not _close(logits, ours):
        gap = "a different shape" if logits.shape != ours.shape else (logits - ours).abs().max()
        raise ValueError(
            f"{name} computes its logits in a way that is not known here (largest difference: "
            f"{gap}); {SUPPORTED}"
        )
    return _Watched(factor)


def _close(a: Tensor, b: Tensor) -> bool:
    """Equal up to a few roundings of the coarser dtype, relative to the largest entry."""
    eps = max(torch.finfo(a.dtype).eps, torch.finfo(b.dtype).eps)
    a, b = a.float(), b.float()
    return bool((a - b).abs().max() <= 64 * eps * b.abs().max().clamp(min=1e-3))


# --------------------------------------------------------------------------------- value head


class ValueHeadOutput(NamedTuple):
    """hidden_states [B, T, H] that enter the lm head, values [B, T] fp32, logits only if asked."""

    hidden_states: Tensor
    values: Tensor
    logits: Tensor | None = None


class ValueHead(nn.Module):
    """Dropout -> Linear(hidden_size, 1), always computed in fp32 (TRL classic's `v_head`)."""

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
        with torch.autocast(hidden.device.type, enabled=False):
            x = self.dropout(hidden.to(self.summary.weight.dtype))
            return self.summary(x).squeeze(-1)


V_HEAD_OPTIONS = ("summary_dropout_prob", "v_head_init_strategy", "v_head_initializer_range")


class _WithValueHead(nn.Module):
    """A Hugging Face LM (`pretrained_model`) and a value head on its last hidden state (`v_head`).

    Habits of TRL classic, with two differences: the forward returns hidden states instead of
    logits, and the state dict keeps the `pretrained_model.` prefix beside `v_head.`, so that it
    loads back. Directories written by either are read.
    """

    auto_class: str

    def __init__(self, pretrained_model: nn.Module, **v_head_options: Any) -> None:
        super().__init__()
        unknown = sorted(set(v_head_options) - set(V_HEAD_OPTIONS))
        if unknown:
            raise TypeError(
                f"{type(self).__name__} does not take {', '.join(unknown)}; "
                f"the value head takes {', '.join(V_HEAD_OPTIONS)}"
            )
        hf = _unwrap(pretrained_model)
        module = hf.get_output_embeddings()
        if module is None:
            raise ValueError(f"{type(hf).__name__} has no lm head; {SUPPORTED}")
        self.pretrained_model = pretrained_model
        weight, _ = _linear(module, f"the lm head of {type(hf).__name__}")
        self.v_head = ValueHead(weight.shape[1], **v_head_options).to(weight.device)

    @property
    def config(self) -> Any:
        return self.pretrained_model.config

    @property
    def generation_config(self) -> Any:
        return self.pretrained_model.generation_config

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        *,
        return_logits: bool = False,
        **inputs: Any,
    ) -> ValueHeadOutput:
        """hidden_states [B, T, H], values [B, T] fp32, and logits [B, T, V] if return_logits."""
        inputs |= {"input_ids": input_ids, "attention_mask": attention_mask}
        if position_ids is not None:
            inputs["position_ids"] = position_ids
        hf = _unwrap(self.pretrained_model)
        output = _backbone_output(hf, inputs)
        hidden = _head_input(hf, output)
        logits = lm_head(self.pretrained_model).logits(hidden) if return_logits else None
        return ValueHeadOutput(hidden, self.v_head(output), logits)

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        return self.pretrained_model.generate(*args, **kwargs)

    def gradient_checkpointing_enable(self, **kwargs: Any) -> None:
        self.pretrained_model.gradient_checkpointing_enable(**kwargs)

    def gradient_checkpointing_disable(self) -> None:
        self.pretrained_model.gradient_checkpointing_disable()

    def disable_adapter(self) -> AbstractContextManager[None]:
        """peft's context: inside it the model is the base model (the value head stays)."""
        if not hasattr(self.pretrained_model, "disable_adapter"):
            raise ValueError(
                f"disable_adapter needs a peft model, got {type(self.pretrained_model).__name__}"
            )
        return self.pretrained_model.disable_adapter()

    def policy_parameters(self) -> Iterator[nn.Parameter]:
        return self.pretrained_model.parameters()

    def value_parameters(self) -> Iterator[nn.Parameter]:
        return self.v_head.parameters()

    def save_pretrained(self, path: str | Path, **kwargs: Any) -> None:
        """The model (or its adapter) as transformers or peft save it, and `v_head.safetensors`."""
        from safetensors.torch import save_file

        self.pretrained_model.save_pretrained(path, **kwargs)
        state = {
            f"v_head.{k}": v.detach().cpu().contiguous()
            for k, v in self.v_head.state_dict().items()
        }
        save_file(state, Path(path) / "v_head.safetensors", metadata={"format": "pt"})

    @classmethod
    def from_pretrained(cls, model: Any, *, peft_config: Any = None, **kwargs: Any) -> Any:
        """From a name or directory (of ours, TRL's, or a plain LM), or a model that is in memory.

        peft_config wraps the model by `peft.get_peft_model`. The value head's options are
        summary_dropout_prob, v_head_init_strategy, v_head_initializer_range; every other keyword
        goes to transformers' from_pretrained. A saved value head is found and loaded, otherwise
        it is fresh.
        """
        options = {k: kwargs.pop(k) for k in V_HEAD_OPTIONS if k in kwargs}
        name = model if isinstance(model, (str, Path)) else None
        if name is not None:
            model = _load(cls.auto_class, str(name), kwargs)
        elif kwargs:
            raise TypeError(f"a model in memory takes no {', '.join(sorted(kwargs))}")
        if peft_config is not None:
            import peft

            model = peft.get_peft_model(model, peft_config)
        wrapper = cls(model, **options)
        state = {} if name is None else _saved_v_head(str(name))
        if state:
            wrapper.v_head.load_state_dict(state)
        return wrapper


class AutoModelForCausalLMWithValueHead(_WithValueHead):
    __doc__ = _WithValueHead.__doc__
    auto_class = "AutoModelForCausalLM"


class AutoModelForSeq2SeqLMWithValueHead(_WithValueHead):
    __doc__ = _WithValueHead.__doc__
    auto_class = "AutoModelForSeq2SeqLM"


def _find_file(name: str, file: str) -> str | None:
    """The path of a file of a local directory or hub repository, None if it has none."""
    from transformers.utils import cached_file

    return cached_file(
        name,
        file,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
    )


def _load(auto_class: str, name: str, kwargs: dict[str, Any]) -> nn.Module:
    import transformers

    if _find_file(name, "adapter_config.json") is None:
        return getattr(transformers, auto_class).from_pretrained(name, **kwargs)
    import peft

    auto = getattr(peft, auto_class.replace("Auto", "AutoPeft", 1))
    return auto.from_pretrained(name, is_trainable=True, **kwargs)


def _saved_v_head(name: str) -> dict[str, Tensor]:
    """`v_head.*` of a saved value head, without the prefix: our file, or TRL's weights file."""
    from safetensors import safe_open

    for file in ("v_head.safetensors", "model.safetensors"):
        path = _find_file(name, file)
        if path is None:
            continue
        with safe_open(path, "pt") as f:
            keys = [k for k in f.keys() if k.startswith("v_head.")]  # noqa: SIM118
            state = {k.removeprefix("v_head."): f.get_tensor(k) for k in keys}
        if state:
            return state
    path = _find_file(name, "pytorch_model.bin")
    if path is None:
        return {}
    weights = torch.load(path, map_location="cpu", weights_only=True)
    return {k[len("v_head.") :]: v for k, v in weights.items() if k.startswith("v_head.")}


# ------------------------------------------------------------------- separate value and reward


class PolicyAndValue(nn.Module):
    """A policy and a separate value model behind the protocol of the value-head models.

    policy: a causal or seq2seq LM (peft too). value_model: a model with a scalar head, that is
    `AutoModelForTokenClassification` or `AutoModelForSequenceClassification` with num_labels=1
    (the head is applied at every position), or one of the value-head models. It must be causal
    and share the policy's tokenizer; both see the same inputs.
    """

    def __init__(self, policy: nn.Module, value_model: nn.Module) -> None:
        super().__init__()
        _unwrap(policy)
        if not isinstance(value_model, _WithValueHead):
            _scalar_head(value_model)
        self.policy = policy
        self.value_model = value_model

    @property
    def config(self) -> Any:
        return self.policy.config

    @property
    def generation_config(self) -> Any:
        return self.policy.generation_config

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        *,
        return_logits: bool = False,
        **inputs: Any,
    ) -> ValueHeadOutput:
        """hidden_states of the policy, values of the value model, logits if return_logits."""
        inputs |= {"input_ids": input_ids, "attention_mask": attention_mask}
        if position_ids is not None:
            inputs["position_ids"] = position_ids
        hidden = hidden_states(self.policy, **inputs)
        logits = lm_head(self.policy).logits(hidden) if return_logits else None
        return ValueHeadOutput(hidden, _token_values(self.value_model, inputs), logits)

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        return self.policy.generate(*args, **kwargs)

    def gradient_checkpointing_enable(self, **kwargs: Any) -> None:
        self.policy.gradient_checkpointing_enable(**kwargs)
        self.value_model.gradient_checkpointing_enable(**kwargs)

    def gradient_checkpointing_disable(self) -> None:
        self.policy.gradient_checkpointing_disable()
        self.value_model.gradient_checkpointing_disable()

    def disable_adapter(self) -> AbstractContextManager[None]:
        if not hasattr(self.policy, "disable_adapter"):
            raise ValueError(
                f"disable_adapter needs a peft model, got {type(self.policy).__name__}"
            )
        return self.policy.disable_adapter()

    def policy_parameters(self) -> Iterator[nn.Parameter]:
        return self.policy.parameters()

    def value_parameters(self) -> Iterator[nn.Parameter]:
        return self.value_model.parameters()


def sequence_scores(reward_model: nn.Module, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
    """[B] fp32: the scalar head of `reward_model` on each row's last attended token.

    The row's end comes from attention_mask; no pad id is consulted, so pad == eos is harmless and
    the padding side does not matter. A row without any token scores NaN.
    """
    if attention_mask.shape != input_ids.shape:
        raise ValueError(
            f"attention_mask must have shape {tuple(input_ids.shape)} like input_ids, "
            f"got {tuple(attention_mask.shape)}"
        )
    inputs = {"input_ids": input_ids, "attention_mask": attention_mask}
    values = _token_values(reward_model, inputs)
    real = attention_mask != 0
    last = real.shape[-1] - 1 - real.flip(-1).int().argmax(-1, keepdim=True)
    scores = values.gather(-1, last).squeeze(-1)
    return scores.masked_fill(~real.any(-1), torch.nan)


def _token_values(value_model: nn.Module, inputs: dict[str, Any]) -> Tensor:
    """[B, T] fp32 of a model with a scalar head."""
    if isinstance(value_model, _WithValueHead):
        return value_model(**inputs).values
    hf, head, dropout = _scalar_head(value_model)
    hidden = dropout(_backbone_output(hf, inputs))
    weight = next(head.parameters())
    with torch.autocast(hidden.device.type, enabled=False):
        return head(hidden.to(weight.dtype)).squeeze(-1).float()


def _scalar_head(model: nn.Module) -> tuple[nn.Module, nn.Module, nn.Module]:
    """(transformers model, its head with one output, the dropout before it)."""
    hf = model.get_base_model() if hasattr(model, "get_base_model") else model
    for name in ("score", "classifier"):
        head = getattr(hf, name, None)
        if isinstance(head, nn.Module):
            weight, _ = _linear(head, f"{name} of {type(hf).__name__}")
            if weight.shape[0] == 1:
                return hf, head, getattr(hf, "dropout", nn.Identity())
            raise ValueError(
                f"{name} of {type(hf).__name__} has {weight.shape[0]} outputs; a value or reward "
                "model needs one: load it with num_labels=1"
            )
    raise ValueError(
        f"{type(hf).__name__} has no scalar head (`score` or `classifier` with one output); use "
        "AutoModelForTokenClassification or AutoModelForSequenceClassification with num_labels=1, "
        "or a value-head model"
    )
