"""The C++ signatures match the Python schemas.

The stable ABI hands a kernel untyped words: a `Tensor` argument read as an optional one is a
crash, not an error, so the two are compared as text.
"""

import re
from pathlib import Path

import pytest
import torch

import ppo_kernels  # noqa: F401  (defines the schemas)

CSRC = Path(__file__).parent.parent / "csrc"
TYPES = {
    "Tensor": "Tensor",
    "Maybe": "Optional[Tensor]",
    "Optional": "Optional[Tensor]",
    "std::optional<Tensor>": "Optional[Tensor]",
    "double": "float",
    "int64_t": "int",
    "bool": "bool",
    "std::optional<double>": "Optional[float]",
    "std::string": "str",
    "std::string_view": "str",
}
BOXED = re.compile(r'm\.impl\("(\w+)",\s*TORCH_BOX\(&(?:ppo::)?(\w+)\)\)')


def boxed() -> list[tuple[str, str, str]]:
    """(op, C++ function, its file's text) of every boxed registration."""
    texts = [p.read_text() for p in sorted([*CSRC.glob("*.cpp"), *CSRC.glob("*.cu")])]
    return [(op, function, text) for text in texts for op, function in BOXED.findall(text)]


@pytest.mark.parametrize(("op", "function", "text"), boxed(), ids=lambda x: x[:20])
def test_arguments(op: str, function: str, text: str) -> None:
    (arguments,) = re.findall(rf"\b{function}\(([^()]*)\)\s*{{", text)
    types = [re.sub(r"const |&|\s+\w+$", "", a.strip()).strip() for a in arguments.split(",")]
    schema = getattr(torch.ops.ppo_kernels, op).default._schema
    assert [TYPES[t] for t in types] == [str(a.type) for a in schema.arguments]


def test_there_are_some() -> None:
    assert len(boxed()) >= 5
