"""Checkpoints: 2 + 2 steps are 4 steps bit for bit, and no crash leaves half a file. Item 35."""

import copy
import os
import random
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
import torch

from ppo_kernels.trainer import PPOTrainer

PROMPTS = [f"w{3 + i} w{4 + i} w{5 + i % 7}" for i in range(18)]


def reward(prompts: list[str], responses: list[str]) -> list[float]:
    """Draws from every global random state, as reward functions may."""
    noise = random.random() + float(np.random.rand()) + float(torch.rand(()))
    return [len(r.split()) + noise * i for i, r in enumerate(responses)]


def make(model: Any = None, **fields: Any) -> PPOTrainer:
    """Everything that has state: dropout, shuffling, adaptive KL, moments, Adam, a scheduler."""
    model = tiny.policy(dropout=0.1) if model is None else model
    options = {"use_score_scaling": True, "horizon": 50, "target": 0.05, "learning_rate": 3e-3}
    trainer = tiny.trainer(model, tokenizer=tiny.Tokenizer(), **options | fields)
    decay = torch.optim.lr_scheduler.LambdaLR(trainer.optimizer, lambda step: 0.9**step)
    trainer.lr_scheduler = decay
    return trainer


def seed_everything(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def plain(stats: list[dict[str, float]]) -> list[dict[str, float]]:
    return [{k: v for k, v in s.items() if not k.startswith("time/")} for s in stats]


def test_35_two_and_two_steps_are_four_steps(tmp_path: Path) -> None:
    """Five batches an epoch of 18 prompts; the checkpoint falls into the middle of the first."""
    whole = make()
    seed_everything(1)
    four = whole.train(PROMPTS, reward, steps=6, max_new_tokens=5)
    first = make()
    seed_everything(1)
    begun = first.train(PROMPTS, reward, steps=3, max_new_tokens=5)
    first.save_checkpoint(tmp_path / "runs" / "ppo.pt")
    seed_everything(99)
    second = make()
    second.load_checkpoint(tmp_path / "runs" / "ppo.pt")
    rest = second.train(PROMPTS, reward, steps=3, max_new_tokens=5)
    assert plain(begun + rest) == plain(four)
    for (name, p), q in zip(whole.model.named_parameters(), second.model.parameters()):
        assert torch.equal(p, q), name
    assert second.kl_ctl.value == whole.kl_ctl.value != 0.2
    assert second.running.state_dict() == whole.running.state_dict()
    assert second.optimizer.param_groups[0]["lr"] == whole.optimizer.param_groups[0]["lr"]
    assert (second.step_count, second.samples) == (6, 24)


def test_35_the_dataloader_goes_on_in_the_middle_of_an_epoch(tmp_path: Path) -> None:
    rows = [{"i": i} for i in range(12)]

    def loader() -> PPOTrainer:
        return PPOTrainer(tiny.trainer().config, tiny.policy(), dataset=rows)

    uninterrupted, first = loader(), loader()
    whole = [batch["i"] for _ in range(2) for batch in uninterrupted.dataloader]
    begun = next(iter(first.dataloader))["i"]
    first.save_checkpoint(tmp_path / "ppo.pt")
    second = loader()
    second.load_checkpoint(tmp_path / "ppo.pt")
    rest = [batch["i"] for _ in range(2) for batch in second.dataloader]
    assert [begun, *rest] == whole


def test_35_dataloader_and_train_have_a_place_each(tmp_path: Path) -> None:
    """Training on many prompts is not the end of a short dataset, before or after a resume."""

    def make_both() -> PPOTrainer:
        rows = [{"i": i} for i in range(12)]
        return PPOTrainer(tiny.trainer().config, tiny.policy(), None, tiny.Tokenizer(), rows)

    trainer, other = make_both(), make_both()
    seen = next(iter(trainer.dataloader))["i"]
    trainer.train(PROMPTS, reward, steps=4, max_new_tokens=2)
    trainer.save_checkpoint(tmp_path / "ppo.pt")
    other.load_checkpoint(tmp_path / "ppo.pt")
    for t in (trainer, other):
        assert sorted(seen + [i for batch in t.dataloader for i in batch["i"]]) == list(range(12))
    assert other.places["prompts"] == {"epoch": 0, "cursor": 4}


def test_35_config_steps_counts_what_was_done_before(tmp_path: Path) -> None:
    trainer = make(steps=3)
    assert len(trainer.train(PROMPTS, reward, steps=1, max_new_tokens=3)) == 1
    trainer.save_checkpoint(tmp_path / "ppo.pt")
    other = make(steps=3)
    other.load_checkpoint(tmp_path / "ppo.pt")
    assert len(other.train(PROMPTS, reward, max_new_tokens=3)) == 2
    assert other.train(PROMPTS, reward, max_new_tokens=3) == []


def test_35_a_lora_checkpoint_holds_the_adapter_and_the_value_head(tmp_path: Path) -> None:
    import peft

    def model() -> Any:
        lora = peft.get_peft_model(tiny.gpt2(), peft.LoraConfig(r=2, target_modules=["c_attn"]))
        return type(tiny.policy())(lora, summary_dropout_prob=0.0)

    torch.manual_seed(0)
    first = make(model())
    first.step(*tiny.rows(4))
    first.save_checkpoint(tmp_path / "ppo.pt")
    saved = torch.load(tmp_path / "ppo.pt", weights_only=True)["model"]
    assert all("lora_" in name or "v_head" in name for name in saved)
    torch.manual_seed(5)
    second = make(model())
    second.load_checkpoint(tmp_path / "ppo.pt")
    a, b = (t.step(*tiny.rows(4)) for t in (first, second))
    assert plain([a]) == plain([b]) and a["objective/kl"] != 0


KILLED = """
import os, signal, sys, torch, tiny
torch.set_num_threads(1)
trainer = tiny.trainer()
trainer.step(*tiny.rows(4))
trainer.save_checkpoint(sys.argv[1])
trainer.step(*tiny.rows(4))
write = torch.save
def killed(state, f):
    write(state, f)
    f.flush()
    f.truncate(f.tell() // 2)
    os.kill(os.getpid(), signal.SIGKILL)
torch.save = killed
trainer.save_checkpoint(sys.argv[1])
"""


def test_35_a_save_that_is_killed_leaves_the_checkpoint_before(tmp_path: Path) -> None:
    path = tmp_path / "ppo.pt"
    env = os.environ | {"PYTHONPATH": os.pathsep.join([os.getcwd(), *sys.path])}
    code = textwrap.dedent(KILLED)
    done = subprocess.run([sys.executable, "-c", code, str(path)], env=env, capture_output=True)
    assert done.returncode == -signal.SIGKILL, done.stderr.decode()
    assert len(list(tmp_path.iterdir())) == 2  # the checkpoint and the half-written one
    trainer = tiny.trainer()
    trainer.load_checkpoint(path)
    assert trainer.step_count == 1


def test_35_a_save_that_fails_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = tiny.trainer()
    trainer.save_checkpoint(tmp_path / "ppo.pt")
    before = (tmp_path / "ppo.pt").read_bytes()

    def full(*args: Any) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(OSError, match="No space left"):
        trainer.save_checkpoint(tmp_path / "ppo.pt")
    assert [p.name for p in tmp_path.iterdir()] == ["ppo.pt"]
    assert (tmp_path / "ppo.pt").read_bytes() == before


def test_35_a_state_that_does_not_fit_changes_nothing() -> None:
    trainer = tiny.trainer()
    trainer.step(*tiny.rows(4))
    good = trainer.state_dict()
    target = tiny.trainer()
    before = {n: p.clone() for n, p in target.model.named_parameters()}
    wider = {n: p for n, p in good["model"].items() if "v_head" not in n}
    for state, message in (
        ({k: v for k, v in good.items() if k != "kl_ctl"}, "kl_ctl missing or unknown"),
        (good | {"model": wider}, "another model: v_head.summary.bias, v_head.summary.weight"),
        (good | {"random": good["random"] * 2}, "the state is of 2 ranks, this run has 1"),
        (good | {"lr_scheduler": {}}, "lr_scheduler must be given"),
    ):
        with pytest.raises(ValueError, match=message):
            target.load_state_dict(state)
    assert target.step_count == 0
    assert all(torch.equal(before[n], p) for n, p in target.model.named_parameters())


def test_35_a_file_that_is_no_checkpoint_is_named(tmp_path: Path) -> None:
    (tmp_path / "text.pt").write_text("not a checkpoint")
    trainer = tiny.trainer()
    trainer.save_checkpoint(tmp_path / "half.pt")
    whole = (tmp_path / "half.pt").read_bytes()
    (tmp_path / "half.pt").write_bytes(whole[: len(whole) // 2])
    for name in ("text.pt", "half.pt"):
        with pytest.raises(ValueError, match=f"{name} is not a checkpoint: .{{,40}}$"):
            trainer.load_checkpoint(tmp_path / name)
    torch.save(torch.ones(2), tmp_path / "tensor.pt")
    torch.save(tiny.gpt2().state_dict(), tmp_path / "model.pt")
    for name in ("tensor.pt", "model.pt"):
        with pytest.raises(
            ValueError, match=r"^this is no state of PPOTrainer: .{,70} or unknown$"
        ):
            trainer.load_checkpoint(tmp_path / name)


def test_35_a_reference_made_from_the_trained_policy_is_refused(tmp_path: Path) -> None:
    """Else a resumed run would silently measure its KL from where it was resumed."""
    trainer = tiny.trainer()
    trainer.step(*tiny.rows(4))
    state = trainer.state_dict()
    with pytest.raises(ValueError, match="make the trainer from the same original models"):
        tiny.trainer(trainer.model).load_state_dict(state)
    tiny.trainer(trainer.model, trainer.ref_model).load_state_dict(state)


def test_save_pretrained_loads_back(tmp_path: Path) -> None:
    trainer = tiny.trainer()
    trainer.step(*tiny.rows(4))
    trainer.save_pretrained(tmp_path)
    model = type(trainer.model).from_pretrained(str(tmp_path))
    for (name, p), q in zip(trainer.model.named_parameters(), model.parameters()):
        assert torch.equal(p, q), name


def test_35_state_dict_is_a_copy() -> None:
    """An in-memory state goes back to where it was taken, whatever was trained since."""
    trainer = make()
    trainer.train(PROMPTS, reward, steps=1, max_new_tokens=4)
    state = trainer.state_dict()
    before = {n: p.detach().clone() for n, p in trainer.model.named_parameters()}
    seed_everything(5)
    first = trainer.train(PROMPTS, reward, steps=2, max_new_tokens=4)
    trainer.load_state_dict(state)
    assert all(torch.equal(before[n], p) for n, p in trainer.model.named_parameters())
    seed_everything(5)
    again = trainer.train(PROMPTS, reward, steps=2, max_new_tokens=4)
    assert plain(first) == plain(again)


def test_35_an_interrupted_reward_leaves_a_point_to_go_on_from(tmp_path: Path) -> None:
    def stop(prompts: list[str], responses: list[str]) -> list[float]:
        if trainer.step_count == 2:
            raise KeyboardInterrupt
        return [float(len(r)) for r in responses]

    def go_on(prompts: list[str], responses: list[str]) -> list[float]:
        return [float(len(r)) for r in responses]

    whole = make().train(PROMPTS, go_on, steps=4, max_new_tokens=4)
    trainer = make()
    with pytest.raises(KeyboardInterrupt):
        trainer.train(PROMPTS, stop, steps=4, max_new_tokens=4)
    trainer.save_checkpoint(tmp_path / "ppo.pt")
    other = make()
    other.load_checkpoint(tmp_path / "ppo.pt")
    rest = other.train(PROMPTS, go_on, steps=2, max_new_tokens=4)
    assert plain(rest) == plain(whole[2:])


def test_35_a_batch_that_cannot_be_used_is_not_drawn() -> None:
    trainer = make()
    places, random_state = copy.deepcopy(trainer.places), trainer.generator.get_state()
    for prompts, scores, message in (
        (PROMPTS, lambda p, r: [float("nan")] * 4, r"scores\[0\] must be a finite number"),
        (PROMPTS, lambda p, r: [1.0], "scores must have one entry per query, 4, got 1"),
        ([""] * 4, lambda p, r: [1.0] * 4, r"queries\[0\] is empty"),
    ):
        with pytest.raises(ValueError, match=message):
            trainer.train(prompts, scores, steps=1, max_new_tokens=3)
        assert trainer.places == places and torch.equal(trainer.generator.get_state(), random_state)


def test_35_numpy_numbers_in_the_config_do_not_spoil_the_checkpoint(tmp_path: Path) -> None:
    trainer = make(learning_rate=np.float64(3e-3), gamma=np.float32(1.0))
    trainer.save_checkpoint(tmp_path / "ppo.pt")
    make().load_checkpoint(tmp_path / "ppo.pt")


def test_35_settings_that_the_saved_state_overrides_are_named(tmp_path: Path) -> None:
    make().save_checkpoint(tmp_path / "ppo.pt")
    with pytest.warns(UserWarning, match=r"learning_rate=0\.003, this trainer 0\.5") as caught:
        make(learning_rate=0.5).load_checkpoint(tmp_path / "ppo.pt")
    assert caught[0].filename == __file__


def test_35_other_settings_are_named_and_hold(tmp_path: Path) -> None:
    make().save_checkpoint(tmp_path / "ppo.pt")
    trainer = make(vf_coef=0.7, kl_penalty="k3", steps=99)
    with pytest.warns(UserWarning, match=r"had .*vf_coef=0\.1.* on with .*vf_coef=0\.7") as caught:
        trainer.load_checkpoint(tmp_path / "ppo.pt")
    assert len(caught) == 1 and "kl_penalty" in str(caught[0].message)
    assert "steps" not in str(caught[0].message)
    assert caught[0].filename == __file__ and trainer.config.vf_coef == 0.7
