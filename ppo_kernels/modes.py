"""A model run as inference needs it (dropout off, another adapter active), then as it was."""

import contextlib
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
def adapter(model: Any, name: str) -> Iterator[None]:
    """The peft model with adapter `name` ("base": none) active, then as it was."""
    active, flags = model.active_adapter, {p: p.requires_grad for p in model.parameters()}
    try:
        with model.disable_adapter() if name == "base" else contextlib.nullcontext():
            if name != "base":
                model.set_adapter(name)
            yield
    finally:
        if name != "base":
            model.set_adapter(active)
        for p, requires_grad in flags.items():  # peft sets these at every switch
            p.requires_grad_(requires_grad)
