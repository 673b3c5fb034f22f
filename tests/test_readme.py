"""Every Python block of the README runs as it is printed, with small tensors and a tiny model."""

import re
from pathlib import Path
from typing import Any

import pytest
import tiny
import tokenizers
import torch
import transformers

README = Path(__file__).parents[1] / "README.md"
BLOCKS = re.findall(r"```python\n(.*?)```", README.read_text(), re.S)
B, T, V = 3, 7, tiny.VOCAB
WORDS = [f"w{i}" for i in range(V - 2)]


@pytest.fixture
def names(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the README's reader has at hand; blocks add to it, as in one notebook."""
    torch.manual_seed(0)
    model = tiny.gpt2()
    folder = tmp_path_factory.mktemp("model")
    model.save_pretrained(folder)
    ids = {word: i for i, word in enumerate(["[UNK]", "[EOS]", *WORDS])}
    plain = tokenizers.Tokenizer(tokenizers.models.WordLevel(ids, unk_token="[UNK]"))
    plain.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=plain, eos_token="[EOS]")
    old_logp, ref_logp, values, old_values, returns = torch.randn(5, B, T - 1).unbind()
    return {
        "__name__": "readme",
        "path": str(folder),
        "model": model,
        "tokenizer": tokenizer,
        "texts": [" ".join(WORDS[i % 50 : i % 50 + 3]) for i in range(70)],
        "logits": torch.randn(B, T, V, requires_grad=True) * 1,
        "input_ids": torch.randint(V, (B, T)),
        "attention_mask": torch.ones(B, T, dtype=torch.int64),
        **{"old_logp": old_logp, "ref_logp": ref_logp, "old_values": old_values},
        **{"values": values.requires_grad_(), "returns": returns},
        "mask": torch.rand(B, T - 1) < 0.8,
        "scores": torch.randn(B),
        "process_group": None,
        "packed_rewards": torch.randn(9),
        "packed_values": torch.randn(9),
        "cu_seqlens": torch.tensor([0, 4, 9]),
        "tokens_in_batch": 40,
    }


def test_statistics_lists_what_a_step_returns() -> None:
    text = (README.parent / "STATISTICS.md").read_text()
    rows = [line.split("|")[1] for line in text.splitlines() if line.startswith("| `")]
    listed = [key for row in rows for key in re.findall(r"`(.*?)`", row)]
    assert sorted(listed) == sorted(tiny.trainer().step(*tiny.rows(4)))


def test_every_block_in_order(
    names: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for i, block in enumerate(BLOCKS):
        block = block.replace("path/or/name", names["path"])
        exec(compile(block, f"README.md block {i}", "exec"), names)
    assert names["loss"].isfinite() and names["values"].grad is not None
    assert names["trainer"].step_count == 3 and len(names["history"]) == 2
    assert (tmp_path / "checkpoint.pt").exists() and list((tmp_path / "out").glob("*.safetensors"))
