"""PPOTrainer: generate -> rollout -> update, around any reward."""

import contextlib
import copy
import dataclasses
import math
import os
import random
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ppo_kernels import compute_rewards, gae, masked_whiten, ppo_loss
from ppo_kernels.trainer import forward
from ppo_kernels.trainer.config import KL_KINDS, PPOConfig
from ppo_kernels.trainer.control import AdaptiveKLController, FixedKLController, RunningMoments
from ppo_kernels.trainer.inputs import Inputs, Limits, check_inputs, ptx_rows
from ppo_kernels.trainer.ranks import Ranks
from ppo_kernels.trainer.rollout import Batch, BatchOrder, Rollout, collate
from ppo_kernels.trainer.stats import (
    PEAKS,
    SUMS,
    UpdateStats,
    micro_stats,
    rollout_stats,
    self_check,
)

# generate()'s defaults: plain samples of the policy, whatever the model's generation_config says.
PLAIN_SAMPLING = {
    **{"do_sample": True, "top_k": 0, "top_p": 1.0, "min_p": None, "typical_p": 1.0},
    **{"num_beams": 1, "repetition_penalty": 1.0, "no_repeat_ngram_size": 0, "min_length": 0},
}


class PPOTrainer:
    """PPO for a language model with a value head, or a (policy, value model) pair.

    model: one of ppo_kernels.models, or any module whose forward returns (logits, .., values).
    ref_model: the reference policy, any LM. None: the adapter is switched off if the model is a
    peft model, otherwise the policy is cloned and frozen. reference (peft only): "base" for the
    model without adapter, or the name of a loaded adapter; needed where the adapter already
    does something, because the base model is then not the policy that training starts from.
    tokenizer: for EOS, padding and text; it is not changed. dataset, data_collator: make
    `dataloader`. optimizer, lr_scheduler (stepped once per update): Adam and none by default.
    group: a torch.distributed group, by default all ranks; sizes in config are per rank.

    The index convention, masks and formulas are those of ppo_kernels.reference; names of methods,
    settings and statistics follow TRL's classic PPOTrainer.
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
        self.config = dataclasses.replace(config)
        self.model, self.tokenizer = model, tokenizer
        self.device = next(model.parameters()).device
        self.ranks = Ranks(group)
        self._set_token_ids(pad_token_id)
        self._set_reference(ref_model, reference)
        self._set_optimizer(optimizer, lr_scheduler)
        self.ranks.broadcast(p for p in model.parameters() if p.requires_grad)
        if config.adap_kl_ctrl:
            controls = (config.init_kl_coef, config.target, config.horizon)
            self.kl_ctl: AdaptiveKLController = AdaptiveKLController(*controls)
        else:
            self.kl_ctl = FixedKLController(config.init_kl_coef)
        self.running = RunningMoments()
        self.generator = torch.Generator().manual_seed(config.seed + 100_003 * self.ranks.rank)
        self.step_count = self.samples = 0
        self.order: BatchOrder | None = None
        self._saved_order: dict[str, int] = {}
        self.dataloader = None if dataset is None else self._make_loader(dataset, data_collator)

    # ---------------------------------------------------------------------------- setting up

    def _set_token_ids(self, pad_token_id: int | None) -> None:
        generation = getattr(self.model, "generation_config", None)
        eos: list[int] = []
        for owner in (self.tokenizer, generation):
            ids = getattr(owner, "eos_token_id", None)
            eos += [ids] if isinstance(ids, int) else list(ids or [])
        self.eos_ids = sorted(set(eos))
        pads = (pad_token_id, getattr(self.tokenizer, "pad_token_id", None), *self.eos_ids, 0)
        self.pad_token_id = next(p for p in pads if p is not None)
        model_config = getattr(self.model, "config", None)
        self.start_token_id = None
        if getattr(model_config, "is_encoder_decoder", False):
            self.start_token_id = model_config.decoder_start_token_id
        for name in ("missing_eos_penalty", "min_new_tokens"):
            if getattr(self.config, name) and not self.eos_ids:
                raise ValueError(
                    f"{name} needs an EOS id: give a tokenizer with eos_token_id, or set "
                    "model.generation_config.eos_token_id"
                )

    def _set_reference(self, ref_model: nn.Module | None, reference: str | None) -> None:
        if ref_model is self.model:
            raise ValueError("ref_model is the model being trained; leave it None to clone that")
        peft = forward.peft_model(self.model)
        if reference is not None and (peft is None or ref_model is not None):
            raise ValueError("reference names an adapter of a peft model, without a ref_model")
        if reference not in (None, "base", *(peft.peft_config if peft is not None else ())):
            raise ValueError(
                f"reference must be 'base' or one of {list(peft.peft_config)}, got {reference!r}"
            )
        if ref_model is None and peft is not None and reference is None:
            if not forward.adapter_is_fresh(peft):
                raise ValueError(
                    "reference: the adapter of model already changes it, so the model with the "
                    "adapter disabled is not the policy that training starts from. Give a "
                    "ref_model, reference='<name>' of a second adapter with the same weights, or "
                    "reference='base' if the base model is meant"
                )
            reference = "base"
        if ref_model is None and peft is None:
            source = getattr(self.model, "policy", getattr(self.model, "pretrained_model", None))
            ref_model = copy.deepcopy(self.model if source is None else source)
            ref_model.requires_grad_(False)
        self.ref_model, self.reference = ref_model, reference
        frozen = [p for p in self.model.parameters() if not p.requires_grad]
        frozen += [] if ref_model is None else list(ref_model.parameters())
        self._frozen_sum = sum(float(p.detach().abs().sum(dtype=torch.float64)) for p in frozen)
        self._readable = forward.head_is_readable(self.model)
        self._ref_readable = ref_model is not None and forward.head_is_readable(ref_model)

    def _set_optimizer(self, optimizer: torch.optim.Optimizer | None, scheduler: Any) -> None:
        cfg, model = self.config, self.model
        values: set[nn.Parameter] = set()
        if hasattr(model, "value_parameters"):
            values = set(model.value_parameters())
        elif cfg.value_learning_rate is not None or cfg.critic_warmup_steps:
            raise ValueError(
                "value_learning_rate and critic_warmup_steps need a model with value_parameters()"
            )
        trainable = [p for p in model.parameters() if p.requires_grad]
        if not trainable:
            raise ValueError("model has no parameter that requires a gradient")
        if optimizer is None:
            groups = [{"params": [p for p in trainable if p not in values]}]
            rate = cfg.learning_rate if cfg.value_learning_rate is None else cfg.value_learning_rate
            groups.append({"params": [p for p in trainable if p in values], "lr": rate})
            optimizer = torch.optim.Adam([g for g in groups if g["params"]], lr=cfg.learning_rate)
        elif cfg.value_learning_rate is not None:
            raise ValueError("value_learning_rate is for the default optimizer, got an optimizer")
        self.optimizer, self.lr_scheduler = optimizer, scheduler
        self.parameters = [p for group in optimizer.param_groups for p in group["params"]]
        self.policy_parameters = [p for p in self.parameters if p not in values]

    def _limits(self) -> Limits:
        cfg, config = self.config, getattr(self.model, "config", None)
        return Limits(
            batch_size=cfg.batch_size,
            vocab_size=getattr(config, "vocab_size", None),
            max_length=None
            if self.start_token_id is not None
            else getattr(config, "max_position_embeddings", None),
            eos_ids=self.eos_ids,
            start_token_id=self.start_token_id,
            min_new_tokens=cfg.min_new_tokens,
            need_rollout_logprobs=cfg.rollout_is_cap is not None,
            one_score_only=cfg.use_score_scaling,
        )

    def _make_loader(self, dataset: Any, data_collator: Callable[..., Any] | None) -> Any:
        self.order = self._make_order(len(dataset))
        if data_collator is None:
            data_collator = _columns
        return torch.utils.data.DataLoader(
            dataset, batch_sampler=self.order, collate_fn=data_collator
        )

    def _make_order(self, n: int) -> BatchOrder:
        cfg, ranks = self.config, self.ranks
        order = BatchOrder(n, cfg.batch_size, cfg.seed, cfg.shuffle, ranks.rank, ranks.size)
        vars(order).update(self._saved_order)
        self._saved_order = {}
        return order

    # ------------------------------------------------------------------------------ sampling

    @torch.no_grad()
    def generate(
        self, queries: Sequence[Tensor], *, return_prompt: bool = False, **gen_kwargs: Any
    ) -> list[Tensor]:
        """Sample one response per query (1-D tensors); each ends with its EOS if it has one.

        Plain samples at config.temperature; gen_kwargs go to transformers' generate
        (max_new_tokens, ..). Random numbers come from the trainer's own generator. Model mode,
        tokenizer, generation_config and global random state stay as they are.
        """
        queries = [queries] if isinstance(queries, Tensor) and queries.dim() == 1 else queries
        self._check_sampling(gen_kwargs)
        cfg, empty = self.config, torch.empty(0, dtype=torch.int64)
        batch = collate(queries, [empty] * len(queries), self.pad_token_id).to(self.device)
        options = PLAIN_SAMPLING | {"temperature": cfg.temperature, "use_cache": True}
        options |= {"pad_token_id": self.pad_token_id}
        if self.eos_ids:
            options["eos_token_id"] = self.eos_ids
        if cfg.min_new_tokens:
            options["min_new_tokens"] = cfg.min_new_tokens
        options |= gen_kwargs
        eos = options.get("eos_token_id") or []
        eos = [eos] if isinstance(eos, int) else list(eos)
        seed = int(torch.randint(2**62, (1,), generator=self.generator))
        devices = [self.device] if self.device.type == "cuda" else []
        with forward.inference_mode_of(self.model), torch.random.fork_rng(devices):
            torch.manual_seed(seed)
            ids = self.model.generate(
                input_ids=batch.input_ids, attention_mask=batch.attention_mask, **options
            )
        skip = batch.input_ids.shape[1] if self.start_token_id is None else 0
        ids = ids[:, skip:].cpu()
        responses = []
        for i, row in enumerate(ids):
            first = 0 if self.start_token_id is None else 1
            ends = torch.isin(row[first:], torch.tensor(eos, dtype=row.dtype)).nonzero()
            row = row[: first + int(ends[0]) + 1] if len(ends) else row
            row = row.to(queries[i].device)
            joined = return_prompt and self.start_token_id is None
            responses.append(torch.cat([queries[i], row]) if joined else row)
        return responses

    def _check_sampling(self, gen_kwargs: dict[str, Any]) -> None:
        if gen_kwargs.get("temperature", self.config.temperature) != self.config.temperature:
            raise ValueError(
                f"temperature={gen_kwargs['temperature']} belongs in PPOConfig.temperature "
                f"(now {self.config.temperature}), where old, new and reference log-probs see it"
            )
        neutral = PLAIN_SAMPLING | {"min_new_tokens": self.config.min_new_tokens}
        off = {"top_k": (0, 0.0, None), "top_p": (1.0, None), "min_length": (-1, 0, None)}
        for name, value in gen_kwargs.items():
            if name in neutral and value not in off.get(name, (neutral[name],)):
                warnings.warn(
                    f"generate({name}={value!r}) samples from another distribution than the one "
                    "whose log-probs are trained: expect a negative KL and biased updates",
                    stacklevel=3,
                )

    # ------------------------------------------------------------------------------- rollout

    @torch.no_grad()
    def rollout(
        self,
        queries: Sequence[Tensor],
        responses: Sequence[Tensor],
        scores: Any,
        *,
        response_masks: Sequence[Tensor] | None = None,
        truncated: Sequence[bool] | None = None,
        token_scores: Sequence[Tensor] | None = None,
        rollout_logprobs: Sequence[Tensor] | None = None,
    ) -> Rollout:
        """Score responses under policy and reference, and turn scores into advantages.

        queries, responses: lists of 1-D integer tensors; a response may be empty (it then counts
        nowhere). scores: one per response, each a number, a 0-D or [1] tensor, or a tensor of one
        reward per response token; token_scores: such rewards besides a score. response_masks: 0
        where a response token was not chosen by the policy. truncated: responses that were cut
        off, by default those without EOS. rollout_logprobs: log-probs by whatever sampled them.

        Order: raw score -> running scale -> clip -> missing-EOS penalty -> placed on the last
        action -> + KL penalty -> optional whitening. Nothing is trained here; of the trainer's
        state only the running score moments move.
        """
        inputs, error = None, None
        try:
            inputs = check_inputs(
                self._limits(), queries, responses, scores, response_masks, truncated, token_scores,
                rollout_logprobs,
            )  # fmt: skip
        except (TypeError, ValueError) as e:
            error = e
        self.ranks.fail_together(error, self.device)
        full = self._collate(inputs.queries, inputs.responses, inputs.masks).to(self.device)
        scored = self._score_all(inputs, full)
        scores = self._shape_scores(inputs, full.mask)
        rollout = Rollout(
            queries=inputs.queries,
            responses=inputs.responses,
            mask=full.mask,
            **scored,
            rewards=torch.zeros_like(scored["values"]),
            advantages=torch.zeros_like(scored["values"]),
            returns=torch.zeros_like(scored["values"]),
            rollout_logprobs=full.scatter(inputs.rollout_logprobs.to(self.device)),
            raw_scores=inputs.scores.to(self.device),
            scores=scores,
            finished=inputs.finished.to(self.device),
            truncated=inputs.truncated.to(self.device),
        )
        rollout.rewards = self._rewards(rollout, full.scatter(inputs.token_scores.to(self.device)))
        self.compute_advantages(rollout)
        return rollout

    def compute_advantages(self, rollout: Rollout) -> None:
        """Set rollout.advantages (whitened over all ranks) and .returns from its rewards."""
        cfg = self.config
        out = gae(
            rollout.rewards,
            rollout.values,
            rollout.mask,
            gamma=cfg.gamma,
            lam=cfg.lam,
            bootstrap=rollout.bootstrap,
        )
        rollout.advantages, rollout.returns = out.advantages, out.returns
        if cfg.whiten_advantages:
            rollout.advantages = masked_whiten(
                out.advantages, rollout.mask, stats=out.stats, group=self.ranks.group
            )

    def _collate(
        self, queries: list[Tensor], responses: list[Tensor], masks: list[Tensor] | None = None
    ) -> Batch:
        """collate for this model. Padding on the right: positions need no care by the model."""
        if self.start_token_id is None:
            return collate(queries, responses, self.pad_token_id, "right", masks)
        starts, actions = [r[:1] for r in responses], [r[1:] for r in responses]
        masks = None if masks is None else [m[1:] for m in masks]
        return collate(starts, actions, self.pad_token_id, "right", masks, encoder_queries=queries)

    def _score_all(self, inputs: Inputs, full: Batch) -> dict[str, Tensor]:
        """Log-probs of policy and reference, values, entropy, KL; forwards of like lengths."""
        cfg = self.config
        B, T = full.mask.shape
        names = ("logprobs", "ref_logprobs", "values", "entropy", "kl")
        out = {name: torch.zeros(B, T, device=self.device) for name in names}
        out["bootstrap"] = torch.zeros(B, device=self.device)
        order = sorted(range(B), key=full.lengths.tolist().__getitem__)
        size = cfg.micro_batch_size or cfg.mini_batch_size
        with forward.inference_mode_of(self.model, self.ref_model):
            for start in range(0, B, size):
                rows = order[start : start + size]
                batch = self._batch_of(inputs.queries, inputs.responses, rows)
                for name, x in self._score(batch).items():
                    if x.dim() == 2:
                        out[name][rows, : x.shape[1]] = torch.where(
                            full.mask[rows, : x.shape[1]], x, 0
                        ).to(out[name].dtype)
                    else:
                        out[name][rows] = x
        if not cfg.bootstrap_truncated:
            out["bootstrap"].zero_()
        out["bootstrap"] *= inputs.truncated.to(self.device)
        return out

    def _batch_of(self, queries: list[Tensor], responses: list[Tensor], rows: list[int]) -> Batch:
        picked = ([x[i] for i in rows] for x in (queries, responses))
        return self._collate(*picked).to(self.device)

    def _score(self, batch: Batch) -> dict[str, Tensor]:
        """One rollout forward of policy and reference."""
        cfg, scatter = self.config, batch.scatter
        policy = forward.action_states(self.model, batch, self._readable, True, cfg.bf16)
        logprobs, entropy = self._logprobs(policy, batch)
        with self._reference() as (model, readable):
            ref = forward.action_states(model, batch, readable, False, cfg.bf16)
            ref_logprobs, _ = self._logprobs(ref, batch)
            kind = KL_KINDS[cfg.kl_penalty]
            if kind == "full":
                kl = forward.full_kl(policy, ref, cfg.temperature)
            else:
                kl = forward.reference.kl_penalty(logprobs, ref_logprobs, kind)
        return {
            "logprobs": scatter(logprobs),
            "ref_logprobs": scatter(ref_logprobs),
            "entropy": scatter(entropy),
            "kl": scatter(kl),
            "values": scatter(policy.values.flatten()[batch.at]),
            "bootstrap": policy.values.flatten()[batch.ends],
        }

    def _logprobs(self, states: forward.States, batch: Batch) -> tuple[Tensor, Tensor]:
        cfg = self.config
        out = forward.token_logprobs(states, batch.labels, cfg.temperature, cfg.bf16)
        if not cfg.min_new_tokens:
            return out
        return forward.without_early_eos(
            states, batch, *out, self.eos_ids, cfg.min_new_tokens, cfg.temperature, cfg.bf16
        )

    @contextlib.contextmanager
    def _reference(self) -> Iterator[tuple[nn.Module, bool]]:
        if self.ref_model is not None:
            yield self.ref_model, self._ref_readable
            return
        with forward.adapter(forward.peft_model(self.model), self.reference):
            yield self.model, self._readable

    def _shape_scores(self, inputs: Inputs, mask: Tensor) -> Tensor:
        """raw -> running scale -> clip -> missing-EOS penalty, [B] on the device."""
        cfg, scores = self.config, inputs.scores.double()
        if cfg.use_score_scaling:
            live = scores[mask.any(-1).cpu()]
            seen = RunningMoments()
            seen.update(live)
            for other in self.ranks.gather(seen.state_dict()):
                self.running.merge(**other)
            shift = self.running.mean if cfg.use_score_norm else 0.0
            scores = (scores - shift) / self.running.std
        if cfg.score_clip is not None:
            scores = scores.clamp(-cfg.score_clip, cfg.score_clip)
        if cfg.missing_eos_penalty is not None:
            scores = scores - cfg.missing_eos_penalty * (~inputs.finished).double()
        return scores.float().to(self.device)

    def _rewards(self, rollout: Rollout, token_scores: Tensor) -> Tensor:
        cfg, beta = self.config, self.kl_ctl.value
        kind = KL_KINDS[cfg.kl_penalty]
        ref_logprobs = rollout.ref_logprobs
        if kind == "full":  # not a function of the two log-probs: given as rewards per token
            token_scores, beta, kind = token_scores - beta * rollout.kl, 0.0, "k1"
        rewards = compute_rewards(
            rollout.scores,
            rollout.logprobs,
            ref_logprobs,
            rollout.mask,
            kl_coef=beta,
            kl_penalty=kind,
            kl_placement=cfg.kl_placement,
            token_rewards=token_scores,
        )
        if cfg.whiten_rewards:
            group = self.ranks.group
            rewards = masked_whiten(rewards, rollout.mask, shift_mean=False, group=group)
        return rewards

    # -------------------------------------------------------------------------------- update

    def step(
        self,
        queries: Sequence[Tensor],
        responses: Sequence[Tensor],
        scores: Any,
        response_masks: Sequence[Tensor] | None = None,
        *,
        ptx_batch: Any = None,
        **rollout_options: Any,
    ) -> dict[str, float]:
        """`update(rollout(...))`: one PPO iteration on a batch; returns its statistics."""
        began = time.perf_counter()
        rollout = self.rollout(
            queries, responses, scores, response_masks=response_masks, **rollout_options
        )
        middle = time.perf_counter()
        stats = self.update(rollout, ptx_batch=ptx_batch)
        stats["time/ppo/forward_pass"] = middle - began
        stats["time/ppo/total"] = time.perf_counter() - began
        return stats

    def update(self, rollout: Rollout, *, ptx_batch: Any = None) -> dict[str, float]:
        """ppo_epochs passes of minibatches, then the KL controller and the scheduler, once each.

        A minibatch is one optimizer step; micro-batches only save memory. A step is not made, and
        counted in `ppo/skipped_steps`, if the minibatch has no action, its mean ratio exceeds
        ratio_threshold or its gradient is not finite. With early_stopping, training of this batch
        ends before the step whose KL(old || new) exceeds 1.5 target_kl. All ranks decide alike.
        ptx_batch: texts as 1-D tensors, a dict with input_ids (attention_mask, labels), or for
        seq2seq (source, target) pairs; its LM loss joins the same optimizer steps.
        """
        began, cfg = time.perf_counter(), self.config
        ptx = ptx_rows(ptx_batch, self.start_token_id)
        done = UpdateStats()
        models = (self.model,) if cfg.disable_dropout else ()
        with forward.inference_mode_of(*models, checkpointing=True):
            while done.epochs < cfg.ppo_epochs and not done.stopped:
                for minibatch in self._minibatches(rollout, ptx):
                    done.add(self._backward(rollout, *minibatch), cfg)
                    if done.verdict == "step":
                        self.optimizer.step()
                    self.optimizer.zero_grad(set_to_none=True)
                    if done.stopped:
                        break
                done.epochs += not done.stopped
        stats = rollout_stats(rollout, self.kl_ctl.value, self.ranks) | done.as_dict(cfg)
        kl = "objective/kl" if cfg.kl_unit == "sequence" else "objective/kl_per_token"
        stats["ppo/learning_rate"] = self.optimizer.param_groups[0]["lr"]
        self.kl_ctl.update(stats[kl], int(stats["tokens/responses"]))
        if self.lr_scheduler is not None:
            self.lr_scheduler.step()
        self.step_count += 1
        self.samples += int(stats["tokens/responses"])
        stats["time/ppo/optimize_step"] = time.perf_counter() - began
        if self.step_count == 1 and self.ranks.rank == 0:
            print(self_check(stats, cfg))
        return stats

    def _minibatches(
        self, rollout: Rollout, ptx: list[Any]
    ) -> Iterator[tuple[list[int], list[Any], list[float]]]:
        """One epoch: (rows, ptx rows, [tokens, responses, ptx tokens] of all ranks) per step."""
        cfg, B = self.config, len(rollout)
        steps = torch.tensor(math.ceil(B / cfg.mini_batch_size), device=self.device)
        steps = int(self.ranks.max(steps))
        shuffled = torch.randperm(B, generator=self.generator)
        order = (shuffled if cfg.shuffle else torch.arange(B)).tolist()
        actions = rollout.mask.sum(-1).cpu()
        rows = [
            order[k * cfg.mini_batch_size : (k + 1) * cfg.mini_batch_size] for k in range(steps)
        ]
        totals = [
            [
                float(actions[part].sum()),
                float((actions[part] > 0).sum()),
                float(sum(int(mask.sum()) for _, _, mask in ptx[k::steps])),
            ]
            for k, part in enumerate(rows)
        ]
        totals = self.ranks.sum(torch.tensor(totals, device=self.device)).tolist()
        return zip(rows, [ptx[k::steps] for k in range(steps)], totals)

    def _backward(
        self, rollout: Rollout, rows: list[int], ptx: list[Any], totals: list[float]
    ) -> dict[str, float]:
        """Gradients of one minibatch, micro-batch by micro-batch; one copy to the host."""
        cfg = self.config
        sums = torch.zeros(len(SUMS), dtype=torch.float64, device=self.device)
        peaks = torch.zeros(len(PEAKS), dtype=torch.float64, device=self.device)
        size = cfg.micro_batch_size or cfg.mini_batch_size
        rows = sorted(rows, key=lambda i: len(rollout.queries[i]) + len(rollout.responses[i]))
        for start in range(0, len(rows) if totals[0] else 0, size):
            loss, more, top = self._loss(rollout[rows[start : start + size]], totals)
            if loss.requires_grad:
                loss.backward()
            sums, peaks = sums + more, torch.maximum(peaks, top)
        for start in range(0, len(ptx) if totals[0] else 0, size):
            loss = self._ptx_loss(ptx[start : start + size], totals[2])
            (cfg.ptx_coef * loss).backward()
            sums[SUMS.index("ptx_loss")] += loss.detach()
        self.ranks.sum_gradients(self.parameters)
        if self.step_count < cfg.critic_warmup_steps:
            for p in self.policy_parameters:
                p.grad = None
        norm = torch.nn.utils.get_total_norm(
            [p.grad for p in self.parameters if p.grad is not None]
        )
        if cfg.max_grad_norm is not None:
            torch.nn.utils.clip_grads_with_norm_(self.parameters, cfg.max_grad_norm, norm)
        host = torch.cat([self.ranks.sum(sums), self.ranks.max(peaks), norm.double().view(1)])
        return dict(zip((*SUMS, *PEAKS, "grad_norm"), host.tolist()))

    def _loss(self, old: Rollout, totals: list[float]) -> tuple[Tensor, Tensor, Tensor]:
        """This micro-batch's part of the minibatch's loss, and its statistics."""
        cfg = self.config
        batch = self._collate(old.queries, old.responses).to(self.device)
        old = old.narrow(batch.mask.shape[1]).to(self.device)
        states = forward.action_states(self.model, batch, self._readable, True, cfg.bf16)
        logprobs, entropy = self._logprobs(states, batch)
        new = {"logprobs": logprobs, "values": states.values.flatten()[batch.at]}
        new["entropy"] = entropy if cfg.ent_coef else entropy.detach()
        new = {name: batch.scatter(x) for name, x in new.items()}
        by_sequence = cfg.loss_agg_mode.startswith("seq")
        out = ppo_loss(
            new["logprobs"],
            old.logprobs,
            old.advantages,
            old.mask,
            values=new["values"],
            old_values=old.values,
            returns=old.returns,
            entropy=new["entropy"],
            ref_logprobs=old.ref_logprobs,
            rollout_logprobs=old.rollout_logprobs if cfg.rollout_is_cap else None,
            cliprange=cfg.cliprange,
            cliprange_high=cfg.cliprange_high,
            dual_clip=cfg.dual_clip,
            cliprange_value=cfg.cliprange_value,
            vf_coef=cfg.vf_coef,
            ent_coef=cfg.ent_coef,
            kl_coef=cfg.kl_loss_coef,
            is_cap=cfg.rollout_is_cap or 1.0,
            reduction="sum" if cfg.loss_divisor else cfg.loss_agg_mode,
            normalizer=cfg.loss_divisor or totals[1 if by_sequence else 0],
        )
        return out.loss, *micro_stats(out, new, old)

    def _ptx_loss(self, rows: list[Any], tokens: float) -> Tensor:
        """-sum log p(token) / tokens at temperature 1: this chunk's part of the LM loss."""
        queries, texts, masks = (list(x) for x in zip(*rows))
        batch = self._collate(queries, texts, masks).to(self.device)
        states = forward.action_states(self.model, batch, self._readable, True, self.config.bf16)
        logprobs, _ = forward.token_logprobs(states, batch.labels, 1.0, self.config.bf16)
        return -torch.where(batch.mask, batch.scatter(logprobs), 0).sum() / max(tokens, 1.0)

    # --------------------------------------------------------------------- loop and checkpoints

    def train(
        self,
        prompts: Sequence[str] | Sequence[Tensor],
        reward_fn: Callable[[list[Any], list[Any]], Any],
        steps: int | None = None,
        callbacks: Sequence[Callable[["PPOTrainer", dict[str, float]], None]] = (),
        **gen_kwargs: Any,
    ) -> list[dict[str, float]]:
        """generate -> reward_fn -> step, `steps` times (None: up to config.steps in all).

        prompts: texts (with a tokenizer), or 1-D tensors of ids. reward_fn(prompts, responses)
        gets two lists of the same kind and returns one score per response, as in `rollout`.
        callbacks: called as callback(trainer, stats) after every step. Returns all stats.
        """
        if steps is None and self.config.steps is None:
            raise ValueError("steps must be given here or in PPOConfig, got None twice")
        if steps is None:
            steps = max(self.config.steps - self.step_count, 0)
        texts = bool(len(prompts)) and isinstance(prompts[0], str)
        if texts and self.tokenizer is None:
            raise ValueError("prompts are texts, which needs a tokenizer, got None")
        if self.order is None or self.order.n != len(prompts):
            self.order = self._make_order(len(prompts))
        history = []
        batches = _forever(self.order)
        for _ in range(steps):
            chosen = [prompts[i] for i in next(batches)]
            queries = chosen
            if texts:
                queries = [torch.tensor(self.tokenizer(t)["input_ids"]) for t in chosen]
            responses = self.generate(queries, **gen_kwargs)
            said = responses
            if texts:
                said = [self.tokenizer.decode(r, skip_special_tokens=True) for r in responses]
            try:
                scores = reward_fn(chosen, said)
            except Exception as e:
                raise RuntimeError(f"reward_fn failed at step {self.step_count + 1}: {e}") from e
            history.append(self.step(queries, responses, scores))
            for callback in callbacks:
                callback(self, history[-1])
        return history

    def save_pretrained(self, path: str | Path) -> None:
        """The policy (and its value head) as transformers or peft save it; rank 0 writes."""
        if self.ranks.rank == 0:
            self.model.save_pretrained(path)

    def state_dict(self) -> dict[str, Any]:
        """Everything a run needs to go on bit for bit; tensors are not copied."""
        trainable = {n: p.detach() for n, p in self.model.named_parameters() if p.requires_grad}
        order = self.order and {"epoch": self.order.epoch, "cursor": self.order.cursor}
        return {
            "config": dataclasses.asdict(self.config),
            "model": trainable,
            "optimizer": self.optimizer.state_dict(),
            "lr_scheduler": self.lr_scheduler and self.lr_scheduler.state_dict(),
            "kl_ctl": self.kl_ctl.state_dict(),
            "running": self.running.state_dict(),
            "step": self.step_count,
            "samples": self.samples,
            "order": order,
            "frozen": self._frozen_sum,
            "random": self.ranks.gather(random_state(self.generator, self.device)),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where state_dict() was called; everything is checked before anything changes."""
        own = self.state_dict()
        if state.keys() != own.keys():
            wrong = ", ".join(sorted(state.keys() ^ own.keys()))
            raise ValueError(f"this is no state of PPOTrainer: {wrong} missing or unknown")
        shapes, mine = ({n: tuple(p.shape) for n, p in s["model"].items()} for s in (state, own))
        if shapes != mine:
            wrong = sorted({n for n, _ in shapes.items() ^ mine.items()})
            raise ValueError(f"the state is of another model: {', '.join(wrong[:4])} differ")
        if len(state["random"]) != self.ranks.size:
            raise ValueError(
                f"the state is of {len(state['random'])} ranks, this run has {self.ranks.size}"
            )
        if not math.isclose(state["frozen"], own["frozen"], rel_tol=1e-6):
            raise ValueError(
                "ref_model and frozen weights are not those this run started with; make the "
                "trainer from the original models, then load"
            )
        if (state["lr_scheduler"] is None) != (self.lr_scheduler is None):
            raise ValueError("lr_scheduler must be given exactly if the saved run had one")
        self.optimizer.load_state_dict(state["optimizer"])
        parameters = dict(self.model.named_parameters())
        with torch.no_grad():
            for name, x in state["model"].items():
                parameters[name].copy_(x)
        if self.lr_scheduler is not None:
            self.lr_scheduler.load_state_dict(state["lr_scheduler"])
        self.kl_ctl.load_state_dict(state["kl_ctl"])
        self.running.load_state_dict(state["running"])
        self.step_count, self.samples = state["step"], state["samples"]
        if state["order"] is not None:
            self._saved_order = state["order"]
            if self.order is not None:
                vars(self.order).update(state["order"])
        set_random_state(state["random"][self.ranks.rank], self.generator, self.device)

    def save_checkpoint(self, path: str | Path) -> None:
        """state_dict() in one file, which replaces `path` only when it is complete (rank 0)."""
        state, path = self.state_dict(), Path(path)
        if self.ranks.rank == 0:
            path.parent.mkdir(parents=True, exist_ok=True)
            partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
            try:
                with open(partial, "wb") as f:
                    torch.save(state, f)
                    f.flush()
                    os.fsync(f.fileno())
                os.replace(partial, path)
            finally:
                partial.unlink(missing_ok=True)
        self.ranks.sum(torch.zeros(1, device=self.device))  # no rank goes on before it is there

    def load_checkpoint(self, path: str | Path) -> None:
        """load_state_dict of a file that save_checkpoint wrote."""
        self.load_state_dict(torch.load(path, map_location=self.device, weights_only=True))


def random_state(generator: torch.Generator, device: torch.device) -> dict[str, Any]:
    """Every random state that can matter, in types that torch.load takes with weights_only."""
    name, keys, *rest = np.random.get_state()
    return {
        "generator": generator.get_state(),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state(device) if device.type == "cuda" else None,
        "numpy": (name, keys.tolist(), *rest),
        "python": random.getstate(),
    }


def set_random_state(
    state: dict[str, Any], generator: torch.Generator, device: torch.device
) -> None:
    generator.set_state(state["generator"].cpu())
    torch.set_rng_state(state["torch"].cpu())
    if state["cuda"] is not None and device.type == "cuda":
        torch.cuda.set_rng_state(state["cuda"].cpu(), device)
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, np.array(keys, dtype=np.uint32), *rest))
    random.setstate(state["python"])


def _columns(rows: list[dict[str, Any]]) -> dict[str, list[Any]]:
    """TRL's usual data_collator: a list per column."""
    return {key: [row[key] for row in rows] for key in rows[0]}


def _forever(order: BatchOrder) -> Iterator[list[int]]:
    while True:
        yield from order
