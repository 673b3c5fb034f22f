"""PPOTrainer, item by item. The numbers in the names, here and in the files beside:

 1 index convention              15 forms of scores             29 value clipping, warm-up
 2 masks come from lengths       16 whitening of rewards        30 nothing of the user's changes
 3 padding and company           17 GAE and bootstrap           31 KL controller
 4 holes in a response           18 whitening of advantages     32 weighted statistics
 5 empty responses               19 gamma, lambda               33 names of statistics
 6 NaN in masked slots           20 the loss                    34 explained variance
 7 fp32 log-softmax              21 clip ranges, dual clip      35 checkpoints
 8 one temperature               22 aggregation                 36 bf16
 9 old log-probs                 23 minibatch, micro-batch      37 ranks decide alike
10 no dropout                    24 shuffling                   38 seeds
11 KL in the reward              25 gradient norm, bad steps    39 errors name field and row
12 KL in the loss                26 ratio guard                 40 self-check of the first step
13 reference policies            27 early stop
14 order of score shaping        28 LM loss of PPO-ptx
"""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny
import tolerances as tol
import torch
import transformers
from torch import Tensor, nn

import ppo_kernels as pk
from ppo_kernels.models import PolicyAndValue
from ppo_kernels.trainer import PPOTrainer, Rollout, collate

close = torch.testing.assert_close


def ids(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int64)


def parameters(model: nn.Module) -> dict[str, Tensor]:
    return {n: p.detach().clone() for n, p in model.named_parameters()}


def assert_same_parameters(a: dict[str, Tensor], b: dict[str, Tensor], **tolerance: float) -> None:
    for name in a:
        close(a[name], b[name], **(tolerance or {"rtol": 0, "atol": 0}), msg=name)


def forward_alone(model: nn.Module, query: Tensor, response: Tensor) -> tuple[Tensor, Tensor]:
    """(log-softmax [n, V], values [n]) at the actions of one row, without any padding."""
    row = torch.cat([query, response])[None]
    with torch.no_grad():
        out = model.eval()(row, torch.ones_like(row), return_logits=True)
    at = slice(len(query) - 1, row.shape[1] - 1)
    return out.logits[0, at].double().log_softmax(-1), out.values[0, at]


# ---------------------------------------------------------------------- alignment and masks


@pytest.mark.parametrize("size", [1, 2, 4])
def test_01_03_rollout_equals_each_row_alone(size: int) -> None:
    """V[first] is V(prompt); nothing depends on width, padding or the rows beside."""
    queries, responses, scores = tiny.rows(4)
    trainer = tiny.trainer(mini_batch_size=size)
    ro = trainer.rollout(queries, responses, scores)
    for i, (q, r) in enumerate(zip(queries, responses)):
        logp, values = forward_alone(trainer.model, q, r)
        expected = logp.gather(-1, r[:, None])[:, 0].float()
        close(ro.logprobs[i][ro.mask[i]], expected, **tol.REORDERED)
        close(ro.values[i][ro.mask[i]], values, **tol.REORDERED)
        entropy = -(logp.exp() * logp).sum(-1).float()
        close(ro.entropy[i][ro.mask[i]], entropy, **tol.REORDERED)


def test_02_eos_is_trained_whatever_the_pad_id() -> None:
    queries, responses, scores = tiny.rows(4)
    results = []
    for pad in (None, tiny.EOS, 0):
        trainer = PPOTrainer(
            tiny.trainer().config, tiny.policy(), tokenizer=tiny.Tokenizer(), pad_token_id=pad
        )
        ro = trainer.rollout(queries, responses, scores)
        assert ro.mask.sum(-1).tolist() == [len(r) for r in responses]
        trainer.update(ro)
        results.append(parameters(trainer.model))
    assert_same_parameters(results[0], results[1])
    assert_same_parameters(results[0], results[2])


@pytest.mark.parametrize("kind", ["causal", "seq2seq"])
def test_03_a_sample_does_not_depend_on_the_rows_beside(kind: str) -> None:
    """generate pads on the left (the encoder of a seq2seq model too) and positions start at 0."""
    model = tiny.policy() if kind == "causal" else seq2seq()
    trainer, queries = tiny.trainer(model), tiny.rows(4)[0]
    with pytest.warns(UserWarning, match="do_sample=False"):
        together = trainer.generate(queries, do_sample=False, max_new_tokens=6)
    for query, row in zip(queries, together):
        with pytest.warns(UserWarning, match="do_sample=False"):
            alone = trainer.generate([query], do_sample=False, max_new_tokens=6)
        assert alone[0].tolist() == row.tolist()


def test_04_masked_tokens_are_no_steps_and_the_score_is_on_the_last_action() -> None:
    trainer = tiny.trainer(whiten_advantages=False, gamma=0.9, lam=0.8)
    masks = [ids(1, 0, 0, 1, 0)]
    ro = trainer.rollout([ids(5, 6)], [ids(3, 4, 5, 6, 7)], [2.0], response_masks=masks)
    assert ro.mask.int().tolist() == [[0, 1, 0, 0, 1, 0]]
    v0, v1 = ro.values[0, 1], ro.values[0, 4]
    a1 = 2.0 - v1
    a0 = 0.9 * v1 - v0 + 0.9 * 0.8 * a1
    close(ro.advantages[0], torch.stack([0 * a0, a0, 0 * a0, 0 * a0, a1, 0 * a0]), **tol.FP32)
    stats = trainer.update(ro)
    assert stats["ppo/optimizer_steps"] == 2
    for x in (ro.logprobs, ro.rewards, ro.kl, ro.returns):
        assert not x[~ro.mask].any()


def test_05_an_empty_response_weighs_nothing() -> None:
    queries, responses, scores = tiny.rows(4)
    empty = torch.empty(0, dtype=torch.int64)
    runs = []
    for extra in (False, True):
        model = tiny.policy()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
        trainer = tiny.trainer(model, optimizer=optimizer, batch_size=5, mini_batch_size=5)
        q, r, s = list(queries), list(responses), list(scores)
        if extra:
            q, r, s = [*q, ids(4, 4)], [*r, empty], [*s, 100.0]
        runs.append((trainer.step(q, r, s), parameters(trainer.model)))
    (alone, before), (beside, after) = runs
    assert_same_parameters(before, after, **tol.STEPPED_SGD)
    assert (alone["tokens/empty_responses"], beside["tokens/empty_responses"]) == (0, 1)
    for key in ("objective/kl", "ppo/mean_scores", "ppo/loss/total", "ppo/val/error"):
        assert alone[key] == pytest.approx(beside[key], rel=1e-4, abs=1e-5), key


def test_05_a_batch_of_empty_responses_makes_no_step() -> None:
    trainer = tiny.trainer(use_score_scaling=True, whiten_rewards=True)
    before = parameters(trainer.model)
    stats = trainer.step([ids(3)] * 4, [torch.empty(0, dtype=torch.int64)] * 4, [1.0] * 4)
    assert_same_parameters(before, parameters(trainer.model))
    assert stats["ppo/optimizer_steps"] == 0 and stats["ppo/skipped_steps"] == 4
    assert all(math.isfinite(v) for v in stats.values())


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum"])
def test_06_nan_in_masked_slots_reaches_nothing(mode: str) -> None:
    trainers = [tiny.trainer(loss_agg_mode=mode) for _ in range(2)]
    for trainer, poison in zip(trainers, (0.0, math.nan)):
        ro = trainer.rollout(*tiny.rows(4))
        for name in ("logprobs", "ref_logprobs", "values", "rewards", "advantages", "returns"):
            x = getattr(ro, name)
            setattr(ro, name, torch.where(ro.mask, x, poison))
        trainer.compute_advantages(ro)
        stats = trainer.update(ro)
        assert all(math.isfinite(v) for v in stats.values())
    assert_same_parameters(*(parameters(t.model) for t in trainers))


# ------------------------------------------------------------------------ log-probs and KL


def test_07_36_a_bf16_model_keeps_fp32_logprobs_and_its_own_dtypes() -> None:
    exact = tiny.trainer().rollout(*tiny.rows(4))
    model = tiny.policy()
    model.pretrained_model.bfloat16()
    trainer = tiny.trainer(model)
    ro = trainer.rollout(*tiny.rows(4))
    for x in (ro.logprobs, ro.ref_logprobs, ro.values, ro.advantages):
        assert x.dtype == torch.float32
    assert (ro.logprobs != ro.logprobs.bfloat16().float()).any()
    close(ro.logprobs, exact.logprobs, **tol.BF16_LOGPROBS)
    stats = trainer.update(ro)
    assert all(math.isfinite(v) for v in stats.values())
    assert model.pretrained_model.lm_head.weight.dtype == torch.bfloat16
    assert model.v_head.summary.weight.dtype == torch.float32


def test_36_an_fp64_model_is_trained_in_fp64() -> None:
    trainer = tiny.trainer(tiny.policy().double(), ref_model=tiny.policy(1).double())
    ro = trainer.rollout(*tiny.rows(4))
    close(ro.logprobs.float(), tiny.trainer().rollout(*tiny.rows(4)).logprobs, **tol.REORDERED)
    assert ro.advantages.dtype == ro.rewards.dtype == ro.scores.dtype == torch.float64
    assert trainer.update(ro)["ppo/optimizer_steps"] == 4


def test_36_bf16_autocast() -> None:
    exact = tiny.trainer().rollout(*tiny.rows(4))
    trainer = tiny.trainer(bf16=True)
    ro = trainer.rollout(*tiny.rows(4))
    close(ro.logprobs, exact.logprobs, **tol.BF16_LOGPROBS)
    assert (ro.logprobs != exact.logprobs).any()
    before = parameters(trainer.model)
    stats = trainer.update(ro)
    assert stats["ppo/policy/first_logprob_gap"] < tol.BF16_LOGPROBS["atol"]
    assert all(p.dtype == torch.float32 for p in trainer.model.parameters())
    assert any((before[n] != p).any() for n, p in trainer.model.named_parameters())


def test_08_temperature_divides_policy_and_reference_alike() -> None:
    trainer = tiny.trainer(temperature=0.7)
    q, r, s = tiny.rows(2)
    ro = trainer.rollout(q, r, s)
    row = torch.cat([q[0], r[0]])[None]
    logits = trainer.model.eval()(row, torch.ones_like(row), return_logits=True).logits[0]
    logp = (logits[len(q[0]) - 1 : -1].detach() / 0.7).log_softmax(-1).gather(-1, r[0][:, None])
    close(ro.logprobs[0][ro.mask[0]], logp[:, 0], **tol.REORDERED)
    assert not ro.kl.any()  # the reference is a clone
    assert trainer.update(ro)["ppo/policy/first_logprob_gap"] < tol.REORDERED["atol"]
    with pytest.raises(ValueError, match=r"temperature=1.0 belongs in PPOConfig.temperature"):
        trainer.generate(q, temperature=1.0)


def test_09_rollout_logprobs_only_weight_the_loss() -> None:
    q, r, s = tiny.rows(4)
    given = [torch.full((len(x),), -2.0) for x in r]
    plain, told, weighted = (tiny.trainer(rollout_is_cap=cap) for cap in (None, None, 1.5))
    plain.step(q, r, s)
    told.step(q, r, s, rollout_logprobs=given)
    assert_same_parameters(parameters(plain.model), parameters(told.model))
    ro = weighted.rollout(q, r, s, rollout_logprobs=given)
    assert (ro.rollout_logprobs[ro.mask] == -2).all()
    weighted.update(ro)
    assert (plain.model.pretrained_model.lm_head.weight
            != weighted.model.pretrained_model.lm_head.weight).any()  # fmt: skip
    with pytest.raises(ValueError, match="rollout_is_cap needs rollout_logprobs"):
        weighted.step(q, r, s)


@pytest.mark.parametrize("separate", [False, True])
def test_10_ratios_start_at_one_with_dropout_in_the_model(separate: bool) -> None:
    model = tiny.policy(dropout=0.3)
    if separate:
        model = PolicyAndValue(tiny.gpt2(dropout=0.3), tiny.policy(1, dropout=0.3))
    model.train()
    trainer = tiny.trainer(model, mini_batch_size=4, ppo_epochs=1)
    ro = trainer.rollout(*tiny.rows(4))
    stats = trainer.update(ro)
    assert stats["ppo/policy/first_logprob_gap"] <= 1e-5
    assert stats["ppo/policy/ratio"] == pytest.approx(1.0, abs=1e-5)
    assert stats["ppo/val/vpred"] == pytest.approx(stats["ppo/val/mean"], abs=1e-5)
    assert all(m.training for m in model.modules())


def test_10_gradient_checkpointing_goes_on_working(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny.policy(dropout=0.3)
    model.gradient_checkpointing_enable()
    calls = []
    for m in model.modules():
        if getattr(m, "gradient_checkpointing", False):
            inner = m._gradient_checkpointing_func

            def counted(*args: Any, inner: Any = inner, **kwargs: Any) -> Any:
                calls.append(1)
                return inner(*args, **kwargs)

            monkeypatch.setattr(m, "_gradient_checkpointing_func", counted)
    trainer = tiny.trainer(model, mini_batch_size=4, ppo_epochs=1)
    stats = trainer.step(*tiny.rows(4))
    assert len(calls) >= 2
    assert stats["ppo/policy/first_logprob_gap"] <= 1e-5
    plain = tiny.trainer(tiny.policy(dropout=0.3), mini_batch_size=4, ppo_epochs=1)
    plain.step(*tiny.rows(4))
    assert_same_parameters(parameters(model), parameters(plain.model), **tol.STEPPED)


def test_10_dropout_can_be_kept() -> None:
    trainer = tiny.trainer(tiny.policy(dropout=0.3).train(), disable_dropout=False)
    assert trainer.step(*tiny.rows(4))["ppo/policy/first_logprob_gap"] > 1e-2


@pytest.mark.parametrize("kind", ["kl", "k1", "mse", "k2", "abs", "low_var_kl", "k3", "full"])
def test_11_reward_is_minus_beta_kl_per_token_plus_the_score(kind: str) -> None:
    trainer = tiny.trainer(ref_model=tiny.policy(1), kl_penalty=kind, init_kl_coef=0.3)
    q, r, s = tiny.rows(4)
    ro = trainer.rollout(q, r, s)
    d = ro.logprobs - ro.ref_logprobs
    kl = {"kl": d, "mse": d**2 / 2, "abs": d.abs(), "low_var_kl": torch.expm1(-d) + d}
    kl |= {"k1": kl["kl"], "k2": kl["mse"], "k3": kl["low_var_kl"], "full": ro.kl}
    if kind == "full":
        for i in range(4):
            p, ref = (forward_alone(m, q[i], r[i])[0] for m in (trainer.model, trainer.ref_model))
            exact = (p.exp() * (p - ref)).sum(-1).float()
            close(ro.kl[i][ro.mask[i]], exact, **tol.REORDERED)
    expected = -0.3 * kl[kind]
    for i in range(4):
        expected[i, ro.mask[i].nonzero()[-1]] += s[i]
    close(ro.rewards, torch.where(ro.mask, expected, 0), **tol.REORDERED)
    stats = trainer.update(ro)
    assert stats["objective/kl"] == pytest.approx(float(d[ro.mask].sum()) / 4, rel=1e-5)
    assert stats["objective/kl_per_token"] == pytest.approx(float(d[ro.mask].mean()), rel=1e-5)


def test_11_terminal_mean_placement() -> None:
    trainer = tiny.trainer(ref_model=tiny.policy(1), kl_placement="terminal_mean")
    ro = trainer.rollout(*tiny.rows(1))
    mean_kl = (ro.logprobs - ro.ref_logprobs)[ro.mask].mean()
    close(ro.rewards.sum(), ro.scores[0] - 0.2 * mean_kl, **tol.REORDERED)
    assert int((ro.rewards != 0).sum()) == 1


def test_12_kl_in_the_loss_has_the_gradient_of_k2() -> None:
    q, r, _ = tiny.rows(4)
    model = tiny.policy()
    fields = {"init_kl_coef": 0.0, "kl_loss_coef": 1.0, "vf_coef": 0.0, "learning_rate": 1e-2}
    fields |= {"max_grad_norm": None, "mini_batch_size": 4, "ppo_epochs": 1}
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    trainer = tiny.trainer(model, tiny.policy(1), optimizer=optimizer, **fields)
    ro = trainer.rollout(q, r, [0.0] * 4)
    ro.advantages.zero_()
    before = parameters(model)
    stats = trainer.update(ro)
    other = tiny.policy()
    d = current_logprobs(other, q, r) - ro.ref_logprobs
    (torch.where(ro.mask, d**2 / 2, 0).sum() / ro.mask.sum()).backward()
    for n, p in other.named_parameters():
        if p.grad is not None:
            close(before[n] - 1e-2 * p.grad, model.get_parameter(n).detach(), **tol.REORDERED)
    assert stats["ppo/loss/kl"] > 0


def current_logprobs(model: nn.Module, q: list[Tensor], r: list[Tensor]) -> Tensor:
    """[B, T] log-probs with a graph, by plain PyTorch on the logits."""
    batch = collate(q, r, 0, "right")
    out = model.eval()(batch.input_ids, batch.attention_mask, return_logits=True)
    logp = out.logits[:, :-1].log_softmax(-1)
    return logp.gather(-1, batch.input_ids[:, 1:, None])[..., 0]


def lora(seed: int = 0) -> Any:
    import peft

    config = peft.LoraConfig(r=2, target_modules=["c_attn"], init_lora_weights=True)
    return type(tiny.policy())(peft.get_peft_model(tiny.gpt2(seed), config),
                               summary_dropout_prob=0.0)  # fmt: skip


def disturb(model: nn.Module, adapter: str = "default") -> None:
    with torch.no_grad():
        for n, p in model.named_parameters():
            if f"lora_B.{adapter}" in n:
                p.normal_(std=0.3)


def test_13_a_fresh_adapter_is_its_own_reference_when_disabled() -> None:
    model = lora()
    trainer = tiny.trainer(model)
    flags = [p.requires_grad for p in model.parameters()]
    ro = trainer.rollout(*tiny.rows(4))
    assert trainer.ref_model is None and not ro.kl.any()
    for _ in range(2):
        trainer.step(*tiny.rows(4))
    ro = trainer.rollout(*tiny.rows(4))
    base = tiny.trainer(tiny.policy()).rollout(*tiny.rows(4))
    close(ro.ref_logprobs, base.logprobs, **tol.REORDERED)
    assert (ro.kl[ro.mask] != 0).any()
    assert [p.requires_grad for p in model.parameters()] == flags
    assert model.pretrained_model.active_adapter == "default"


def test_13_a_trained_adapter_is_refused_unless_the_reference_is_named() -> None:
    model = lora()
    disturb(model)
    with pytest.raises(ValueError, match="reference='base' if the base model is meant"):
        tiny.trainer(model)
    ro = tiny.trainer(model, reference="base").rollout(*tiny.rows(4))
    base = tiny.trainer(tiny.policy()).rollout(*tiny.rows(4))
    close(ro.ref_logprobs, base.logprobs, **tol.REORDERED)
    peft_model = model.pretrained_model
    peft_model.add_adapter("sft", peft_model.peft_config["default"])
    with torch.no_grad():
        named = dict(model.named_parameters())
        for n, p in named.items():
            if ".sft." in n:
                p.copy_(named[n.replace(".sft.", ".default.")])
    flags = [p.requires_grad for p in model.parameters()]
    trainer = tiny.trainer(model, reference="sft")
    assert not trainer.rollout(*tiny.rows(4)).kl.any()
    trainer.step(*tiny.rows(4))
    assert trainer.rollout(*tiny.rows(4)).kl.any()
    assert [p.requires_grad for p in model.parameters()] == flags
    with pytest.raises(ValueError, match="reference must be one of base, default, sft; got 'ftw'"):
        tiny.trainer(model, reference="ftw")
    with pytest.raises(ValueError, match="reference names an adapter of a peft model"):
        tiny.trainer(reference="base")


def test_13_a_clone_is_frozen_and_stays() -> None:
    trainer = tiny.trainer()
    before = parameters(trainer.ref_model)
    trainer.step(*tiny.rows(4))
    assert_same_parameters(before, parameters(trainer.ref_model))
    assert not any(p.requires_grad for p in trainer.ref_model.parameters())
    model = tiny.policy()
    with pytest.raises(ValueError, match="ref_model has weights of the model being trained"):
        tiny.trainer(model, model)


# --------------------------------------------------------------------------------- rewards


def test_14_order_of_score_shaping() -> None:
    q, r, _ = tiny.rows(4)
    raw = torch.tensor([1.0, 2.0, 4.0, 9.0])
    options = {"use_score_scaling": True, "use_score_norm": True, "score_clip": 1.0}
    trainer = tiny.trainer(missing_eos_penalty=0.5, **options)
    ro = trainer.rollout(q, r, raw)
    assert ro.finished.tolist() == [True, True, True, False]
    expected = ((raw - raw.mean()) / raw.std()).clamp(-1, 1) - torch.tensor([0, 0, 0, 0.5])
    close(ro.scores, expected, **tol.FP32)
    assert ro.raw_scores.tolist() == raw.tolist()
    ro = tiny.trainer(batch_size=1, mini_batch_size=1, **options).rollout(q[:1], r[:1], [7.0])
    assert float(ro.scores[0]) == 0.0


def test_15_scores_may_be_numbers_or_one_reward_per_token() -> None:
    q, r, _ = tiny.rows(4)
    per_token = torch.linspace(-1, 1, len(r[3]))
    scores = [1.5, torch.tensor(2.5), torch.tensor([3.5]), per_token]
    ro = tiny.trainer().rollout(q, r, scores)
    assert ro.scores.tolist() == [1.5, 2.5, 3.5, 0.0]
    close(ro.rewards[3][ro.mask[3]], per_token, **tol.FP32)
    extra = [torch.full((len(x),), 0.25) for x in r]
    more = tiny.trainer().rollout(q, r, scores, token_scores=extra)
    close(more.rewards, ro.rewards + 0.25 * ro.mask, **tol.FP32)
    one_tensor = tiny.trainer().rollout(q, r, torch.tensor([1.0, 2.0, 3.0, 4.0]))
    assert one_tensor.scores.tolist() == [1, 2, 3, 4]


def test_16_whitened_rewards_are_masked_again() -> None:
    plain = tiny.trainer(ref_model=tiny.policy(1)).rollout(*tiny.rows(4))
    ro = tiny.trainer(ref_model=tiny.policy(1), whiten_rewards=True).rollout(*tiny.rows(4))
    x = plain.rewards[plain.mask]
    expected = (x - x.mean()) / (x.var() + 1e-8).sqrt() + x.mean()
    close(ro.rewards[ro.mask], expected, **tol.REORDERED)
    assert not ro.rewards[~ro.mask].any()


# ------------------------------------------------------------------------------- advantages


def test_17_a_truncated_response_is_followed_by_its_value() -> None:
    q, r, s = tiny.rows(4)
    trainer = tiny.trainer(bootstrap_truncated=True, whiten_advantages=False, lam=1.0, gamma=0.9)
    ro = trainer.rollout(q, r, s)
    assert ro.truncated.tolist() == [False, False, False, True]
    assert not ro.bootstrap[:3].any()
    row = torch.cat([q[3], r[3]])[None]
    after = trainer.model.eval()(row, torch.ones_like(row)).values[0, -1].detach()
    close(ro.bootstrap[3], after, **tol.REORDERED)
    last = ro.returns[3][ro.mask[3]][-1]
    close(last, s[3] + 0.9 * after, **tol.REORDERED)
    told = trainer.rollout(q, r, s, truncated=[True, False, False, False])
    assert told.bootstrap[0] != 0 and not told.bootstrap[1:].any()
    assert not tiny.trainer().rollout(q, r, s).bootstrap.any()


@pytest.mark.parametrize("lam", [0.0, 1.0])
def test_19_lam_1_is_monte_carlo_and_lam_0_is_td(lam: float) -> None:
    trainer = tiny.trainer(ref_model=tiny.policy(1), lam=lam, gamma=1.0, whiten_advantages=False)
    ro = trainer.rollout(*tiny.rows(4))
    for i in range(4):
        rewards, values = ro.rewards[i][ro.mask[i]], ro.values[i][ro.mask[i]]
        following = torch.cat([values[1:], torch.zeros(1)])
        expected = rewards + following if lam == 0 else rewards.flip(0).cumsum(0).flip(0)
        close(ro.returns[i][ro.mask[i]], expected, **tol.REORDERED)
        close(ro.advantages[i][ro.mask[i]], expected - values, **tol.REORDERED)


def test_18_advantages_are_whitened_once_over_the_batch() -> None:
    ro = tiny.trainer(mini_batch_size=1).rollout(*tiny.rows(4))
    x = ro.advantages[ro.mask]
    assert float(x.mean()) == pytest.approx(0, abs=1e-5)
    assert float(x.var()) == pytest.approx(1, abs=1e-4)
    assert not ro.advantages.requires_grad and not ro.returns.requires_grad
    raw = (ro.returns - ro.values)[ro.mask]
    close(x, (raw - raw.mean()) / raw.std(), **tol.REORDERED)


def test_editing_rewards_and_computing_advantages_again() -> None:
    trainer = tiny.trainer(whiten_advantages=False)
    q, r, s = tiny.rows(4)
    edited = trainer.rollout(q, r, [x + 1 for x in s])
    ro = trainer.rollout(q, r, s)
    ro.rewards += pk.reference.last_action(ro.mask)
    trainer.compute_advantages(ro)
    close(ro.advantages, edited.advantages, **tol.REORDERED)


# ------------------------------------------------------------------- losses and optimisation


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum",
                                  "constant-divisor"])  # fmt: skip
def test_20_21_the_gradient_is_that_of_the_written_out_loss(mode: str) -> None:
    fields = {"vf_coef": 0.3, "ent_coef": 0.02, "cliprange": 0.1, "cliprange_high": 0.3}
    fields |= {"dual_clip": 1.5, "cliprange_value": 0.05, "loss_agg_mode": mode, "ppo_epochs": 1}
    fields |= {"mini_batch_size": 4, "micro_batch_size": 2, "max_grad_norm": None}
    fields |= {"loss_divisor": 64.0} if mode == "constant-divisor" else {}
    q, r, s = tiny.rows(4)
    model = tiny.policy()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    trainer = tiny.trainer(model, optimizer=optimizer, **fields)
    ro = trainer.rollout(q, r, s)
    g = torch.Generator().manual_seed(3)
    ro.logprobs += 0.4 * torch.randn(ro.logprobs.shape, generator=g)
    ro.values += 0.1 * torch.randn(ro.values.shape, generator=g)
    before = parameters(model)
    stats = trainer.update(ro)
    other, m = tiny.policy(), ro.mask.float()
    loss, clipped = written_out_loss(other, q, r, ro, mode)
    loss.backward()
    for n, p in other.named_parameters():
        if p.grad is not None:
            close(before[n] - 1e-2 * p.grad, model.get_parameter(n).detach(), **tol.STEPPED_SGD)
    assert stats["ppo/loss/total"] == pytest.approx(float(loss), rel=1e-4)
    assert stats["ppo/policy/clipfrac"] == pytest.approx(float((clipped * m).sum() / m.sum()))


def written_out_loss(
    model: nn.Module, q: list[Tensor], r: list[Tensor], ro: Rollout, mode: str
) -> tuple[Tensor, Tensor]:
    batch, m = collate(q, r, 0, "right"), ro.mask.float()
    out = model.eval()(batch.input_ids, batch.attention_mask, return_logits=True)
    log_p = out.logits[:, :-1].log_softmax(-1)
    new = log_p.gather(-1, batch.input_ids[:, 1:, None])[..., 0]
    entropy, v = -(log_p.exp() * log_p).sum(-1), out.values[:, :-1]
    ratio, A = (new - ro.logprobs).exp(), ro.advantages
    policy = -torch.minimum(ratio * A, ratio.clamp(0.9, 1.3) * A)
    policy = torch.where(A < 0, torch.minimum(policy, -1.5 * A), policy)
    clipped = ((A > 0) & (ratio > 1.3)) | ((A < 0) & (ratio < 0.9))
    near = ro.values + (v - ro.values).clamp(-0.05, 0.05)
    value = 0.5 * torch.maximum((v - ro.returns) ** 2, (near - ro.returns) ** 2)
    x = (policy + 0.3 * value - 0.02 * entropy) * m
    rows = x.sum(-1)
    loss = {
        "token-mean": x.sum() / m.sum(),
        "seq-mean-token-mean": (rows / m.sum(-1)).mean(),
        "seq-mean-token-sum": rows.mean(),
        "constant-divisor": x.sum() / 64.0,
    }[mode]
    return loss, clipped.float()


def test_22_micro_batches_change_only_memory() -> None:
    q, r, s = tiny.rows(6)
    results = []
    for micro in (1, 2, 4, 6):
        model = tiny.policy()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
        fields = {"batch_size": 6, "mini_batch_size": 6, "micro_batch_size": micro}
        tiny.trainer(model, optimizer=optimizer, **fields).step(q, r, s)
        results.append(parameters(model))
    for other in results[1:]:
        assert_same_parameters(results[0], other, **tol.STEPPED_SGD)


def count_steps(trainer: PPOTrainer) -> list[list[float]]:
    """Gradient norms seen by the optimizer, one per parameter group call."""
    seen, inner = [], trainer.optimizer.step

    def step(*args: Any, **kwargs: Any) -> Any:
        grads = [p.grad for p in trainer.parameters if p.grad is not None]
        seen.append(float(torch.cat([g.flatten() for g in grads]).norm()))
        return inner(*args, **kwargs)

    trainer.optimizer.step = step
    return seen


def test_23_a_minibatch_is_an_optimizer_step_also_the_last_smaller_one() -> None:
    trainer = tiny.trainer(batch_size=7, mini_batch_size=3, ppo_epochs=3, micro_batch_size=2)
    seen = count_steps(trainer)
    stats = trainer.step(*tiny.rows(7))
    assert len(seen) == 9 == stats["ppo/optimizer_steps"]
    assert stats["ppo/epochs"] == 3


def test_24_every_epoch_has_a_new_order_from_the_seed() -> None:
    def orders(**fields: Any) -> list[list[int]]:
        trainer, seen = tiny.trainer(batch_size=8, mini_batch_size=8, **fields), []
        inner = trainer._backward
        trainer._backward = lambda ro, rows, *rest: (seen.append(rows), inner(ro, rows, *rest))[1]
        trainer.step(*tiny.rows(8))
        return seen

    assert orders(seed=1) == orders(seed=1) != orders(seed=2)
    first, second = orders()
    assert first != second and sorted(first) == sorted(second) == list(range(8))
    assert orders(shuffle=False) == [list(range(8))] * 2


def test_25_every_step_is_clipped() -> None:
    trainer = tiny.trainer(max_grad_norm=0.01)
    seen = count_steps(trainer)
    stats = trainer.step(*tiny.rows(4))
    assert len(seen) == 4 and all(n == pytest.approx(0.01, rel=1e-3) for n in seen)
    assert stats["ppo/grad_norm"] > 0.01


def test_25_a_gradient_that_is_not_finite_makes_no_step() -> None:
    trainer = tiny.trainer(mini_batch_size=4, ppo_epochs=1, ratio_threshold=None)
    trainer.step(*tiny.rows(4))
    before = parameters(trainer.model)
    ro = trainer.rollout(*tiny.rows(4))
    ro.returns[ro.mask] = math.inf
    stats = trainer.update(ro)
    assert stats["ppo/skipped_steps"] == 1 and stats["ppo/optimizer_steps"] == 0
    assert_same_parameters(before, parameters(trainer.model))


def test_26_the_ratio_guard_skips_the_step_itself() -> None:
    trainer = tiny.trainer(mini_batch_size=4, ppo_epochs=1)
    trainer.step(*tiny.rows(4))  # Adam has momentum now
    before = parameters(trainer.model)
    ro = trainer.rollout(*tiny.rows(4))
    ro.logprobs -= 4.0
    stats = trainer.update(ro)
    assert stats["ppo/policy/ratio"] > 10
    assert stats["ppo/skipped_steps"] == 1 and stats["ppo/optimizer_steps"] == 0
    assert_same_parameters(before, parameters(trainer.model))


def test_27_early_stop_comes_before_the_step() -> None:
    trainer = tiny.trainer(early_stopping=True, target_kl=0.1, mini_batch_size=4, ppo_epochs=3)
    before = parameters(trainer.model)
    ro = trainer.rollout(*tiny.rows(4))
    ro.logprobs -= 0.8  # k3 = e^.8 - 1 - .8 = .43 > .15
    stats = trainer.update(ro)
    assert stats["ppo/early_stopped"] == 1 and stats["ppo/epochs"] == 0
    assert stats["ppo/optimizer_steps"] == 0
    assert_same_parameters(before, parameters(trainer.model))
    later = tiny.trainer(early_stopping=True, target_kl=0.05, learning_rate=0.02, ppo_epochs=50)
    stats = later.step(*tiny.rows(4))
    assert stats["ppo/early_stopped"] == 1 and 0 < stats["ppo/optimizer_steps"] < 100
    assert not later.step(*tiny.rows(4), ptx_batch=None)["ppo/epochs"] > 50


TEXTS = [ids(5, 6, 7, 8), ids(9, 10), ids(11, 12, 13)]


def lm_gradients(coef: float) -> dict[str, Tensor]:
    model, total = tiny.policy().eval(), sum(len(t) - 1 for t in TEXTS)
    for text in TEXTS:
        logits = model(text[None], torch.ones(1, len(text)), return_logits=True).logits[0]
        nll = -logits[:-1].log_softmax(-1).gather(-1, text[1:, None]).sum()
        (coef * nll / total).backward()
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("form", ["rows", "padded"])
def test_28_ptx_joins_the_same_optimizer_step(form: str) -> None:
    texts: Any = TEXTS
    if form == "padded":
        batch = collate([t[:1] for t in TEXTS], [t[1:] for t in TEXTS], 0, "right")
        texts = {"input_ids": batch.input_ids, "attention_mask": batch.attention_mask}
        texts["labels"] = batch.input_ids.masked_fill(batch.attention_mask == 0, -100)
    q, r, s = tiny.rows(4)
    after = {}
    for ptx in (None, texts):
        model = tiny.policy()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
        fields = {"mini_batch_size": 4, "micro_batch_size": 2, "ppo_epochs": 1, "ptx_coef": 0.7}
        trainer = tiny.trainer(model, optimizer=optimizer, max_grad_norm=None, **fields)
        seen = count_steps(trainer)
        stats = trainer.step(q, r, s, ptx_batch=ptx)
        after[ptx is None] = parameters(model)
        assert len(seen) == 1
    for n, g in lm_gradients(0.7).items():
        close(after[False][n], after[True][n] - 1e-2 * g, **tol.STEPPED_SGD)
    assert stats["ppo/loss/ptx"] > 1


def test_28_ptx_batches_that_cannot_be_used_are_refused() -> None:
    with pytest.raises(ValueError, match="ptx_batch"):
        tiny.trainer().step(*tiny.rows(4), ptx_batch=TEXTS)  # ptx_coef is 0
    with pytest.raises(TypeError, match="train takes no ptx_batch: give it to step"):
        tiny.trainer().train(TEXTS, len, steps=1, ptx_batch=TEXTS)
    with pytest.raises(TypeError, match=r"ptx_batch\[1\] must be a 1-D tensor of token ids"):
        tiny.trainer(ptx_coef=1.0).step(*tiny.rows(4), ptx_batch=[ids(3, 4), "text"])
    texts = {"input_ids": [ids(3, 4), ids(5, 6, 7)]}
    for batch, message in (
        (iter(TEXTS), "ptx_batch must be a list or tensor, got list_iterator"),
        ({"labels": TEXTS}, "ptx_batch must be a list or tensor, got NoneType"),
        ([ids(3, 4), ids(*[5] * 70)], r"ptx_batch\[1\]: 70 tokens, the model takes at most 64"),
        (texts | {"attention_mask": [ids(1, 1)]}, "ptx_batch attention_mask must have one entry"),
        (texts | {"labels": [ids(1, 1), ids(1)]}, r"ptx_batch labels\[1\] must be one .* 3 tokens"),
    ):
        trainer = tiny.trainer(ptx_coef=1.0, use_score_scaling=True)
        with pytest.raises((TypeError, ValueError), match=message):
            trainer.step(*tiny.rows(4), ptx_batch=batch)
        assert trainer.running.count == 0  # a second try counts no score twice
    with pytest.raises(ValueError, match=r"ptx_batch\[0\] must be \(source, target\), got 3"):
        tiny.trainer(seq2seq(), ptx_coef=1.0).step(*tiny.rows(4), ptx_batch=[ids(3, 4, 5)])


def test_29_value_parameters_have_their_own_rate_and_warm_up_first() -> None:
    model = PolicyAndValue(tiny.gpt2(), tiny.policy(1))
    trainer = tiny.trainer(
        model, value_learning_rate=1e-2, learning_rate=1e-4, critic_warmup_steps=1
    )
    assert [g["lr"] for g in trainer.optimizer.param_groups] == [1e-4, 1e-2]
    for group, own in zip(trainer.optimizer.param_groups, (model.policy, model.value_model)):
        assert set(group["params"]) == set(own.parameters())
    before = parameters(model)
    trainer.step(*tiny.rows(4))
    after = parameters(model)
    assert_same_parameters(*({n: p for n, p in x.items() if n.startswith("policy.")}
                             for x in (before, after)))  # fmt: skip
    assert (before["value_model.v_head.summary.weight"]
            != after["value_model.v_head.summary.weight"]).any()  # fmt: skip
    trainer.step(*tiny.rows(4))
    moved = model.get_parameter("policy.lm_head.weight").detach()
    assert (after["policy.transformer.wte.weight"] != moved).any()


def test_29_the_critic_learns() -> None:
    model = PolicyAndValue(tiny.gpt2(), tiny.policy(1))
    trainer = tiny.trainer(
        model, value_learning_rate=1e-2, critic_warmup_steps=99, vf_coef=1.0, cliprange_value=None
    )
    errors = [trainer.step(*tiny.rows(4))["ppo/val/error"] for _ in range(12)]
    assert errors[-1] < 0.2 * errors[0]


def test_30_nothing_of_the_user_s_is_changed() -> None:
    q, r, s = tiny.rows(4)
    kept = [[x.clone() for x in xs] for xs in (q, r)]
    model, ref, tokenizer = (
        tiny.policy(dropout=0.1).train(),
        tiny.policy(1).train(),
        tiny.Tokenizer(),
    )
    model.pretrained_model.transformer.h[1].eval()
    modes = [m.training for m in (*model.modules(), *ref.modules())]
    generation = model.generation_config.to_dict()
    trainer = tiny.trainer(model, ref, tokenizer=tokenizer)
    config = vars(trainer.config).copy()
    state = torch.get_rng_state()
    scores, masks = torch.tensor(s), [torch.ones(len(x)) for x in r]
    trainer.generate(q, max_new_tokens=4)
    trainer.step(q, r, scores, masks)
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(a, b) for xs, ys in zip(kept, (q, r)) for a, b in zip(xs, ys))
    assert scores.tolist() == torch.tensor(s).tolist()
    assert [m.training for m in (*model.modules(), *ref.modules())] == modes
    assert model.generation_config.to_dict() == generation
    assert vars(tokenizer) == {} and tokenizer.pad_token_id is None
    assert vars(trainer.config) == config
    assert all(p.requires_grad for p in ref.parameters())
    with pytest.raises(ValueError):
        trainer.step(q, r, [math.nan] * 4)
    assert [m.training for m in (*model.modules(), *ref.modules())] == modes


@pytest.mark.parametrize("unit", ["sequence", "token"])
def test_31_the_controller_sees_the_kl_in_its_unit(unit: str) -> None:
    trainer = tiny.trainer(ref_model=tiny.policy(1), kl_unit=unit, target=1e-3, horizon=100)
    ro = trainer.rollout(*tiny.rows(4))
    per_response = float((ro.logprobs - ro.ref_logprobs)[ro.mask].sum()) / 4
    kl = per_response if unit == "sequence" else per_response * 4 / int(ro.mask.sum())
    trainer.kl_ctl.target = kl / 1.1  # an error of 0.1, which is not clipped
    trainer.update(ro)
    assert trainer.kl_ctl.value == pytest.approx(0.2 * (1 + 0.1 * 4 / 100), rel=1e-5)


# ---------------------------------------------------------------------- statistics and checks


def test_32_34_statistics_are_token_weighted_and_defined_for_one_response() -> None:
    trainer = tiny.trainer(ref_model=tiny.policy(1), ppo_epochs=1, learning_rate=0.0)
    ro = trainer.rollout(*tiny.rows(4))
    stats = trainer.update(ro)
    R, V, m = ro.returns, ro.values, ro.mask
    assert stats["ppo/val/error"] == pytest.approx(float(((V - R)[m] ** 2).mean()), rel=1e-4)
    explained = 1 - float((R - V)[m].var() / R[m].var())
    assert stats["ppo/val/var_explained"] == pytest.approx(explained, rel=1e-4)
    assert stats["objective/entropy"] == pytest.approx(float(ro.entropy[m].mean()), rel=1e-5)
    q, r, _ = tiny.rows(1)
    stats = tiny.trainer().step([q[0][:2]], [r[0][:1]], [1.0])
    assert all(math.isfinite(v) for v in stats.values())
    assert stats["ppo/std_scores"] == stats["tokens/queries_len_std"] == 0
    assert stats["ppo/val/var_explained"] == 0


NAMES = """objective/kl objective/kl_coef objective/entropy ppo/mean_non_score_reward
ppo/mean_scores ppo/std_scores ppo/learning_rate ppo/loss/policy ppo/loss/value ppo/loss/total
ppo/policy/entropy ppo/policy/approxkl ppo/policy/policykl ppo/policy/clipfrac ppo/policy/ratio
ppo/policy/advantages_mean ppo/returns/mean ppo/returns/var ppo/val/vpred ppo/val/error
ppo/val/clipfrac ppo/val/mean ppo/val/var ppo/val/var_explained tokens/queries_len_mean
tokens/queries_len_std tokens/responses_len_mean tokens/responses_len_std env/reward_mean
env/reward_std time/ppo/forward_pass time/ppo/optimize_step time/ppo/total"""


def test_33_names_of_trl_classic_are_kept() -> None:
    stats = tiny.trainer().step(*tiny.rows(4))
    assert set(NAMES.split()) <= stats.keys()
    assert all(type(v) is float for v in stats.values())


def test_38_the_same_seed_gives_the_same_bits() -> None:
    def run(seed: int) -> tuple[list[Any], dict[str, Tensor]]:
        torch.manual_seed(torch.seed() % 2**31)  # the global state plays no part
        trainer = tiny.trainer(tiny.policy(0), seed=seed)
        responses = trainer.generate(tiny.rows(4)[0], max_new_tokens=6)
        trainer.step(tiny.rows(4)[0], responses, [1.0, 2.0, 3.0, 4.0])
        return [r.tolist() for r in responses], parameters(trainer.model)

    (a, x), (b, y), (c, _) = run(1), run(1), run(2)
    assert a == b != c
    assert_same_parameters(x, y)


GOOD = {"queries": [ids(3, 4), ids(5)], "responses": [ids(6, 7, 1), ids(8, 1)], "scores": [1.0, 2]}
BAD_ROWS: list[tuple[dict[str, Any], str]] = [
    ({"queries": [ids(3)] * 3}, r"responses must have one entry per query, 3, got 2"),
    ({"scores": [1.0]}, r"scores must have one entry per query, 2, got 1"),
    ({"scores": [1.0, math.nan]}, r"scores\[1\] must be a finite number"),
    (
        {"scores": [1.0, torch.ones(2, 1)]},
        r"scores\[1\] must be a finite number, or one for each of 2 tokens",
    ),
    ({"scores": [torch.ones(2), 1.0]}, r"scores\[0\] .* each of 3 tokens"),
    ({"queries": [ids(3), torch.empty(0, dtype=torch.int64)]}, r"queries\[1\] is empty"),
    ({"queries": [ids(3), ids(3)[None]]}, r"queries\[1\] must be a 1-D tensor .* \(1, 1\)"),
    ({"responses": [[6, 7, 1], ids(8, 1)]}, r"responses\[0\] must be a 1-D tensor .* list"),
    ({"responses": [ids(6, 7, 1), torch.ones(2)]}, r"responses\[1\] .*float32"),
    (
        {"responses": [ids(6, 7, 1), ids(8, 61)]},
        r"responses\[1\] must hold ids in .0, 61., got 8 to 61",
    ),
    ({"queries": [ids(-1), ids(5)]}, r"queries\[0\] must hold ids"),
    ({"queries": [ids(3), torch.full((63,), 5)]}, r"queries\[1\] and responses\[1\]: 65 tokens"),
    (
        {"response_masks": [ids(1, 1, 1), ids(1)]},
        r"response_masks\[1\] must be one finite entry for each of 2 tokens",
    ),
    ({"token_scores": [torch.ones(3)]}, r"token_scores must have one entry per query"),
    ({"truncated": [True]}, r"truncated must have one entry per query"),
    ({"queries": [ids(3)] * 5, "responses": [ids(4)] * 5, "scores": [0.0] * 5}, "batch_size = 4"),
    ({"scores": None}, "scores must be a list or tensor, got NoneType"),
    ({"scores": 1.0}, "scores must be a list or tensor, got float"),
    ({"scores": [1.0, "good"]}, r"scores\[1\] must be a finite number.*, got 'good'"),
    ({"scores": [None, 1.0]}, r"scores\[0\] must be a finite number.*, got None"),
    ({"scores": [1.0, 10**400]}, r"scores\[1\] must be a finite number"),
    ({"scores": torch.tensor(1.0)}, "scores must be a list or tensor, got Tensor"),
    ({"queries": None}, "queries must be a list or tensor, got NoneType"),
    ({"queries": iter([ids(3), ids(5)])}, "queries must be a list or tensor, got list_iterator"),
    ({"response_masks": [ids(1, 1, 1), "ab"]}, r"response_masks\[1\] must be one .*, got 'ab'"),
    ({"token_scores": [[1, [2, 3], 4], [1, 2]]}, r"token_scores\[0\] must be one finite entry"),
    ({"token_scores": [[1, 2, 3], [1, math.inf]]}, r"token_scores\[1\] must be one finite entry"),
    ({"rollout_logprobs": 5}, "rollout_logprobs must be a list or tensor, got int"),
    ({"truncated": [True, None]}, r"truncated\[1\] must be a bool, got None"),
    ({"truncated": torch.ones(2, 2)}, r"truncated\[0\] must be a bool, got shape \(2,\)"),
]


@pytest.mark.parametrize(
    "change, message", BAD_ROWS, ids=lambda x: next(iter(x)) if isinstance(x, dict) else x
)
def test_39_a_bad_row_is_named_and_nothing_has_happened(
    change: dict[str, Any], message: str
) -> None:
    trainer = tiny.trainer(use_score_scaling=False)
    with pytest.raises((ValueError, TypeError), match=message):
        trainer.rollout(**GOOD | change)
    assert trainer.step_count == 0 and trainer.running.count == 0


def test_39_none_stands_for_a_row_without() -> None:
    none, given = [None, torch.ones(2)], [torch.ones(3), torch.ones(2)]
    zeros = [torch.zeros(3), torch.ones(2)]
    one = tiny.trainer().rollout(**GOOD, response_masks=none, token_scores=none)
    two = tiny.trainer().rollout(**GOOD, response_masks=given, token_scores=zeros)
    assert torch.equal(one.mask, two.mask) and torch.equal(one.rewards, two.rewards)
    assert tiny.trainer().rollout(**GOOD, rollout_logprobs=none).rollout_logprobs.isnan().any()
    with pytest.raises(TypeError, match=r"rollout_logprobs\[0\] must be one .* got None"):
        tiny.trainer(rollout_is_cap=2.0).rollout(**GOOD, rollout_logprobs=none)


class Wrapper(nn.Module):
    """As DistributedDataParallel: the forward of another model, and nothing else of it."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, **inputs: Any) -> Any:
        inputs.pop("position_ids")
        return self.module(**inputs)


def test_39_bad_set_ups_are_named() -> None:
    with pytest.raises(TypeError, match="config must be a PPOConfig, got dict"):
        PPOTrainer({}, tiny.policy())
    with pytest.raises(TypeError, match=r"model must be an nn\.Module, got str"):
        PPOTrainer(tiny.trainer().config, "gpt2")
    with pytest.raises(TypeError, match="model has no values: wrap the GPT2LMHeadModel"):
        tiny.trainer(tiny.gpt2())
    with pytest.raises(TypeError, match=r"ref_model must be an nn\.Module, got str"):
        tiny.trainer(ref_model="gpt2")
    wrapped = Wrapper(tiny.policy())
    with pytest.raises(
        TypeError, match=r"model .*Wrapper returns no logits: give the model inside"
    ):
        tiny.trainer(wrapped)
    lists = PPOTrainer(tiny.trainer().config, tiny.policy(), dataset=[ids(3)] * 4)
    with pytest.raises(TypeError, match=r"dataset must have dicts as rows, .* got Tensor"):
        next(iter(lists.dataloader))
    frozen = tiny.policy()
    frozen.requires_grad_(False)
    with pytest.raises(ValueError, match="no parameter that requires a gradient"):
        tiny.trainer(frozen)
    model = tiny.policy()
    model.generation_config.eos_token_id = None
    with pytest.raises(ValueError, match="missing_eos_penalty needs an EOS id"):
        tiny.trainer(model, missing_eos_penalty=1.0)
    with pytest.raises(ValueError, match=r"scores\[0\] must be a finite number, got shape"):
        q, r, _ = tiny.rows(4)
        tiny.trainer(use_score_scaling=True).rollout(q, r, [torch.ones(len(x)) for x in r])


def test_39_a_bad_prompt_is_named_before_anything_is_sampled() -> None:
    trainer = tiny.trainer()
    before = trainer.generator.get_state()
    for queries, options, message in (
        (None, {}, "queries must be a list or tensor, got NoneType"),
        ([ids(3), [4, 5]], {}, r"queries\[1\] must be a 1-D tensor of token ids, got list"),
        (
            ids(3, 4),
            {},
            r"queries\[0\] must be a 1-D tensor .* \(is the list around it missing\?\)",
        ),
        ([ids(3), ids()], {}, r"queries\[1\] is empty"),
        ([ids(99)], {}, r"queries\[0\] must hold ids in \[0, 61\), got 99 to 99"),
        ([ids(3)], {"max_new_tokens": 64}, r"queries\[0\] and max_new_tokens: 65 tokens"),
    ):
        with pytest.raises((TypeError, ValueError), match=message):
            trainer.generate(queries, **options)
    assert torch.equal(before, trainer.generator.get_state())


def test_40_the_first_step_prints_a_check(capsys: pytest.CaptureFixture[str]) -> None:
    trainer = tiny.trainer(mini_batch_size=4)
    q = tiny.rows(4)[0]
    r = trainer.generate(q, max_new_tokens=12)
    trainer.step(q, r, [0.0] * 4)
    said = capsys.readouterr().out
    assert "PPO self-check: largest |new - old| log-prob" in said and "mean KL" in said
    assert "without EOS" in said and len(said.splitlines()) <= 2
    trainer.step(q, r, [0.0] * 4)
    assert capsys.readouterr().out == ""


def test_40_a_suspicious_number_names_its_cause(capsys: pytest.CaptureFixture[str]) -> None:
    trainer = tiny.trainer(tiny.policy(dropout=0.5).train(), disable_dropout=False)
    trainer.step(*tiny.rows(4))
    assert "dropout is live" in capsys.readouterr().out
    trainer, q = tiny.trainer(batch_size=32), tiny.rows(32)[0]
    with pytest.warns(UserWarning, match="top_k=1") as caught:
        greedy = trainer.generate(q, max_new_tokens=8, top_k=1)
    assert caught[0].filename == __file__
    trainer.step(q, greedy, [0.0] * 32)
    assert "more likely than samples of the policy" in capsys.readouterr().out
    model = tiny.policy()
    trainer = tiny.trainer(model, tiny.policy(1), batch_size=16)
    q = tiny.rows(16)[0]
    ref_like = PPOTrainer(trainer.config, tiny.policy(1)).generate(q, max_new_tokens=8)
    with pytest.warns(UserWarning, match="standard errors below 0"):
        trainer.step(q, ref_like, [0.0] * 16)
    said = capsys.readouterr().out
    assert "impossible over samples of the policy" in said


def test_40_ordinary_samples_raise_no_alarm(capsys: pytest.CaptureFixture[str]) -> None:
    """The mean KL of a policy next to its reference is below 0 in half of all batches."""
    ref = tiny.policy()
    kls = []
    for seed in range(4):
        model = tiny.policy()
        with torch.no_grad():
            for p in model.policy_parameters():
                p += 0.003 * torch.randn(p.shape)
        trainer = tiny.trainer(model, ref, batch_size=16, seed=seed)
        q = tiny.rows(16, seed)[0]
        kls.append(
            trainer.step(q, trainer.generate(q, max_new_tokens=8), [0.0] * 16)["objective/kl"]
        )
    assert min(kls) < 0 < max(kls)
    assert "impossible" not in capsys.readouterr().out  # and `_quiet` sees no warning


@pytest.mark.parametrize("n", [1, 2, 4])
def test_40_few_responses_raise_no_alarm(n: int) -> None:
    """Of one response the standard error is unknown, of two it is often far too small."""
    model, ref = tiny.policy(), tiny.policy()
    with torch.no_grad():
        for p in ref.parameters():
            p += 0.003 * torch.randn(p.shape, generator=torch.Generator().manual_seed(1))
    trainer = tiny.trainer(model, ref, batch_size=n, mini_batch_size=n, learning_rate=0.0)
    kls = []
    for seed in range(30):
        q = tiny.rows(n, seed)[0]
        stats = trainer.step(q, trainer.generate(q, max_new_tokens=8), [0.0] * n)
        assert stats["objective/kl_z"] > -5
        kls.append(stats["objective/kl"])
    assert min(kls) < 0


def test_a_minibatch_without_gradients_on_another_device() -> None:
    """The norm of no gradients is on the CPU, the rest is where the model is: here on "meta"."""
    from ppo_kernels.ranks import Ranks
    from ppo_kernels.trainer import stats

    parts = [{"ppo/grad_norm": nn.utils.get_total_norm([])}]
    with pytest.raises(NotImplementedError, match="Cannot copy out of meta"):  # so far it comes
        stats.of_minibatch(parts, 0.0, tiny.trainer().config, Ranks(None, torch.device("meta")))


def test_rewards_per_token_are_in_the_mean_reward() -> None:
    q, r, _ = tiny.rows(4)
    stats = tiny.trainer().step(q, r, [torch.arange(float(len(x))) for x in r])
    want = sum(len(x) * (len(x) - 1) / 2 for x in r) / 4
    assert stats["env/reward_mean"] == pytest.approx(want)
    assert stats["ppo/mean_scores"] == pytest.approx(want)


def test_one_reward_for_the_one_token_of_a_response() -> None:
    """[1] is a score, which is clipped, unless another row shows that rewards are per token."""
    q, r = tiny.rows(2)[0], [ids(5), ids(6, 7)]
    trainer = tiny.trainer(score_clip=0.5, init_kl_coef=0.0)
    for kind in (torch.tensor, list):
        ro = trainer.rollout(q, r, [kind([3.0]), kind([3.0, 3.0])])
        assert ro.rewards.sum(-1).tolist() == [3.0, 6.0]
    ro = trainer.rollout(q, r, [torch.tensor([3.0]), torch.tensor(3.0)])
    assert ro.rewards.sum(-1).tolist() == [0.5, 0.5]


def test_gradients_that_others_left_are_not_stepped_on() -> None:
    after = []
    for leftover in (False, True):
        model = tiny.policy()
        trainer = tiny.trainer(model)
        if leftover:
            x = tiny.rows(1)[0][0][None]
            model.lm(input_ids=x, labels=x).loss.backward()
        trainer.step(*tiny.rows(4))
        after.append(parameters(model))
    assert_same_parameters(*after)


def test_what_generate_cannot_do_is_refused() -> None:
    trainer = tiny.trainer()
    assert trainer.generate([]) == []
    for name, value in (("num_return_sequences", 2), ("attention_mask", torch.ones(1, 1))):
        with pytest.raises(ValueError, match=f"{name} cannot be given"):
            trainer.generate(tiny.rows(1)[0], max_new_tokens=2, **{name: value})


def test_a_pad_token_outside_the_vocabulary() -> None:
    """Padding only fills; a tokenizer grown beyond the model's embedding has its pad out there."""

    class Grown(tiny.Tokenizer):
        pad_token_id = tiny.VOCAB

    trainer = tiny.trainer(tokenizer=Grown())
    assert 0 <= trainer.pad_token_id < tiny.VOCAB
    assert trainer.step(*tiny.rows(4))["ppo/optimizer_steps"] > 0
    with pytest.raises(ValueError, match=r"pad_token_id must be in \[0, 61\), got 61"):
        PPOTrainer(trainer.config, tiny.policy(), pad_token_id=tiny.VOCAB)


def test_models_that_cannot_be_trained_so_are_refused() -> None:
    with pytest.raises(ValueError, match="float16"):
        tiny.trainer(tiny.policy().half())
    model = tiny.policy()
    with pytest.raises(ValueError, match="ref_model has weights of the model being trained"):
        tiny.trainer(model, model.pretrained_model)


def test_39_a_reference_that_is_none_is_named_before_the_first_step() -> None:
    config = tiny.gpt2().config
    scores = transformers.GPT2ForSequenceClassification(config)
    for other in (nn.Linear(3, 3), tiny.t5(), scores, tiny.gpt2().transformer):
        kind = type(other).__name__
        with pytest.raises((TypeError, ValueError), match=f"ref_model .*({kind}|61 tokens)"):
            tiny.trainer(None, other)
    config.vocab_size = tiny.VOCAB + 3
    padded = transformers.GPT2LMHeadModel(config)
    tiny.trainer(None, padded)
    with pytest.raises(ValueError, match=r"ref_model must have .* vocabulary, 61 tokens, got 64"):
        tiny.trainer(None, padded, kl_penalty="full")


def test_39_what_the_value_model_or_the_reference_cannot_read_is_named() -> None:
    def config(**sizes: int) -> Any:
        config = tiny.gpt2().config
        config.update(sizes | {"num_labels": 1})
        return config

    few = transformers.GPT2ForTokenClassification(config(vocab_size=20))
    short = transformers.GPT2LMHeadModel(config(n_positions=8))
    for model, ref, message in (
        (PolicyAndValue(tiny.gpt2(), few), tiny.gpt2(), r"must hold ids in \[0, 20\)"),
        (None, short, r"queries\[0\] and responses\[0\]: 9 tokens, the model takes at most 8"),
    ):
        with pytest.raises(ValueError, match=message):
            tiny.trainer(model, ref).rollout([ids(3, 4, 5, 6)], [ids(7, 8, 9, 10, 60)], [0.0])


def test_39_an_optimizer_of_anything_but_the_model_is_refused() -> None:
    model, other, adam = tiny.policy(), tiny.policy(), torch.optim.Adam
    for optimizer, message in (
        (adam(other.parameters()), "optimizer leaves out 30 parameters that the model trains"),
        (adam(model.pretrained_model.parameters()), "leaves out 2 .*such as v_head"),
        (adam([*model.parameters(), *other.parameters()]), "30 parameters that are not the model"),
    ):
        with pytest.raises(ValueError, match=message):
            tiny.trainer(model, optimizer=optimizer)
    for optimizer in (adam, "adam", 1e-3):
        with pytest.raises(TypeError, match=r"optimizer must be a torch\.optim\.Optimizer, got"):
            tiny.trainer(model, optimizer=optimizer)
    before, model = adam(tiny.policy().parameters()), lora()
    with pytest.raises(ValueError, match=r"leaves out .*lora_.*complete \(LoRA"):
        tiny.trainer(model, optimizer=before)


def test_optimizers_that_hold_more_than_is_trained_or_are_wrapped_go_on() -> None:
    import accelerate

    model = lora()
    optimizer = accelerate.Accelerator(cpu=True).prepare(torch.optim.SGD(model.parameters(), 0.1))
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer.optimizer)
    before, config = parameters(model), tiny.trainer().config
    PPOTrainer(config, model, optimizer=optimizer, lr_scheduler=scheduler).step(*tiny.rows(4))
    changed = {
        n.split(".")[-2] for n, p in model.named_parameters() if not torch.equal(before[n], p)
    }
    assert changed == {"default", "summary"}
    with pytest.raises(ValueError, match="lr_scheduler must be one of the trainer's optimizer"):
        PPOTrainer(config, lora(), lr_scheduler=scheduler)


def test_a_rollout_prints_in_a_line() -> None:
    rollout = tiny.trainer().rollout(*tiny.rows(4))
    assert repr(rollout).startswith("Rollout(4 responses, ") and len(repr(rollout)) < 100


def test_a_separate_value_model_is_saved_beside_the_policy(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = tiny.gpt2().config
    config.num_labels = 1
    value = transformers.GPT2ForTokenClassification(config)
    policy = PolicyAndValue(tiny.gpt2(), value)
    tiny.trainer(policy, tiny.gpt2()).save_pretrained(tmp_path)
    read = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    read_value = transformers.GPT2ForTokenClassification.from_pretrained(tmp_path / "value_model")
    again = PolicyAndValue(read, read_value)
    for a, b in zip(policy.parameters(), again.parameters(), strict=True):
        assert torch.equal(a, b)


# -------------------------------------------------------------------------- other models


def seq2seq() -> Any:
    from ppo_kernels.models import AutoModelForSeq2SeqLMWithValueHead

    return AutoModelForSeq2SeqLMWithValueHead(tiny.t5())


def test_seq2seq_rows_equal_each_row_alone_with_or_without_the_start_token() -> None:
    q, r, s = tiny.rows(4)
    started = [torch.cat([ids(0), x]) for x in r]
    masks = [torch.arange(len(x)) != 1 for x in r]
    trainer = tiny.trainer(seq2seq(), tiny.t5(1), mini_batch_size=4)
    together = trainer.rollout(q, r, s, response_masks=masks)
    with_start = [torch.cat([torch.ones(1), m]) for m in masks]
    again = trainer.rollout(q, started, s, response_masks=with_start)
    for i in range(4):
        alone = trainer.rollout(q[i : i + 1], r[i : i + 1], s[i : i + 1], response_masks=[masks[i]])
        for name in ("logprobs", "ref_logprobs", "values", "entropy", "rewards", "returns"):
            row = getattr(together, name)[i][together.mask[i]]
            assert torch.equal(row, getattr(again, name)[i][again.mask[i]]), name
            close(row, getattr(alone, name)[0][alone.mask[0]], **tol.REORDERED, msg=name)
    assert together.mask.sum() == sum(int(m.sum()) for m in masks) and together.kl.any()


def bart() -> Any:
    from ppo_kernels.models import AutoModelForSeq2SeqLMWithValueHead

    torch.manual_seed(0)
    sizes = {f"{side}_{what}": n for side in ("encoder", "decoder")
             for what, n in (("layers", 1), ("attention_heads", 2), ("ffn_dim", 16))}  # fmt: skip
    config = transformers.BartConfig(
        vocab_size=tiny.VOCAB, d_model=16, max_position_embeddings=32, **sizes
    )
    return AutoModelForSeq2SeqLMWithValueHead(transformers.BartForConditionalGeneration(config))


def test_39_encoder_and_decoder_have_so_many_positions_each() -> None:
    trainer, long = tiny.trainer(bart()), ids(*[5] * 33)
    start = ids(trainer.model.config.decoder_start_token_id)
    assert len(trainer.rollout([long[1:]], [torch.cat([start, long[2:]])], [1.0])) == 1
    for q, r in ((long, start), (start, long[1:])):
        with pytest.raises(ValueError, match=r"queries\[0\] and responses\[0\]: 33 tokens"):
            trainer.rollout([q], [r], [1.0])


def test_36_a_bias_of_another_dtype_than_the_head() -> None:
    model = bart()
    plain = tiny.trainer(model).rollout(*tiny.rows(4))
    model.pretrained_model.final_logits_bias = model.pretrained_model.final_logits_bias.double()
    assert torch.equal(tiny.trainer(model).rollout(*tiny.rows(4)).logprobs, plain.logprobs)
    tiny.trainer(model, kl_penalty="full").rollout(*tiny.rows(4))


def test_seq2seq_training_raises_the_reward() -> None:
    """generate -> rollout -> update, from texts, with a reward that only the decoder can earn."""
    options = {"batch_size": 16, "mini_batch_size": 16, "learning_rate": 0.02, "ppo_epochs": 4}
    trainer = tiny.trainer(seq2seq(), tokenizer=tiny.Tokenizer(), init_kl_coef=0.0, **options)

    def reward(prompts: list[str], responses: list[str]) -> list[float]:
        shares = [[int(w[1:]) < 31 for w in r.split()] for r in responses]
        return [sum(x) / max(len(x), 1) for x in shares]

    prompts = [f"w{3 + i} w{4 + i} w5" for i in range(16)]
    means = [s["env/reward_mean"] for s in trainer.train(prompts, reward, 8, max_new_tokens=6)]
    assert sum(means[-2:]) / 2 > means[0] + 0.2


def test_seq2seq_rows_train_and_the_first_token_counts() -> None:
    model = seq2seq()
    trainer = tiny.trainer(model, mini_batch_size=4)
    q = tiny.rows(4)[0]
    r = trainer.generate(q, max_new_tokens=5)
    assert all(int(x[0]) == 0 for x in r)
    r[0], r[1] = ids(0, tiny.EOS), ids(tiny.EOS)  # with and without the start token
    ro = trainer.rollout(q, r, [1.0, -1.0, 0.5, 0.0], response_masks=None)
    assert ro.mask.sum(-1).tolist() == [1, 1, len(r[2]) - 1, len(r[3]) - 1]
    with torch.no_grad():
        inputs = {"input_ids": q[2][None], "attention_mask": torch.ones_like(q[2])[None]}
        out = model.eval()(**inputs, decoder_input_ids=r[2][None], return_logits=True)
        logits = out.logits[0]
    expected = logits[:-1].log_softmax(-1).gather(-1, r[2][1:, None])[:, 0]
    close(ro.logprobs[2][ro.mask[2]], expected, **tol.REORDERED)
    before = parameters(model)
    pairs = [(ids(3, 4, 5), ids(6, 7, 1)), (ids(8), ids(9, 10, 11, 12, 1))]
    lm = [model.lm(input_ids=x[None], labels=y[None]).loss.item() * len(y) for x, y in pairs]
    trainer.config.ptx_coef, trainer.config.ppo_epochs = 0.5, 1
    stats = trainer.update(ro, ptx_batch=pairs)
    assert stats["ppo/policy/first_logprob_gap"] <= 1e-5
    assert stats["ppo/loss/ptx"] == pytest.approx(sum(lm) / 8, rel=1e-5)  # of transformers itself
    with pytest.raises(TypeError, match="pairs for seq2seq"):
        trainer.update(ro, ptx_batch={"input_ids": q[0][None]})
    assert any((before[n] != p).any() for n, p in model.named_parameters())


class Bigram(nn.Module):
    """Any module that returns (logits, .., values): here TRL's triple without transformers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.value = nn.Embedding(tiny.VOCAB, tiny.VOCAB), nn.Embedding(tiny.VOCAB, 1)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, position_ids: Tensor) -> Any:
        return self.table(input_ids), None, self.value(input_ids).squeeze(-1)


@pytest.mark.parametrize("kind", ["kl", "full"])
def test_any_module_that_returns_logits_and_values_trains(kind: str) -> None:
    model = Bigram()
    trainer = tiny.trainer(model, kl_penalty=kind, learning_rate=0.05)
    q, r, _ = tiny.rows(4)
    ro = trainer.rollout(q, r, [1.0, 1.0, -1.0, -1.0])
    first = model.table(q[0][-1:]).log_softmax(-1)[0, r[0][0]]
    close(ro.logprobs[0][ro.mask[0]][0], first.detach(), **tol.FP32)
    losses = [trainer.step(q, r, [1.0, 1.0, -1.0, -1.0])["objective/kl"] for _ in range(5)]
    assert losses[0] == 0 and losses[-1] != 0
    with pytest.raises(ValueError, match="value_parameters"):
        tiny.trainer(Bigram(), value_learning_rate=1e-3)


@pytest.fixture(autouse=True)
def _quiet(recwarn: pytest.WarningsRecorder) -> Iterator[None]:
    """No test leaves warnings of ours unasserted but the negative KL of invented responses."""
    yield
    ours = [w for w in recwarn if "ppo_kernels" in w.filename]
    assert not [w for w in ours if "standard errors below 0" not in str(w.message)]
