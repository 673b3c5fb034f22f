"""PPOTrainer: generate -> rollout -> update, around any reward."""

import copy
import dataclasses
import math
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ppo_kernels import compute_rewards, gae, kl_penalty, masked_whiten, modes, ppo_loss
from ppo_kernels.ranks import BatchOrder, Ranks
from ppo_kernels.trainer import checkpoint, stats
from ppo_kernels.trainer.config import KL_KINDS, PPOConfig
from ppo_kernels.trainer.control import AdaptiveKLController, FixedKLController, RunningMoments
from ppo_kernels.trainer.forward import Reader, States, full_kl
from ppo_kernels.trainer.inputs import InputChecker
from ppo_kernels.trainer.rollout import TOKEN_FIELDS, Batch, Rollout, collate

# Options of generate() that would make it return something else than a sample per query.
REFUSED = ("attention_mask", "input_ids", "num_return_sequences", "return_dict_in_generate")
# Values of generate()'s options that leave the policy's distribution as it is; the first is the
# trainer's default, whatever the model's generation_config says.
PLAIN_SAMPLING = {
    **{"do_sample": (True,), "num_beams": (1,), "top_k": (0, None), "top_p": (1.0, None)},
    **{"min_p": (None,), "typical_p": (1.0,), "repetition_penalty": (1.0,)},
    **{"no_repeat_ngram_size": (0,), "min_length": (0, -1, None), "min_new_tokens": (None, 0)},
}


class PPOTrainer:
    """PPO for a language model with a value head, or a (policy, value model) pair.

    model: one of ppo_kernels.models, or any module whose forward returns (logits, .., values).
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
        if not isinstance(model, nn.Module):
            raise TypeError(f"model must be an nn.Module, got {type(model).__name__}")
        self.config = cfg = dataclasses.replace(config)
        self.model, self.tokenizer, self.lr_scheduler = model, tokenizer, lr_scheduler
        first = next(model.parameters(), torch.empty(0))
        self.device = first.device
        self.dtype = torch.float64 if first.dtype == torch.float64 else torch.float32
        self.ranks = Ranks(group, self.device)
        self._set_tokens(pad_token_id)
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
        self.kl_ctl = FixedKLController(cfg.init_kl_coef)
        if cfg.adap_kl_ctrl:
            self.kl_ctl = AdaptiveKLController(cfg.init_kl_coef, cfg.target, cfg.horizon)
        self.running = RunningMoments()
        self.generator = torch.Generator().manual_seed(cfg.seed + 100_003 * self.ranks.rank)
        self.step_count = self.samples = 0
        self.order: BatchOrder | None = None
        self._order_state: dict[str, int] = {}
        self.dataloader = None
        if dataset is not None:
            order, collator = self._order(len(dataset)), data_collator or _columns
            self.dataloader = torch.utils.data.DataLoader(
                dataset, batch_sampler=order, collate_fn=collator
            )

    def _set_tokens(self, pad_token_id: int | None) -> None:
        owners = (self.tokenizer, getattr(self.model, "generation_config", None))
        eos = [getattr(owner, "eos_token_id", None) for owner in owners]
        self.eos_ids = sorted({i for e in eos for i in ([e] if isinstance(e, int) else e or [])})
        config = getattr(self.model, "config", None)
        V = getattr(config, "vocab_size", None) or math.inf
        if pad_token_id is not None and not 0 <= pad_token_id < V:
            raise ValueError(f"pad_token_id must be in [0, {V}), got {pad_token_id}")
        # It only fills, so a tokenizer's own that the model has no row for is passed over.
        pads = (pad_token_id, getattr(self.tokenizer, "pad_token_id", None), *self.eos_ids, 0)
        self.pad_token_id = next(p for p in pads if p is not None and 0 <= p < V)
        seq2seq = getattr(config, "is_encoder_decoder", False)
        self.start_token_id = config.decoder_start_token_id if seq2seq else None
        self.inputs = InputChecker(self.config, config, self.eos_ids, self.start_token_id)
        if self.config.missing_eos_penalty is not None and not self.eos_ids:
            raise ValueError(
                "missing_eos_penalty needs an EOS id: give a tokenizer with eos_token_id, or set "
                "model.generation_config.eos_token_id"
            )

    def _set_optimizer(self, optimizer: torch.optim.Optimizer | None) -> None:
        cfg = self.config
        lr, value_lr = cfg.learning_rate, cfg.value_learning_rate
        values = set(getattr(self.model, "value_parameters", list)())
        if not values and (value_lr is not None or cfg.critic_warmup_steps):
            raise ValueError(
                "value_learning_rate and critic_warmup_steps need a model with value_parameters()"
            )
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
            policy = {"params": [p for p in trainable if p not in values], "lr": lr}
            value = {"params": [p for p in trainable if p in values]}
            value["lr"] = lr if value_lr is None else value_lr
            groups = [group for group in (policy, value) if group["params"]]
            fused = self.device.type in ("cpu", "cuda")  # one kernel, where it surely exists
            optimizer = torch.optim.Adam(groups, lr=lr, fused=fused)
        self.optimizer = optimizer
        self.parameters = [p for group in optimizer.param_groups for p in group["params"]]
        self._policy_parameters = [p for p in self.parameters if p not in values]

    def _order(self, n: int) -> BatchOrder:
        """The order of n rows; the place in it survives checkpoints."""
        if self.order is None or self.order.n != n:
            cfg, ranks = self.config, self.ranks
            options = (cfg.batch_size, cfg.seed, cfg.shuffle, ranks.rank, ranks.size)
            self.order, self._order_state = BatchOrder(n, *options, **self._order_state), {}
        return self.order

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
        if not len(queries):
            return []
        room = ("max_new_tokens", gen_kwargs.get("max_new_tokens") or 1)
        prompts = [self.inputs.query(f"queries[{i}]", q, *room) for i, q in enumerate(queries)]
        empty = torch.empty(0, dtype=torch.int64)
        batch = collate(prompts, [empty] * len(prompts), self.pad_token_id).to(self.device)
        options = {"temperature": self.config.temperature, "pad_token_id": self.pad_token_id}
        options |= {"eos_token_id": self.eos_ids} if self.eos_ids else {}
        options |= {name: plain[0] for name, plain in PLAIN_SAMPLING.items()}
        options |= {"use_cache": True} | gen_kwargs
        seed = int(torch.randint(2**62, (1,), generator=self.generator))
        devices = [self.device] if self.device.type == "cuda" else []
        with modes.without_dropout(self.model), torch.random.fork_rng(devices):
            torch.manual_seed(seed)
            ids, attention = batch.input_ids, batch.attention_mask
            out = self.model.generate(input_ids=ids, attention_mask=attention, **options).cpu()
        first = 0 if self.start_token_id is None else 1
        out = out if first else out[:, ids.shape[1] :]
        eos = torch.tensor(options.get("eos_token_id") or [], dtype=out.dtype).reshape(-1)
        ended = torch.isin(out[:, first:], eos).long()
        lengths = first + (ended.cumsum(-1) - ended == 0).sum(-1)
        rows = [row[:n].to(q.device) for row, n, q in zip(out, lengths.tolist(), queries)]
        return [torch.cat([q, r]) for q, r in zip(queries, rows)] if return_prompt else rows

    def _check_sampling(self, gen_kwargs: dict[str, Any]) -> None:
        temperature = gen_kwargs.get("temperature", self.config.temperature)
        if temperature != self.config.temperature:
            raise ValueError(
                f"temperature={temperature} belongs in PPOConfig.temperature (now "
                f"{self.config.temperature}), where old, new and reference log-probs see it"
            )
        for name in gen_kwargs.keys() & set(REFUSED):
            raise ValueError(f"{name} cannot be given: generate makes one sample per query, a list")
        for name in gen_kwargs.keys() & PLAIN_SAMPLING.keys():
            if gen_kwargs[name] not in PLAIN_SAMPLING[name]:
                warnings.warn(
                    f"generate({name}={gen_kwargs[name]!r}) samples from another distribution than "
                    "the one whose log-probs are trained: expect negative KL and biased updates",
                    stacklevel=3,
                )

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
        token_scores, rewards per token besides the score; rollout_logprobs, by the sampler.

        Order: raw score -> running scale -> clip -> missing-EOS penalty -> on the last action ->
        + KL penalty -> optional whitening. Of the trainer, only the running moments move.
        """
        x = self.ranks.together(lambda: self.inputs(queries, responses, scores, **options))
        full = self._collate(x["queries"], x["responses"], x["response_masks"])
        kind = {"device": self.device, "dtype": self.dtype}
        fields = {name: torch.zeros(full.mask.shape, **kind) for name in TOKEN_FIELDS}
        fields["token_scores"] = full.scatter(x["token_scores"].to(**kind))
        fields["rollout_logprobs"] = full.scatter(x["rollout_logprobs"].to(**kind))
        fields["raw_scores"] = fields["scores"] = x["scores"].to(**kind)
        fields["bootstrap"] = torch.zeros_like(fields["scores"])
        fields |= {name: x[name].to(self.device) for name in ("finished", "truncated")}
        ro = Rollout(x["queries"], x["responses"], full.mask, **fields)
        with modes.without_dropout(self.model, self.ref_model):
            for rows in self._micro_batches(ro, range(len(ro))):
                self._score(ro, rows)
        self._shape_scores(ro)
        self._add_rewards(ro)
        self.compute_advantages(ro)
        return ro

    def _collate(
        self, queries: list[Tensor], responses: list[Tensor], masks: list[Tensor] | None = None
    ) -> Batch:
        """collate for this model, on its device, padded on the right: positions need no care."""
        encoder = None
        if self.start_token_id is not None:
            encoder, queries = queries, [torch.tensor([self.start_token_id])] * len(queries)
        pad = self.pad_token_id
        batch = collate(queries, responses, pad, "right", masks, encoder_queries=encoder)
        return batch.to(self.device)

    def _micro_batches(self, ro: Rollout, rows: Iterable[int]) -> list[list[int]]:
        """rows in parts that fit into memory, each of rows about as long, to pad little."""
        rows = sorted(rows, key=lambda i: len(ro.queries[i]) + len(ro.responses[i]))
        return _split(rows, self.config.micro_batch_size or self.config.mini_batch_size)

    def _ask(
        self, queries: list[Tensor], responses: list[Tensor]
    ) -> tuple[Batch, States, dict[str, Tensor]]:
        """What the policy now says about responses: logprobs, entropy, values [B, T]."""
        batch = self._collate(queries, responses)
        states = self._policy(batch, with_values=True)
        logprobs, entropy = states.logprobs(batch.labels, self.config.temperature)
        values = states.values.flatten()[batch.at]
        said = {"logprobs": logprobs, "entropy": entropy, "values": values}
        return batch, states, {k: batch.scatter(x.to(self.dtype)) for k, x in said.items()}

    def _score(self, ro: Rollout, rows: list[int]) -> None:
        """Fill in what policy and reference say about some rows."""
        cfg, kind = self.config, KL_KINDS[self.config.kl_penalty]
        texts = ([ro.queries[i] for i in rows], [ro.responses[i] for i in rows])
        batch, policy, said = self._ask(*texts)
        ref = self._ref(batch)
        ref_logprobs, _ = ref.logprobs(batch.labels, cfg.temperature)
        said["ref_logprobs"] = batch.scatter(ref_logprobs.to(self.dtype))
        if kind == "full":
            kl = full_kl(policy, ref, cfg.temperature)
            said["kl"] = batch.scatter(kl.to(self.dtype))
        else:
            said["kl"] = kl_penalty(said["logprobs"], said["ref_logprobs"], kind)
        T = batch.mask.shape[1]
        for name, x in said.items():
            getattr(ro, name)[rows, :T] = torch.where(ro.mask[rows, :T], x, 0)
        if cfg.bootstrap_truncated:
            # The forward has read the last token too, so V of the state after it is at hand.
            after = policy.values.flatten()[batch.ends]
            ro.bootstrap[rows] = torch.where(ro.truncated[rows], after, 0)

    def _shape_scores(self, ro: Rollout) -> None:
        """Raw scores -> running scale -> clip -> missing-EOS penalty."""
        cfg, scores = self.config, ro.raw_scores.double()
        if cfg.use_score_scaling:
            batch = RunningMoments()
            batch.update(scores[ro.mask.any(-1)])
            for state in self.ranks.gather(batch.state_dict()):
                self.running.merge(**state)
            shift = self.running.mean if cfg.use_score_norm else 0.0
            scores = (scores - shift) / self.running.std
        if cfg.score_clip is not None:
            scores = scores.clamp(-cfg.score_clip, cfg.score_clip)
        ro.scores = (scores - (cfg.missing_eos_penalty or 0.0) * ~ro.finished).to(self.dtype)

    def _add_rewards(self, ro: Rollout) -> None:
        """Scores and the KL penalty, on top of the rewards that were given per token."""
        cfg, beta, kind = self.config, self.kl_ctl.value, KL_KINDS[self.config.kl_penalty]
        given = ro.token_scores
        if kind == "full":  # no function of the two log-probs, so it goes in per token
            given, beta, kind = given - beta * ro.kl, 0.0, "k1"
        options = {"kl_coef": beta, "kl_penalty": kind, "kl_placement": cfg.kl_placement}
        options["token_rewards"] = given
        ro.rewards = compute_rewards(ro.scores, ro.logprobs, ro.ref_logprobs, ro.mask, **options)
        if cfg.whiten_rewards:
            group = self.ranks.group
            ro.rewards = masked_whiten(ro.rewards, ro.mask, shift_mean=False, group=group)

    def compute_advantages(self, rollout: Rollout) -> None:
        """Set rollout.returns and .advantages (whitened over all ranks) from its rewards."""
        cfg, ro = self.config, rollout
        options = {"gamma": cfg.gamma, "lam": cfg.lam, "bootstrap": ro.bootstrap}
        ro.advantages, ro.returns, sums = gae(ro.rewards, ro.values, ro.mask, **options)
        if cfg.whiten_advantages:
            group = self.ranks.group
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
        """`update(rollout(...))`: one PPO iteration on a batch; returns its statistics."""
        began = time.perf_counter()
        options["response_masks"] = response_masks
        rollout = self.rollout(queries, responses, scores, **options)
        scored = time.perf_counter()
        out = self.update(rollout, ptx_batch=ptx_batch)
        out["time/ppo/forward_pass"] = scored - began
        out["time/ppo/total"] = time.perf_counter() - began
        return out

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
            for rows, texts, totals in plan:
                done.append(self._backward(rollout, rows, texts, totals))
                if done[-1]["verdict"] == "step":
                    self.optimizer.step()
                self.optimizer.zero_grad(set_to_none=True)
                if done[-1]["verdict"] == "stop":
                    break
        out = stats.of_rollout(rollout, self.kl_ctl.value, self.ranks)
        out |= stats.of_update(done, len(plan) // cfg.ppo_epochs)
        stats.warn_of_negative_kl(out)
        out["ppo/learning_rate"] = float(self.optimizer.param_groups[0]["lr"])
        kl = "objective/kl" if cfg.kl_unit == "sequence" else "objective/kl_per_token"
        self.kl_ctl.update(out[kl], int(out["tokens/responses"]))
        if self.lr_scheduler is not None:
            self.lr_scheduler.step()
        self.step_count += 1
        self.samples += int(out["tokens/responses"])
        out["time/ppo/optimize_step"] = time.perf_counter() - began
        if self.step_count == 1 and self.ranks.rank == 0:
            print(stats.self_check(out, cfg))
        return out

    def _minibatches(
        self, ro: Rollout, ptx: list[Any]
    ) -> list[tuple[list[int], list[Any], list[float]]]:
        """Of all passes: rows with an action, ptx rows, [actions, responses, ptx tokens].

        The last are counts over all ranks: the denominators of the losses.
        """
        cfg, B = self.config, len(ro)
        n = int(self.ranks.max(torch.tensor(-(-B // cfg.mini_batch_size), device=self.device)))
        actions, plan, totals = ro.mask.sum(-1).cpu(), [], []
        for _ in range(cfg.ppo_epochs):
            order = torch.randperm(B, generator=self.generator)
            parts = _split(order if cfg.shuffle else torch.arange(B), cfg.mini_batch_size)
            for k in range(n):
                rows, texts = parts[k] if k < len(parts) else order[:0], ptx[k::n]
                rows = rows[actions[rows] > 0]
                words = sum(int(mask.sum()) for _, _, mask in texts)
                plan.append((rows.tolist(), texts))
                totals.append((int(actions[rows].sum()), len(rows), words))
        totals = self.ranks.sum(torch.tensor(totals, dtype=torch.float64, device=self.device))
        return [(*parts, total) for parts, total in zip(plan, totals.tolist())]

    def _backward(
        self, ro: Rollout, rows: list[int], ptx: list[Any], totals: list[float]
    ) -> dict[str, Any]:
        """Gradients of one minibatch, micro-batch by micro-batch; its statistics and verdict."""
        cfg, (tokens, _, words) = self.config, totals
        parts = []
        for part in self._micro_batches(ro, rows):
            loss, numbers = self._loss(ro[part], totals)
            loss.backward()
            parts.append(numbers)
        for part in _split(ptx if tokens else [], cfg.micro_batch_size or cfg.mini_batch_size):
            loss = self._ptx_loss(part) / max(words, 1.0)
            (cfg.ptx_coef * loss).backward()
            parts.append({"ppo/loss/ptx": loss.detach() * tokens})
        self.ranks.sum_gradients(self.parameters)
        if self.step_count < cfg.critic_warmup_steps:
            for p in self._policy_parameters:
                p.grad = None
        norm = nn.utils.get_total_norm([p.grad for p in self.parameters if p.grad is not None])
        if cfg.max_grad_norm is not None:
            nn.utils.clip_grads_with_norm_(self.parameters, cfg.max_grad_norm, norm)
        out = stats.of_minibatch([*parts, {"ppo/grad_norm": norm}], self.ranks)
        out |= {"tokens": tokens}
        return out | {"verdict": stats.verdict(out, cfg)}

    def _loss(self, old: Rollout, totals: list[float]) -> tuple[Tensor, dict[str, Tensor]]:
        """This micro-batch's part of the minibatch's loss, and its statistics."""
        cfg = self.config
        batch, _, new = self._ask(old.queries, old.responses)
        old = old.widen(batch.mask.shape[1]).to(self.device)
        names = ("cliprange", "cliprange_high", "dual_clip", "cliprange_value")
        out = ppo_loss(
            new["logprobs"],
            old.logprobs,
            old.advantages,
            old.mask,
            values=new["values"],
            old_values=old.values,
            returns=old.returns,
            entropy=new["entropy"] if cfg.ent_coef else new["entropy"].detach(),
            ref_logprobs=old.ref_logprobs,
            rollout_logprobs=old.rollout_logprobs if cfg.rollout_is_cap else None,
            vf_coef=cfg.vf_coef,
            ent_coef=cfg.ent_coef,
            kl_coef=cfg.kl_loss_coef,
            is_cap=cfg.rollout_is_cap or 1.0,
            reduction="sum" if cfg.loss_divisor else cfg.loss_agg_mode,
            normalizer=cfg.loss_divisor or totals[cfg.loss_agg_mode.startswith("seq")],
            **{name: getattr(cfg, name) for name in names},
        )
        return out.loss, stats.of_micro_batch(out, new, old, totals[0])

    def _ptx_loss(self, rows: list[Any]) -> Tensor:
        """-sum log p over the tokens of some texts, at temperature 1."""
        batch = self._collate(*map(list, zip(*rows)))
        logprobs, _ = self._policy(batch, with_values=True).logprobs(batch.labels, 1.0)
        return -torch.where(batch.mask, batch.scatter(logprobs), 0).sum()

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
        steps = max(self.config.steps - self.step_count, 0) if steps is None else steps
        texts = len(prompts) > 0 and isinstance(prompts[0], str)
        if texts and self.tokenizer is None:
            raise ValueError("prompts are texts, which needs a tokenizer, got None")
        order, history = self._order(len(prompts)), []
        batches = (rows for _ in iter(int, 1) for rows in order)  # epoch after epoch
        for _, rows in zip(range(steps), batches):
            random = self.generator.get_state()
            try:
                sampled = self._sample([prompts[i] for i in rows], texts, reward_fn, gen_kwargs)
            except BaseException:  # as if the batch had not been drawn: a checkpoint now is sound
                self.generator.set_state(random)
                order.cursor -= 1
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
            queries = [torch.tensor(self.tokenizer(text)["input_ids"]) for text in asked]
        said = responses = self.generate(queries, **options)
        if texts:
            said = [self.tokenizer.decode(r, skip_special_tokens=True) for r in responses]
        try:
            scores = self.ranks.together(reward_fn, asked, said)
        except Exception as e:
            raise RuntimeError(f"reward_fn failed at step {self.step_count + 1}: {e}") from e
        return queries, responses, scores

    def save_pretrained(self, path: str | Path) -> None:
        """The policy (or its adapter) and value head, as transformers and peft save; rank 0."""
        if self.ranks.rank == 0:
            self.model.save_pretrained(path)

    def state_dict(self) -> dict[str, Any]:
        """All that a run needs to go on bit for bit, copied; config only for the record."""
        return copy.deepcopy(self._state())

    def _state(self) -> dict[str, Any]:
        random = checkpoint.random_state(self.generator, self.device)
        return {
            "config": dataclasses.asdict(self.config),
            "model": {n: p.detach() for n, p in self.model.named_parameters() if p.requires_grad},
            "optimizer": self.optimizer.state_dict(),
            "lr_scheduler": self.lr_scheduler and self.lr_scheduler.state_dict(),
            "kl_ctl": self.kl_ctl.state_dict(),
            "running": self.running.state_dict(),
            "counts": {"step_count": self.step_count, "samples": self.samples},
            "order": self.order.state_dict() if self.order else self._order_state,
            "frozen": self._frozen_sum,
            "random": self.ranks.gather(random),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where state_dict() was called; everything is checked before anything changes."""
        checkpoint.check(state, self._state())
        for name in ("optimizer", "lr_scheduler", "kl_ctl", "running"):
            if state[name] is not None:
                getattr(self, name).load_state_dict(state[name])
        with torch.no_grad():
            for name, x in state["model"].items():
                self.model.get_parameter(name).copy_(x)
        vars(self).update(state["counts"], _order_state=state["order"])
        if self.order is not None:
            vars(self.order).update(state["order"])
        random = state["random"][self.ranks.rank]
        checkpoint.set_random_state(random, self.generator, self.device)

    def save_checkpoint(self, path: str | Path) -> None:
        """state_dict() in one file, which takes the place of `path` only when it is complete."""
        state = self._state()
        if self.ranks.rank == 0:
            checkpoint.write(state, Path(path))
        self.ranks.sum(torch.zeros(1, device=self.device))  # no rank goes on before it is there

    def load_checkpoint(self, path: str | Path) -> None:
        """load_state_dict of a file that save_checkpoint wrote."""
        self.load_state_dict(checkpoint.read(Path(path)))


def _split(rows: Sequence[Any], size: int) -> list[Any]:
    return [rows[i : i + size] for i in range(0, len(rows), size)]


def _columns(rows: list[dict[str, Any]]) -> dict[str, list[Any]]:
    """TRL's usual data_collator: a list per column."""
    if not hasattr(rows[0], "keys"):
        kind = type(rows[0]).__name__
        raise TypeError(f"dataset must have dicts as rows, or a data_collator; got {kind}")
    return {key: [row[key] for row in rows] for key in rows[0]}
