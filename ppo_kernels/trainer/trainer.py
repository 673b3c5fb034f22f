"""PPOTrainer: generate -> rollout -> update, around any reward."""

import copy
import dataclasses
import math
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, repeat
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader

from ppo_kernels import compute_rewards, gae, kl_penalty, masked_whiten, modes, ppo_loss
from ppo_kernels.ranks import BatchOrder, Ranks
from ppo_kernels.trainer import checkpoint, stats
from ppo_kernels.trainer.config import KL_KINDS, PPOConfig
from ppo_kernels.trainer.control import AdaptiveKLController, FixedKLController, RunningMoments
from ppo_kernels.trainer.forward import Reader, full_kl
from ppo_kernels.trainer.inputs import InputChecker, length
from ppo_kernels.trainer.rollout import TOKEN_FIELDS, Batch, Rollout, collate, response_text

# Options of generate() that would make it return something else than a sample per query.
REFUSED = ("attention_mask", "input_ids", "num_return_sequences", "return_dict_in_generate")
# Values of generate()'s options that leave the policy's distribution as it is; the first is the
# trainer's default, whatever the model's generation_config says.
PLAIN_SAMPLING = {
    **{"do_sample": (True,), "num_beams": (1,), "top_k": (0, None), "top_p": (1.0, None)},
    **{"min_p": (None,), "typical_p": (1.0,), "repetition_penalty": (1.0,)},
    **{"no_repeat_ngram_size": (0,), "min_length": (0, -1, None), "min_new_tokens": (None, 0)},
}
# Wrappers by name, as DeepSpeed need not be there: their forward or backward waits for all ranks.
SHARED = {"DistributedDataParallel", "FullyShardedDataParallel", "DeepSpeedEngine"}
# Settings of ppo_loss, and attributes with a state of their own.
LOSS = ("cliprange", "cliprange_high", "dual_clip", "cliprange_value", "vf_coef", "ent_coef")
STATEFUL = ("optimizer", "lr_scheduler", "kl_ctl", "running")


class PPOTrainer:
    """PPO for a language model with a value head, or a (policy, value model) pair.

    model: one of ppo_kernels.models, or any module whose forward returns (logits, .., values);
    not wrapped or sharded, as the trainer sums gradients over ranks itself.
    ref_model: the reference policy, any LM. None: a peft model's adapter is switched off, any
    other policy is cloned and frozen. reference (peft): "base" for the model without adapter, or
    the name of a loaded adapter; needed where the adapter already does something, as the base
    model is then not the policy that training starts from. tokenizer: for EOS, padding, texts.
    dataset, data_collator: for `dataloader`. optimizer, lr_scheduler (stepped once per update):
    by default Adam and none. group: a torch.distributed group, by default all ranks.

    Index convention, masks and formulas are those of ppo_kernels.reference; methods, settings and
    statistics have the names of TRL's classic PPOTrainer. Nothing given is changed but the
    trained parameters.
    """

    def __init__(
        self,
        config: PPOConfig,
        model: nn.Module,
        ref_model: nn.Module | None = None,
        tokenizer: Any = None,
        dataset: Any = None,
        optimizer: torch.optim.Optimizer | None = None,
        data_collator: Callable[[list[Any]], Any] | None = None,
        *,
        lr_scheduler: Any = None,
        reference: str | None = None,
        pad_token_id: int | None = None,
        group: Any = None,
    ) -> None:
        if not isinstance(config, PPOConfig):
            raise TypeError(f"config must be a PPOConfig, got {type(config).__name__}")
        for name, x in {"model": model, "ref_model": ref_model or model}.items():
            if not isinstance(x, nn.Module):
                raise TypeError(f"{name} must be an nn.Module, got {type(x).__name__}")
            _check_whole(name, x)
        self.config = cfg = dataclasses.replace(config)
        self.model, self.tokenizer, self.lr_scheduler = model, tokenizer, lr_scheduler
        first = next(model.parameters(), torch.empty(0))
        self.device, self.dtype = first.device, torch.promote_types(first.dtype, torch.float32)
        self.ranks = Ranks(group, self.device)
        self._set_tokens(pad_token_id, ref_model)
        ref, self.reference = modes.reference_policy(model, ref_model, reference)
        self.ref_model = None if ref is model else ref
        self._policy, self._ref = Reader(model, cfg.bf16), Reader(ref, cfg.bf16, self.reference)
        if self._policy.has_head and not hasattr(model, "value_parameters"):
            raise TypeError(
                f"model has no values: wrap the {type(model).__name__} in ppo_kernels.models."
                "AutoModelForCausalLMWithValueHead (or ForSeq2SeqLM), or in PolicyAndValue"
            )
        self._frozen_sum = checkpoint.frozen_sum(model, self.ref_model)
        self._set_optimizer(optimizer)
        self.ranks.broadcast(p for p in model.parameters() if p.requires_grad)
        self._check_models(ref_model)
        self.kl_ctl = FixedKLController(cfg.init_kl_coef)
        if cfg.adap_kl_ctrl:
            self.kl_ctl = AdaptiveKLController(cfg.init_kl_coef, cfg.target, cfg.horizon)
        self.running = RunningMoments()
        self.generator = torch.Generator().manual_seed(cfg.seed + 100_003 * self.ranks.rank)
        self.step_count = self.samples = 0
        self.places = {data: {"epoch": 0, "cursor": 0} for data in ("dataset", "prompts")}
        self.dataloader = None
        if dataset is not None:
            order, collator = self._order("dataset", len(dataset)), data_collator or _columns
            self.dataloader = DataLoader(dataset, batch_sampler=order, collate_fn=collator)

    def _set_tokens(self, pad_token_id: int | None, ref_model: nn.Module | None) -> None:
        owners = (self.tokenizer, getattr(self.model, "generation_config", None))
        eos = [getattr(owner, "eos_token_id", None) for owner in owners]
        self.eos_ids = sorted({i for e in eos for i in ([e] if isinstance(e, int) else e or [])})
        models = (self.model, getattr(self.model, "value_model", None), ref_model)
        own, *others = (getattr(model, "config", None) for model in models)
        self.inputs = InputChecker(self.config, own, self.eos_ids, others)
        V = self.inputs.vocab_size
        if pad_token_id is not None and not 0 <= pad_token_id < V:
            raise ValueError(f"pad_token_id must be in [0, {V}), got {pad_token_id}")
        # It only fills, so a tokenizer's own that the model has no row for is passed over.
        pads = (pad_token_id, getattr(self.tokenizer, "pad_token_id", None), *self.eos_ids, 0)
        self.pad_token_id = next(p for p in pads if p is not None and 0 <= p < V)
        if self.config.missing_eos_penalty is not None and not self.eos_ids:
            raise ValueError("missing_eos_penalty needs an EOS id: tokenizer and model have none")

    def _check_models(self, ref_model: nn.Module | None) -> None:
        """Ask each about two tokens, now rather than in the first step."""
        some = torch.zeros(1, dtype=torch.int64)
        batch = self._collate([some], [some])
        V = self._policy.vocabulary("model", batch, with_values=True)
        if ref_model is None or (other := self._ref.vocabulary("ref_model", batch)) == V:
            return
        # Rows for more or fewer tokens are fine, if they are what it says it has: logits.
        own = getattr(getattr(ref_model, "config", None), "vocab_size", None)
        if other != own or self.config.kl_penalty == "full":
            raise ValueError(f"ref_model must have the model's vocabulary, {V} tokens, got {other}")

    def _set_optimizer(self, optimizer: torch.optim.Optimizer | None) -> None:
        lr, value_lr = self.config.learning_rate, self.config.value_learning_rate
        values = set(getattr(self.model, "value_parameters", list)())
        if not values and (value_lr is not None or self.config.critic_warmup_steps):
            raise ValueError("value_learning_rate, critic_warmup_steps need model.value_parameters")
        if optimizer is not None and value_lr is not None:
            raise ValueError("value_learning_rate is for the default optimizer, got an optimizer")
        trainable = [p for p in self.model.parameters() if p.requires_grad]
        if not trainable:
            raise ValueError("model has no parameter that requires a gradient")
        if any(p.dtype == torch.float16 for p in trainable):
            raise ValueError(
                "model has float16 weights to train, which the optimizer's steps overflow: load it "
                "with dtype=torch.float32, and set bf16=True for speed"
            )
        if optimizer is None:
            policy = {"params": [p for p in trainable if p not in values]}
            value = {"params": [p for p in trainable if p in values]}
            value["lr"] = lr if value_lr is None else value_lr
            groups = [group for group in (policy, value) if group["params"]]
            fused = self.device.type in ("cpu", "cuda")  # one kernel, where it surely exists
            optimizer = torch.optim.Adam(groups, lr=lr, fused=fused)
        self.optimizer, self.parameters = optimizer, _stepped(optimizer, self.model)
        steered = getattr(self.lr_scheduler, "optimizer", optimizer)
        if steered.param_groups is not optimizer.param_groups:
            raise ValueError("lr_scheduler must be one of the trainer's optimizer: give both")
        self._policy_parameters = [p for p in self.parameters if p not in values]

    def _order(self, data: str, n: int) -> BatchOrder:
        """The order of its n rows, from the place that was come to, which survives checkpoints."""
        cfg, ranks, place = self.config, self.ranks, self.places[data]
        return BatchOrder(n, cfg.batch_size, cfg.seed, cfg.shuffle, ranks.rank, ranks.size, place)

    # ------------------------------------------------------------------------------ sampling

    @torch.no_grad()
    def generate(
        self, queries: Sequence[Tensor], *, return_prompt: bool = False, **gen_kwargs: Any
    ) -> list[Tensor]:
        """One sample per query (1-D tensors), cut after its EOS; seq2seq: with the start token.

        Plain samples at config.temperature; gen_kwargs go to transformers' generate. Random
        numbers come from the trainer's generator; the global ones, the model's mode, tokenizer
        and generation_config stay as they are. return_prompt puts the query in front.
        """
        self._check_sampling(gen_kwargs)
        if not length("queries", queries):
            return []
        room = ("max_new_tokens", gen_kwargs.get("max_new_tokens") or 1)
        prompts = [self.inputs.query(f"queries[{i}]", q, *room) for i, q in enumerate(queries)]
        batch = collate(prompts, [q[:0] for q in prompts], self.pad_token_id).to(self.device)
        ids, attention = batch.input_ids, batch.attention_mask
        options = {name: plain[0] for name, plain in PLAIN_SAMPLING.items()} | {"use_cache": True}
        options |= {"eos_token_id": self.eos_ids or None, "pad_token_id": self.pad_token_id}
        options |= {"temperature": self.config.temperature} | gen_kwargs
        seed = int(torch.randint(2**62, (1,), generator=self.generator))
        devices = [self.device] if self.device.type == "cuda" else []
        with modes.without_dropout(self.model), torch.random.fork_rng(devices):
            torch.manual_seed(seed)
            out = self.model.generate(input_ids=ids, attention_mask=attention, **options).cpu()
        first = int(self.inputs.start is not None)
        out = out if first else out[:, ids.shape[1] :]
        eos = torch.tensor(options.get("eos_token_id") or [], dtype=out.dtype).reshape(-1)
        ended = torch.isin(out[:, first:], eos).long()
        lengths = first + (ended.cumsum(-1) - ended == 0).sum(-1)
        rows = [row[:n].to(q.device) for row, n, q in zip(out, lengths.tolist(), queries)]
        return [torch.cat([q, r]) for q, r in zip(queries, rows)] if return_prompt else rows

    def _check_sampling(self, gen_kwargs: dict[str, Any]) -> None:
        own = self.config.temperature
        for name, value in gen_kwargs.items():
            if name in REFUSED:
                raise ValueError(f"{name} cannot be given: generate makes one sample per query")
            if name == "temperature" and value != own:
                raise ValueError(
                    f"temperature={value} belongs in PPOConfig.temperature (now {own}), where old, "
                    "new and reference log-probs see it"
                )
            if value not in PLAIN_SAMPLING.get(name, (value,)):
                other = f"generate({name}={value!r}) samples from another policy than is trained: "
                warnings.warn(other + "expect negative KL and biased updates", stacklevel=4)

    # ------------------------------------------------------------------------------- rollout

    @torch.no_grad()
    def rollout(
        self, queries: Sequence[Tensor], responses: Sequence[Tensor], scores: Any, **options: Any
    ) -> Rollout:
        """Score responses under policy and reference, and turn scores into advantages.

        queries, responses: lists of 1-D integer tensors; a response may be empty (it then counts
        nowhere), and may begin with a seq2seq model's start token. scores: one per response, each
        a number, a 0-D or [1] tensor, or one reward per response token. Options, lists with one
        entry per response: response_masks, 0 where a token was not chosen by the policy (a reward
        on it counts nowhere); truncated, whether it was cut off (default: it has no EOS);
        token_scores, rewards per token besides the score; rollout_logprobs, by the sampler. But for
        truncated, None stands for a row that has none.

        Order: raw score -> running scale -> clip -> missing-EOS penalty -> on the last action ->
        + KL penalty -> optional whitening. Of the trainer, only the running moments move.
        """
        x = self.ranks.together(lambda: self.inputs(queries, responses, scores, **options))
        batch = self._collate(x["queries"], x["responses"], x["response_masks"])
        zeros = torch.zeros(batch.mask.shape, dtype=self.dtype, device=self.device)
        fields = {name: zeros.clone() for name in TOKEN_FIELDS}
        for name in ("token_scores", "rollout_logprobs"):
            fields[name] = batch.scatter(x[name].to(zeros))
        fields["raw_scores"] = fields["scores"] = x["scores"].to(zeros)
        fields["bootstrap"] = torch.zeros_like(fields["scores"])
        fields |= {name: x[name].to(self.device) for name in ("finished", "truncated")}
        ro = Rollout(x["queries"], x["responses"], batch.mask, **fields)
        with modes.without_dropout(self.model, self.ref_model):
            for rows, part, batch in self._micro_batches(ro, range(len(ro))):
                self._score(ro, rows, part, batch)
        self._add_rewards(ro)
        self.compute_advantages(ro)
        return ro

    def _collate(
        self, queries: list[Tensor], responses: list[Tensor], masks: list[Tensor] | None = None
    ) -> Batch:
        """On the model's device, padded on the right, where positions need no care."""
        start, pad = self.inputs.start, self.pad_token_id
        batch = collate(queries, responses, pad, "right", masks, start_token_id=start)
        return batch.to(self.device)

    def _split(self, rows: list[Any]) -> BatchSampler:
        """rows in parts that fit into memory."""
        size = self.config.micro_batch_size or self.config.minibatch
        return BatchSampler(rows, size, drop_last=False)

    def _micro_batches(
        self, ro: Rollout, rows: Iterable[int]
    ) -> Iterator[tuple[list[int], Rollout, Batch]]:
        """(rows, these of ro, collated) in parts of rows about as long, to pad little."""
        rows = sorted(rows, key=lambda i: len(ro.queries[i]) + len(ro.responses[i]))
        for some in self._split(rows):
            part = ro[some]
            batch = self._collate(part.queries, part.responses)
            yield some, part.widen(batch.mask.shape[1]).to(self.device), batch

    def _score(self, ro: Rollout, rows: list[int], part: Rollout, batch: Batch) -> None:
        """Fill in what policy and reference say about some rows."""
        cfg, kind = self.config, KL_KINDS[self.config.kl_penalty]
        said, values, logits = self._policy(batch, cfg.temperature, with_values=True)
        ref, _, ref_logits = self._ref(batch, cfg.temperature)
        said["ref_logprobs"] = ref["logprobs"]
        if kind == "full":
            kl = full_kl(logits, ref_logits, len(batch.labels), cfg.temperature)
            said["kl"] = batch.scatter(kl)
        else:
            said["kl"] = kl_penalty(said["logprobs"], said["ref_logprobs"], kind)
        for name, x in said.items():
            getattr(ro, name)[rows, : x.shape[1]] = torch.where(part.mask, x, 0).to(self.dtype)
        if cfg.bootstrap_truncated:
            # The forward has read the last token too, so V of the state after it is at hand.
            after = values.gather(-1, batch.lengths[:, None] - 1).squeeze(-1)
            ro.bootstrap[rows] = torch.where(part.truncated, after, 0).to(self.dtype)

    def _add_rewards(self, ro: Rollout) -> None:
        """Scores and rewards, in the order that `rollout` tells."""
        cfg, scores, group = self.config, ro.raw_scores.double(), self.ranks.group
        if cfg.use_score_scaling:
            for scored in self.ranks.gather(scores[ro.mask.any(-1)].tolist()):
                self.running.update(scored)
            shift = self.running.mean if cfg.use_score_norm else 0.0
            scores = (scores - shift) / self.running.std
        if cfg.score_clip is not None:
            scores = scores.clamp(-cfg.score_clip, cfg.score_clip)
        ro.scores = (scores - (cfg.missing_eos_penalty or 0.0) * ~ro.finished).to(self.dtype)
        given, beta, kind = ro.token_scores, self.kl_ctl.value, KL_KINDS[cfg.kl_penalty]
        if kind == "full":  # no function of the two log-probs, so it goes in per token
            given, beta, kind = given - beta * ro.kl, 0.0, "k1"
        options = {"kl_coef": beta, "kl_penalty": kind, "kl_placement": cfg.kl_placement}
        options["token_rewards"] = given
        ro.rewards = compute_rewards(ro.scores, ro.logprobs, ro.ref_logprobs, ro.mask, **options)
        if cfg.whiten_rewards:
            ro.rewards = masked_whiten(ro.rewards, ro.mask, shift_mean=False, group=group)

    def compute_advantages(self, rollout: Rollout) -> None:
        """Set rollout.returns and .advantages (whitened over all ranks) from its rewards."""
        cfg, ro, group = self.config, rollout, self.ranks.group
        options = {"gamma": cfg.gamma, "lam": cfg.lam, "bootstrap": ro.bootstrap}
        ro.advantages, ro.returns, sums = gae(ro.rewards, ro.values, ro.mask, **options)
        if cfg.whiten_advantages:
            ro.advantages = masked_whiten(ro.advantages, ro.mask, stats=sums, group=group)

    # -------------------------------------------------------------------------------- update

    def step(
        self,
        queries: Sequence[Tensor],
        responses: Sequence[Tensor],
        scores: Any,
        response_masks: Sequence[Tensor] | None = None,
        *,
        ptx_batch: Any = None,
        **options: Any,
    ) -> dict[str, float]:
        """`update(rollout(...))`: one PPO iteration; returns what STATISTICS.md lists."""
        began = time.perf_counter()
        self.ranks.together(self.inputs.ptx, ptx_batch)  # before the running moments move
        rollout = self.rollout(queries, responses, scores, response_masks=response_masks, **options)
        scored = time.perf_counter()
        out = self.update(rollout, ptx_batch=ptx_batch)
        seconds = {"forward_pass": scored - began, "total": time.perf_counter() - began}
        return out | {f"time/ppo/{name}": x for name, x in seconds.items()}

    def update(self, rollout: Rollout, *, ptx_batch: Any = None) -> dict[str, float]:
        """ppo_epochs passes of minibatches, then the KL controller and the scheduler, once each.

        A minibatch is one optimizer step; micro-batches only save memory. The step is left out,
        and counted in ppo/skipped_steps, if the minibatch has no action, its mean ratio exceeds
        ratio_threshold or its gradient is not finite. early_stopping ends the passes before the
        step whose KL(old || new) exceeds 1.5 target_kl. All ranks decide alike. ptx_batch: texts
        as 1-D tensors, a dict with input_ids (attention_mask, labels), or for seq2seq (source,
        target) pairs; their LM loss joins the same optimizer steps, each text once per pass.
        """
        began, cfg = time.perf_counter(), self.config
        ptx = self.ranks.together(self.inputs.ptx, ptx_batch)
        plan, done = self._minibatches(rollout, ptx), []
        self.optimizer.zero_grad(set_to_none=True)  # whatever others left there
        models = [self.model] if cfg.disable_dropout else []
        with modes.without_dropout(*models, training=True):
            for rows, texts in plan:
                done.append(self._backward(rollout, rows, texts))
                if done[-1]["verdict"] == "step":
                    self.optimizer.step()
                self.optimizer.zero_grad(set_to_none=True)
                if done[-1]["verdict"] == "stop":
                    break
        out = stats.of_rollout(rollout, self.kl_ctl.value, self.ranks)
        out |= stats.of_update(done, len(plan) // cfg.ppo_epochs)
        out["ppo/learning_rate"] = float(self.optimizer.param_groups[0]["lr"])
        kl = "objective/kl" if cfg.kl_unit == "sequence" else "objective/kl_per_token"
        self.kl_ctl.update(out[kl], int(out["tokens/responses"]))
        if self.lr_scheduler is not None:
            self.lr_scheduler.step()
        self.step_count += 1
        self.samples += int(out["tokens/responses"])
        stats.report(out, cfg, first=self.step_count == 1 and self.ranks.rank == 0)
        out["time/ppo/optimize_step"] = time.perf_counter() - began
        return out

    def _minibatches(self, ro: Rollout, ptx: list[Any]) -> list[tuple[list[int], list[Any]]]:
        """Of all passes: rows with an action, and ptx rows; as many on every rank."""
        B, live, size = len(ro), ro.mask.any(-1).tolist(), self.config.minibatch
        n = int(self.ranks.max(torch.tensor(-(-B // size), device=self.device)))
        plan = []
        for _ in range(self.config.ppo_epochs):
            order = torch.randperm(B, generator=self.generator).tolist()
            order = order if self.config.shuffle else sorted(order)
            for k in range(n):
                rows = order[k * size : (k + 1) * size]
                plan.append(([i for i in rows if live[i]], ptx[k::n]))
        return plan

    def _backward(self, ro: Rollout, rows: list[int], ptx: list[Any]) -> dict[str, Any]:
        """Gradients of one minibatch, micro-batch by micro-batch; its statistics and verdict."""
        cfg, parts = self.config, []
        # Counts over all ranks: the denominators of the losses.
        words = sum(int(mask.sum()) for _, _, mask in ptx)
        counts = (int(ro.mask[rows].sum()), len(rows), words)
        counts = torch.tensor(counts, dtype=torch.float64, device=self.device)
        tokens, responses, words = self.ranks.sum(counts).tolist()
        for _, part, batch in self._micro_batches(ro, rows):
            loss, numbers = self._loss(part, batch, tokens, responses)
            loss.backward()
            parts.append(numbers)
        for texts in self._split(ptx if tokens else []):
            batch = self._collate(*map(list, zip(*texts)))
            said, _, _ = self._policy(batch, temperature=1.0, with_values=True)
            loss = -torch.where(batch.mask, said["logprobs"], 0).sum() / max(words, 1.0)
            (cfg.ptx_coef * loss).backward()
            parts.append({"ppo/loss/ptx": loss.detach() * tokens})
        self.ranks.sum_gradients(self.parameters)
        if self.step_count < cfg.critic_warmup_steps:
            for p in self._policy_parameters:
                p.grad = None
        norm = nn.utils.clip_grad_norm_(self.parameters, cfg.max_grad_norm or math.inf)
        return stats.of_minibatch([*parts, {"ppo/grad_norm": norm}], tokens, cfg, self.ranks)

    def _loss(
        self, old: Rollout, batch: Batch, tokens: float, responses: float
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """This micro-batch's part of the minibatch's loss, and its statistics."""
        cfg = self.config
        new, _, _ = self._policy(batch, cfg.temperature, with_values=True)
        terms = {"values": new["values"], "old_values": old.values, "returns": old.returns}
        terms["entropy"] = new["entropy"] if cfg.ent_coef else new["entropy"].detach()
        terms |= {"ref_logprobs": old.ref_logprobs, "kl_coef": cfg.kl_loss_coef}
        if cfg.rollout_is_cap is not None:
            terms |= {"rollout_logprobs": old.rollout_logprobs, "is_cap": cfg.rollout_is_cap}
        count = responses if cfg.loss_agg_mode.startswith("seq") else tokens
        terms["reduction"] = "sum" if cfg.loss_divisor else cfg.loss_agg_mode
        terms["normalizer"] = cfg.loss_divisor or count
        terms |= {name: getattr(cfg, name) for name in LOSS}
        out = ppo_loss(new["logprobs"], old.logprobs, old.advantages, old.mask, **terms)
        return out.loss, stats.of_micro_batch(out, new, old, tokens)

    # -------------------------------------------------------------------- loop and checkpoints

    def train(
        self,
        prompts: Sequence[str] | Sequence[Tensor],
        reward_fn: Callable[[list[Any], list[Any]], Any],
        steps: int | None = None,
        callbacks: Sequence[Callable[["PPOTrainer", dict[str, float]], None]] = (),
        **gen_kwargs: Any,
    ) -> list[dict[str, float]]:
        """generate -> reward_fn -> step, `steps` times more (None: up to config.steps in all).

        prompts: texts (with a tokenizer), or 1-D tensors of ids. reward_fn(prompts, responses)
        gets two lists of the same kind and returns scores as `rollout` takes them. Every
        callback(trainer, stats) is called after every step. Returns all stats.
        """
        if steps is None and self.config.steps is None:
            raise ValueError("steps must be given here or in PPOConfig, got None twice")
        if "ptx_batch" in gen_kwargs:
            raise TypeError("train takes no ptx_batch: give it to step, or to update, in your loop")
        steps = max(self.config.steps - self.step_count, 0) if steps is None else steps
        if type(steps) is not int:
            raise TypeError(f"steps must be an integer, got {steps!r}")
        texts = length("prompts", prompts) > 0 and isinstance(prompts[0], str)
        if texts and self.tokenizer is None:
            raise ValueError("prompts are texts, which needs a tokenizer, got None")
        epochs, history = repeat(self._order("prompts", len(prompts))), []
        for _, rows in zip(range(steps), chain.from_iterable(epochs)):
            random = self.generator.get_state()
            try:
                asked = [prompts[i] for i in rows]
                sampled = self.ranks.together(self._sample, asked, texts, reward_fn, gen_kwargs)
            except BaseException:  # as if the batch had not been drawn: a checkpoint now is sound
                self.generator.set_state(random)
                self.places["prompts"]["cursor"] -= 1
                raise
            history.append(self.step(*sampled))
            for callback in callbacks:
                callback(self, history[-1])
        return history

    def _sample(
        self, asked: list[Any], texts: bool, reward_fn: Callable[..., Any], options: dict[str, Any]
    ) -> tuple[list[Tensor], list[Tensor], Any]:
        """(queries, responses, scores) of some prompts."""
        queries = asked
        if texts:
            tokens = [self.tokenizer(text)["input_ids"] for text in asked]
            queries = [torch.tensor(x, dtype=torch.int64) for x in tokens]
        said = responses = self.generate(queries, **options)
        if texts:
            alone, pairs = self.inputs.start is not None, zip(queries, responses)
            said = [response_text(self.tokenizer, *pair, alone) for pair in pairs]
        try:
            scores = reward_fn(asked, said)
        except Exception as e:
            raise RuntimeError(f"reward_fn failed at step {self.step_count + 1}: {e}") from e
        try:
            self.inputs(queries, responses, scores)  # while the batch can still be drawn again
        except (TypeError, ValueError) as e:
            raise type(e)(f"reward_fn must return scores for step: {e}") from None
        return queries, responses, scores

    def save_pretrained(self, path: str | Path) -> None:
        """The policy (or its adapter) and value head, as transformers and peft save; rank 0."""
        if self.ranks.rank == 0:
            self.model.save_pretrained(path)

    def state_dict(self) -> dict[str, Any]:
        """All that a run needs to go on bit for bit, copied; config only for the record."""
        return copy.deepcopy(self._state())

    def _state(self) -> dict[str, Any]:
        parts = {name: getattr(self, name) for name in STATEFUL}
        random = checkpoint.random_state(self.generator, self.device)
        return {name: part and part.state_dict() for name, part in parts.items()} | {
            "config": dataclasses.asdict(self.config),
            "model": {n: p.detach() for n, p in self.model.named_parameters() if p.requires_grad},
            "counts": {"step_count": self.step_count, "samples": self.samples},
            "places": self.places,
            "frozen": self._frozen_sum,
            "random": self.ranks.gather(random),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where state_dict() was called; everything is checked before anything changes."""
        self.ranks.together(checkpoint.check, state, self._state())
        for name in STATEFUL:
            if state[name] is not None:
                getattr(self, name).load_state_dict(state[name])
        with torch.no_grad():
            for name, x in state["model"].items():
                self.model.get_parameter(name).copy_(x)
        vars(self).update(state["counts"])
        for data, place in state["places"].items():
            self.places[data].update(place)
        random = state["random"][self.ranks.rank]
        checkpoint.set_random_state(random, self.generator, self.device)

    def save_checkpoint(self, path: str | Path) -> None:
        """state_dict() in one file, which takes the place of `path` only when it is complete."""
        state = self._state()
        first = self.ranks.rank == 0  # no rank goes on before the file is there
        self.ranks.together(lambda: first and checkpoint.write(state, Path(path)))

    def load_checkpoint(self, path: str | Path) -> None:
        """load_state_dict of a file that save_checkpoint wrote."""
        self.load_state_dict(self.ranks.together(checkpoint.read, Path(path)))


def _check_whole(name: str, model: nn.Module) -> None:
    """TypeError unless each rank can run and step it alone: ranks differ in how many forwards they
    make, and would wait for each other; what is summed here are gradients of whole weights."""
    kinds = {cls.__name__ for m in model.modules() for cls in type(m).__mro__}
    found = sorted(kinds & SHARED)
    for weight, p in model.named_parameters():
        if hasattr(p, "full_tensor") or hasattr(p, "ds_id"):
            kind = "ZeRO-3 parameter" if hasattr(p, "ds_id") else "DTensor (fully_shard, tp_plan)"
            found.append(f"{weight} as a {kind}")
    if found:
        raise TypeError(
            f"{name} must be unwrapped, with whole weights on every rank, got {found[0]}: give the "
            "model itself, as the trainer sums gradients over ranks; to train sharded weights, "
            "call the ops in a loop of your own"
        )


def _stepped(optimizer: torch.optim.Optimizer, model: nn.Module) -> list[nn.Parameter]:
    """The optimizer's parameters, which must be what the model trains, else nothing would learn."""
    if isinstance(optimizer, type) or not hasattr(optimizer, "param_groups"):
        raise TypeError(f"optimizer must be a torch.optim.Optimizer, got {optimizer!r:.80}")
    held = [p for group in optimizer.param_groups for p in group["params"]]
    known, own = set(held), dict(model.named_parameters())
    left_out = [name for name, p in own.items() if p.requires_grad and p not in known]
    if left_out:
        raise ValueError(
            f"optimizer leaves out {len(left_out)} parameters that the model trains, such as "
            f"{left_out[0]}: make it from model.parameters() when the model is complete (LoRA, "
            "sharding), and set requires_grad=False on what shall stay as it is"
        )
    if foreign := len(known - set(own.values())):
        raise ValueError(f"optimizer holds {foreign} parameters that are not the model's")
    return held


def _columns(rows: list[dict[str, Any]]) -> dict[str, list[Any]]:
    """TRL's usual data_collator: a list per column."""
    if not hasattr(rows[0], "keys"):
        kind = type(rows[0]).__name__
        raise TypeError(f"dataset must have dicts as rows, or a data_collator; got {kind}")
    return {key: [row[key] for row in rows] for key in rows[0]}
