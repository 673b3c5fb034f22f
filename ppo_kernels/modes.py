"""A model run in another mode (dropout off, another adapter active), then as it was."""

import contextlib
import copy
from collections.abc import Iterator
from typing import Any

from torch import nn


@contextlib.contextmanager
def without_dropout(*models: nn.Module | None, training: bool = False) -> Iterator[None]:
    """eval() everywhere, and every module's own mode again afterwards.

    training: modules that checkpoint their activations do so only in training mode. They, not
    their children, stay in it, with dropout rates of their own at 0.
    """
    modes = {m: m.training for model in models if model is not None for m in model.modules()}
    rates: list[tuple[nn.Module, str, Any]] = []
    try:
        for m in modes:
            m.training = training and bool(getattr(m, "gradient_checkpointing", False))
            for name, value in vars(m).items() if m.training else ():
                if "drop" in name and isinstance(value, float) and value:
                    rates.append((m, name, value))
        for m, name, _ in rates:
            setattr(m, name, 0.0)
        yield
    finally:
        for m, mode in modes.items():
            m.training = mode
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
def adapter(model: nn.Module, name: str | None) -> Iterator[None]:
    """peft's adapter `name` active inside the model ("base": none is), then all as it was.

    None: nothing is done.
    """
    if name is None:
        yield
        return
    peft = peft_model(model)
    active, flags = peft.active_adapter, {p: p.requires_grad for p in peft.parameters()}
    try:
        with peft.disable_adapter() if name == "base" else contextlib.nullcontext():
            if name != "base":
                peft.set_adapter(name)
            yield
    finally:
        if name != "base":
            peft.set_adapter(active)
        for p, requires_grad in flags.items():  # peft sets these at every switch
            p.requires_grad_(requires_grad)


def reference_policy(
    model: nn.Module, ref_model: nn.Module | None, adapter: str | None
) -> tuple[nn.Module, str | None]:
    """(module, adapter) of the policy that training starts from, as PPOTrainer is told it.

    That is ref_model, or another adapter of the model ("base": none), or else a frozen clone.
    """
    trained = {id(p) for p in model.parameters() if p.requires_grad}
    if ref_model is not None and any(id(p) in trained for p in ref_model.parameters()):
        raise ValueError(
            "ref_model has weights of the model being trained, and would follow it; leave it None "
            "to clone the model, or give a copy"
        )
    peft = peft_model(model)
    if adapter is not None and (peft is None or ref_model is not None):
        raise ValueError("reference names an adapter of a peft model, without a ref_model")
    names = ["base", *(peft.peft_config if peft is not None else ())]
    if adapter not in (None, *names):
        raise ValueError(f"reference must be one of {', '.join(names)}; got {adapter!r}")
    if ref_model is not None:
        return ref_model, None
    if peft is None:
        policy = getattr(model, "policy", getattr(model, "pretrained_model", model))
        return copy.deepcopy(policy).requires_grad_(False), None
    if adapter is None and not adapter_is_fresh(peft):
        raise ValueError(
            "reference: the adapter of model already changes it, so the model with the adapter "
            "disabled is not the policy that training starts from. Give a ref_model, "
            "reference='<name>' of a second adapter with the same weights, or reference='base' if "
            "the base model is meant"
        )
    return model, adapter or "base"
