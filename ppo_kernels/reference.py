"""What each op means, in plain PyTorch: the specification, the oracle and the fallback.

Conventions, shared by every op: `logprobs[t] = log pi(token_t | prefix before t)`,
`values[t] = V(prefix before t)`, `mask[t]` says whether token t is an action that is trained; the
three share the index and nothing here shifts anything. A masked slot is selected away before any
arithmetic, so NaN and inf there reach nothing. fp64 inputs are computed in fp64, all others in
fp32. Nothing here reads a value back to the host. Inputs are assumed valid: ops/ checks them.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

KL_KINDS = ("k1", "k2", "k3", "abs", "k1+", "k3+")
POLICY_LOSSES = ("clip", "kl", "a2c")
REDUCTIONS = ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "sum")
STAT_NAMES = (
    "policy_loss",
    "value_loss",
    "entropy",
    "kl_ref",
    "approx_kl",
    "policy_kl",
    "clipfrac",
    "clipfrac_high",
    "clipfrac_low",
    "clipfrac_value",
    "ratio_mean",
    "ratio_max",
    "n",
)
# exp() arguments are clamped here, as verl, OpenRLHF and NeMo-RL do: e^20 is finite in every dtype.
LOG_RATIO_CLAMP = 20.0
# One chunk of the full-vocabulary loops holds at most this many fp32 numbers (64 MB).
CHUNK_ELEMENTS = 1 << 24


def upcast(x: Tensor) -> Tensor:
    """fp64 stays fp64, everything else becomes fp32."""
    return x if x.dtype == torch.float64 else x.float()


# ------------------------------------------------------------------------------- log-probs


def _row_chunks(rows: int, V: int) -> Iterator[slice]:
    step = max(1, CHUNK_ELEMENTS // max(V, 1))
    for start in range(0, rows, step):
        yield slice(start, min(start + step, rows))


def transform_logits(
    x: Tensor, temperature: Tensor | float, logit_scale: float, softcap: float | None
) -> Tensor:
    """`z = softcap * tanh(logit_scale * x / softcap) / temperature`; infinite logits stay so.

    temperature: a number, or a tensor that broadcasts against the leading dimensions of x, where
    one that is not > 0 makes its row NaN.
    """
    z = upcast(x)
    if logit_scale != 1.0:
        z = z * logit_scale
    if softcap:
        z = torch.where(z.isinf(), z, softcap * torch.tanh(z / softcap))
    return z / _positive(temperature, z.dtype)


def _positive(temperature: Tensor | float, dtype: torch.dtype) -> Tensor | float:
    if not isinstance(temperature, Tensor):
        return temperature
    t = temperature.to(dtype).unsqueeze(-1)
    return torch.where(t > 0, t, torch.nan)


def logprobs_and_entropy(
    logits: Tensor,
    labels: Tensor,
    temperature: Tensor | float = 1.0,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    ignore_index: int = -100,
) -> tuple[Tensor, Tensor]:
    """The meaning of `logprobs_from_logits`, differentiable by autograd; holds [.., V] copies.

    `logp = z_y - lse(z)`, `H = ln s - sum_v e_v (z_v - m) / s` with `e = exp(z - m)`,
    `s = sum e`, `m = max z`.
    """
    ignored = labels == ignore_index
    V = logits.shape[-1]
    bad = ((labels < 0) | (labels >= V)) & ~ignored
    x = torch.where(ignored.unsqueeze(-1), torch.zeros_like(logits), logits)
    z = transform_logits(x, temperature, logit_scale, softcap)
    # A row that is -inf everywhere keeps m = -inf, and -inf - -inf makes it NaN, as it should be.
    m = z.detach().amax(-1, keepdim=True)
    d = z - m
    e = torch.exp(d)
    s = e.sum(-1)
    masked = z == -torch.inf
    w = torch.where(masked, 0.0, e * torch.where(masked, 0.0, d)).sum(-1)
    y = labels.clamp(0, V - 1).long().unsqueeze(-1)
    log_s = torch.log(s)
    logp = d.gather(-1, y).squeeze(-1) - log_s
    entropy = log_s - w / s
    nan = torch.full_like(logp, torch.nan)
    # Multiplying by NaN, not selecting it, so that the row's gradient is NaN too.
    poison = torch.where(bad, nan, torch.ones_like(nan))
    zero = torch.zeros_like(logp)
    return (
        torch.where(ignored, zero, logp * poison),
        torch.where(ignored, zero, entropy * poison),
    )


def logprobs_partials(
    logits: Tensor,
    labels: Tensor,
    temperatures: Tensor | None,
    temperature: float,
    logit_scale: float,
    softcap: float,
    ignore_index: int,
    shard: Tensor | None,
    sum_p2: bool,
) -> Tensor:
    """Per row of logits [.., V], the columns [shard[0], shard[0] + V) of a vocabulary:
    `m = max z`, `s = sum e`, `w = sum e (z - m)`, `z_label` (-inf if elsewhere) and, if asked,
    `q = sum e^2`, with `e = exp(z - m)`. [N, 4] or [N, 5]; an ignored row's numbers mean nothing.
    """
    x, y = logits.reshape(-1, logits.shape[-1]), labels.reshape(-1).long()
    N, V = x.shape
    out = x.new_empty((N, 5 if sum_p2 else 4), dtype=upcast(x[:0]).dtype)
    for rows in _row_chunks(N, V):
        t = temperature if temperatures is None else temperatures.reshape(-1)[rows]
        ignored = (y[rows] == ignore_index).unsqueeze(-1)
        z = torch.where(ignored, torch.zeros_like(x[rows]), x[rows])
        z = transform_logits(z, t, logit_scale, softcap)
        m = z.amax(-1, keepdim=True)
        d = z - torch.where(m == -torch.inf, 0.0, m)
        e = torch.exp(d)
        w = torch.where(e == 0, 0.0, e * d).sum(-1)
        at = y[rows] if shard is None else y[rows] - shard[0]
        z_label = z.gather(-1, at.clamp(0, V - 1).unsqueeze(-1)).squeeze(-1)
        z_label = torch.where((at >= 0) & (at < V), z_label, -torch.inf)
        sums = [m.squeeze(-1), e.sum(-1), w, z_label]
        out[rows] = torch.stack([*sums, (e * e).sum(-1)] if sum_p2 else sums, -1)
    return out


def merge_partials(partials: Tensor) -> Tensor:
    """The partials [N, K] of a whole vocabulary from those of its slices, [slices, N, K]."""
    m, s, w, z_label, *q = partials.unbind(-1)
    top = m.amax(0)
    d = m - torch.where(top == -torch.inf, 0.0, top)
    f = torch.exp(d)
    w = torch.where(f == 0, 0.0, (w + s * d) * f).sum(0)
    q = [(each * f * f).sum(0) for each in q]
    return torch.stack([top, (s * f).sum(0), w, z_label.amax(0), *q], -1)


def finish_partials(
    partials: Tensor, labels: Tensor, ignore_index: int, vocab_size: Tensor | int
) -> tuple[Tensor, ...]:
    """(logprobs, entropy, row_max, log_sum[, sum_p2]) like labels, `lse = row_max + log_sum`."""
    m, s, w, z_label, *q = (x.reshape(labels.shape) for x in partials.unbind(-1))
    ignored = labels == ignore_index
    bad = (labels < 0) | (labels >= vocab_size)
    log_s = torch.log(s)
    logp = torch.where(bad, torch.nan, (z_label - m) - log_s)
    entropy = torch.where(bad, torch.nan, log_s - w / s)
    out = [logp, entropy, m, log_s, *(each / (s * s) for each in q)]
    return tuple(torch.where(ignored, 0.0, x) for x in out)


def logprobs_fwd(
    logits: Tensor,
    labels: Tensor,
    temperatures: Tensor | None,
    temperature: float,
    logit_scale: float,
    softcap: float,
    ignore_index: int,
    entropy: bool,
    sum_p2: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(logprobs, entropy, row_max, log_sum, sum_p2) in row chunks; empty where not asked for."""
    transform = (temperatures, temperature, logit_scale, softcap, ignore_index)
    sums = logprobs_partials(logits, labels, *transform, None, True)
    logp, ent, m, log_s, p2 = finish_partials(sums, labels, ignore_index, logits.shape[-1])
    none = logp.new_empty(0)
    return logp, ent if entropy else none, m, log_s, p2 if sum_p2 else none


def logprobs_bwd(
    logits: Tensor,
    grad_logp: Tensor | None,
    grad_entropy: Tensor | None,
    labels: Tensor,
    temperatures: Tensor | None,
    temperature: float,
    logit_scale: float,
    softcap: float,
    ignore_index: int,
    row_max: Tensor,
    log_sum: Tensor,
    entropy: Tensor | None,
    shard: Tensor | None,
) -> Tensor:
    """d(logits) in row chunks: `dz = g (1_y - p) - h p (ln p + H)`, then the chain rule to x.

    A row without gradient is not read and gets 0; a bad label makes its row NaN.
    """
    x, y = logits.reshape(-1, logits.shape[-1]), labels.reshape(-1).long()
    N, V = x.shape
    first, vocab_size = (0, V) if shard is None else shard.unbind()
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    zero = torch.zeros_like(row_max)
    per_row = (grad_logp, grad_entropy, row_max, log_sum, entropy)
    g, h, m, log_s, H = ((zero if v is None else v).reshape(-1, 1) for v in per_row)
    y = y.unsqueeze(-1)
    skipped = (y == ignore_index) | ((g == 0) & (h == 0))
    g = torch.where((y < 0) | (y >= vocab_size), torch.nan, g)
    columns = torch.arange(V, device=x.device)
    for rows in _row_chunks(N, V):
        t = temperature if temperatures is None else temperatures.reshape(-1)[rows]
        x_rows = torch.where(skipped[rows], torch.zeros_like(x[rows]), x[rows])
        log_p = transform_logits(x_rows, t, logit_scale, softcap) - m[rows] - log_s[rows]
        p = torch.exp(log_p)
        weight = g[rows]
        if grad_entropy is not None:
            weight = weight + h[rows] * (torch.where(p == 0, 0.0, log_p) + H[rows])
        dz = torch.where(columns == y[rows] - first, g[rows], 0.0) - p * weight
        dx = dz * logit_scale / _positive(t, dz.dtype)
        if softcap:
            u = upcast(x_rows)
            slope = 1 - torch.tanh(u * logit_scale / softcap) ** 2
            dx = dx * torch.where(u.isinf(), 1.0, slope)
        out[rows] = torch.where(skipped[rows], torch.zeros_like(dx), dx)
    return out.view(logits.shape)


# ------------------------------------------------------------------------- from hidden states


def logits_from_hidden(hidden: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`hidden @ weight.T + bias` of 16-bit numbers too in fp32: what the ops never hold at once."""
    logits = upcast(hidden) @ upcast(weight).T
    return logits if bias is None else logits + bias


def widening_product_(out: Tensor, a: Tensor, b: Tensor, add: bool) -> None:
    """out [M, N] = a [M, K] @ b [K, N], plus out if `add`, where out is wider than a and b."""
    a = a.to(out.dtype)
    step = max(1, CHUNK_ELEMENTS // 4 // max(1, b.shape[0]))
    for start in range(0, b.shape[1], step):
        columns = slice(start, start + step)
        part = out[:, columns]
        torch.addmm(part, a, b[:, columns].to(out.dtype), beta=int(add), out=part)


def split_product_(high: Tensor, low: Tensor, a: Tensor, b: Tensor, add: bool, last: bool) -> None:
    """As widening_product_, where a number of the result has 24 bits: high bf16, low uint8 [M, N].

    They are the upper 24 bits of fp32, rounded to nearest, ties to even: 8 of exponent, 16 of
    precision. last: high is the result in bf16, and low of no further use.
    """
    step = max(1, CHUNK_ELEMENTS // 16 // max(1, high.shape[1]))
    for start in range(0, high.shape[0], step):
        rows = slice(start, start + step)
        sums = torch.zeros_like(high[rows], dtype=torch.float32)
        if add:
            upper, lower = high[rows].view(torch.int16).int(), low[rows].int()
            sums = (upper << 16 | lower << 8).view(torch.float32)
        widening_product_(sums, a[rows], b, True)
        if last:
            high[rows] = sums.bfloat16()
            continue
        bits = sums.view(torch.int32)
        bits = torch.where(sums.isnan(), 0x7FC00000, bits + 0x7F + (bits >> 8 & 1))
        high.view(torch.int16)[rows] = (bits >> 16).short()
        low[rows] = (bits >> 8 & 0xFF).to(torch.uint8)


# ----------------------------------------------------------------------------- KL and rewards


def kl_penalty(logprobs: Tensor, ref_logprobs: Tensor, kind: str = "k1") -> Tensor:
    """Per-token estimators of KL(pi || ref) for tokens sampled from pi (Schulman 2020).

    With `d = logp - ref`: k1 = d, k2 = d^2/2, k3 = e^-d - 1 + d, abs = |d|. A trailing "+" keeps
    the value and takes the gradient of k2, the one whose expectation is right (verl).
    """
    d = upcast(logprobs) - upcast(ref_logprobs)
    if kind.endswith("+"):
        k2 = 0.5 * d * d
        straight = torch.where(k2.isfinite(), k2 - k2.detach(), 0.0)
        return kl_penalty(logprobs, ref_logprobs, kind[:-1]).detach() + straight
    if kind == "k1":
        return d
    if kind == "k2":
        return 0.5 * d * d
    if kind == "abs":
        return d.abs()
    d = d.clamp(-LOG_RATIO_CLAMP, LOG_RATIO_CLAMP)
    return torch.expm1(-d) + d


def kl_penalty_grad(logprobs: Tensor, ref_logprobs: Tensor, kind: str) -> Tensor:
    """d(kl_penalty)/d(logprobs), written out."""
    d = logprobs - ref_logprobs
    if kind == "k1":
        return torch.ones_like(d)
    if kind == "abs":
        return torch.sign(d)
    if kind == "k3":
        return torch.where(d.abs() > LOG_RATIO_CLAMP, 0.0, -torch.expm1(-d))
    return d


def last_action(mask: Tensor) -> Tensor:
    """[B, T] bool: True at the last True of each row of mask; rows without one have none."""
    after = mask.flip(-1).cumsum(-1).flip(-1)
    return mask & (after == 1)


def compute_rewards(
    scores: Tensor,
    logprobs: Tensor,
    ref_logprobs: Tensor,
    mask: Tensor,
    kl_coef: float | Tensor,
    kind: str = "k1",
    placement: str = "token",
    token_rewards: Tensor | None = None,
) -> Tensor:
    """Rewards [B, T]: KL shaping, the score on the last action, optional per-token rewards."""
    zero = torch.zeros((), dtype=upcast(logprobs).dtype, device=logprobs.device)
    kl = kl_penalty(torch.where(mask, logprobs, 0), torch.where(mask, ref_logprobs, 0), kind)
    scores = scores.to(kl.dtype)
    if placement == "token":
        rewards = -kl_coef * kl
    else:
        n = mask.sum(-1).clamp(min=1)
        scores = scores - kl_coef * kl.sum(-1) / n
        rewards = torch.zeros_like(kl)
    rewards = rewards + torch.where(last_action(mask), scores.unsqueeze(-1), zero)
    if token_rewards is not None:
        rewards = rewards + torch.where(mask, token_rewards.to(kl.dtype), zero)
    return torch.where(mask, rewards, zero)


# -------------------------------------------------------------------------------------- GAE


class Advantages(NamedTuple):
    """advantages, returns: like values; stats: fp64 [3] = (n, sum A, sum A^2) over valid tokens."""

    advantages: Tensor
    returns: Tensor
    stats: Tensor


def gae(
    rewards: Tensor | None,
    values: Tensor,
    mask: Tensor | None,
    gamma: float,
    lam: float,
    lam_returns: float | None = None,
    scores: Tensor | None = None,
    bootstrap: Tensor | None = None,
    terminated: Tensor | None = None,
    truncated: Tensor | None = None,
) -> Advantages:
    """Padded [B, T] GAE, one step of the carry form per column, right to left.

    `R_t = r_t + X_{t+1}`, `A_t = R_t - V_t`, `X_t = gamma ((1-lam) V_t + lam R_t)`. A masked token
    is the identity. The score is a reward on the last action; `bootstrap` [B] enters as
    `gamma * bootstrap` after it. An episode that ends inside the row (`terminated[t]`) hands 0 to
    t; one that is cut (`truncated[t]`, with bootstrap [B, T]) hands `gamma * bootstrap[t]`.
    """
    dtype = upcast(values).dtype
    B, T = values.shape
    if mask is None:
        mask = torch.ones_like(values, dtype=torch.bool)
    zero = torch.zeros((), dtype=dtype, device=values.device)
    v = torch.where(mask, values.to(dtype), zero)
    r = zero.expand(B, T) if rewards is None else torch.where(mask, rewards.to(dtype), zero)
    if scores is not None:
        r = r + torch.where(last_action(mask), scores.to(dtype).unsqueeze(-1), zero)
    per_token = bootstrap is not None and bootstrap.dim() == 2
    x_end = zero.expand(B)
    if bootstrap is not None and not per_token:
        x_end = gamma * bootstrap.to(dtype)
    lams = (lam, lam if lam_returns is None else lam_returns)
    advantages, returns = torch.zeros_like(v), torch.zeros_like(v)
    carry = [x_end, x_end]
    for t in range(T - 1, -1, -1):
        valid = mask[:, t]
        for k, lam_k in enumerate(lams):
            x = carry[k]
            if terminated is not None:
                x = torch.where(terminated[:, t], zero, x)
            if truncated is not None:
                cut = gamma * bootstrap[:, t].to(dtype) if per_token else zero
                x = torch.where(truncated[:, t], cut, x)
            ret = r[:, t] + x
            if k == 0:
                advantages[:, t] = torch.where(valid, ret - v[:, t], zero)
            else:
                returns[:, t] = torch.where(valid, ret, zero)
            left = gamma * ((1 - lam_k) * v[:, t] + lam_k * ret)
            carry[k] = torch.where(valid, left, carry[k])
    return Advantages(advantages, returns, masked_sums(advantages, mask))


def pad_packed(x: Tensor | None, cu_seqlens: Tensor, width: int, fill: float = 0) -> Tensor | None:
    """Packed [N] -> padded [S, width], right-padded with `fill`."""
    if x is None:
        return None
    starts = cu_seqlens[:-1].long().unsqueeze(-1)
    at = torch.arange(width, device=x.device).unsqueeze(0)
    inside = at < (cu_seqlens[1:] - cu_seqlens[:-1]).long().unsqueeze(-1)
    if x.numel() == 0:
        return x.new_full((cu_seqlens.numel() - 1, width), fill)
    return torch.where(inside, x[(starts + at).clamp(max=x.numel() - 1)], x.new_full((), fill))


def sequence_ids(cu_seqlens: Tensor, n: int) -> Tensor:
    """Packed position -> the number of its sequence, [n] int64; no host round trip."""
    at = torch.arange(n, device=cu_seqlens.device)
    return torch.searchsorted(cu_seqlens[1:].long().contiguous(), at, right=True)


# --------------------------------------------------------------------------------- whitening


def masked_sums(x: Tensor, mask: Tensor) -> Tensor:
    """fp64 [3]: (n, sum, sum of squares) over the valid elements."""
    x = torch.where(mask, x, torch.zeros((), dtype=x.dtype, device=x.device)).double()
    return torch.stack([mask.sum().double(), x.sum(), (x * x).sum()])


def mean_rstd(stats: Tensor, eps: float = 1e-8) -> tuple[Tensor, Tensor]:
    """fp64 (mean, 1/sqrt(unbiased variance + eps)); rstd is 0 when n <= 1."""
    n, s1, s2 = stats.unbind()
    mean = s1 / n.clamp(min=1)
    var = ((s2 - s1 * mean) / (n - 1).clamp(min=1)).clamp(min=0)
    return mean, torch.where(n > 1, torch.rsqrt(var + eps), torch.zeros_like(var))


def masked_mean(x: Tensor, mask: Tensor | None, dim: int | None = None) -> Tensor:
    """sum(mask * x) / sum(mask), 0 where nothing is valid; a floating mask is a weight."""
    x = upcast(x)
    if mask is None:
        mask = torch.ones_like(x, dtype=torch.bool)
    valid = mask != 0
    zero = torch.zeros((), dtype=x.dtype, device=x.device)
    weight = torch.where(valid, mask.to(x.dtype), zero)
    total, n = torch.where(valid, x, zero) * weight, weight
    total = total.sum() if dim is None else total.sum(dim)
    n = n.sum() if dim is None else n.sum(dim)
    return torch.where(n > 0, total / torch.where(n > 0, n, 1.0), zero)


def masked_whiten(
    x: Tensor, mask: Tensor, stats: Tensor, shift_mean: bool = True, eps: float = 1e-8
) -> Tensor:
    """(x - mean) / sqrt(var + eps), + mean if not shift_mean; masked slots 0 (TRL semantics)."""
    mean, rstd = mean_rstd(stats, eps)
    y = (upcast(x).double() - mean) * rstd
    if not shift_mean:
        y = y + mean
    y = y.to(upcast(x).dtype)
    return torch.where(mask, y, torch.zeros_like(y))


# ------------------------------------------------------------------------------------- loss


def token_coefs(
    weight: Tensor,
    reduction: str,
    normalizer: Tensor | float | None,
    cu_seqlens: Tensor | None = None,
) -> Tensor:
    """The c >= 0 per token with `agg(x) = sum(c x)`, from weights >= 0; all 0 if no weight is."""
    if reduction == "sum":
        den = 1.0 if normalizer is None else normalizer
    elif reduction == "token-mean":
        den = weight.sum() if normalizer is None else normalizer
    else:
        if cu_seqlens is None:
            n = weight.sum(-1, keepdim=True)
        else:
            n = weight.new_zeros(cu_seqlens.numel() - 1)
            ids = sequence_ids(cu_seqlens, weight.numel())
            n = n.index_add(0, ids, weight)
        den = (n > 0).sum() if normalizer is None else normalizer
        if reduction == "seq-mean-token-mean":
            n = torch.where(n > 0, n, 1.0)
            weight = weight / (n if cu_seqlens is None else n[ids])
    if not isinstance(den, Tensor):
        return weight / den
    den = den.to(weight.dtype)
    return torch.where(den > 0, weight / torch.where(den > 0, den, 1.0), torch.zeros_like(weight))


def aggregate(
    x: Tensor,
    weight: Tensor,
    reduction: str,
    normalizer: Tensor | float | None,
    cu_seqlens: Tensor | None = None,
) -> Tensor:
    """One number from per-token x and weights >= 0, by `reduction`; empty input gives 0."""
    return (x * token_coefs(weight, reduction, normalizer, cu_seqlens)).sum()


class LossTokens(NamedTuple):
    """The inputs of the loss with masked slots selected away, all in one dtype."""

    weight: Tensor
    coef: Tensor
    logp: Tensor
    old: Tensor
    adv: Tensor
    is_weight: Tensor
    values: Tensor | None
    old_values: Tensor | None
    returns: Tensor | None
    entropy: Tensor | None
    ref: Tensor | None


def loss_tokens(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor | None,
    values: Tensor | None,
    old_values: Tensor | None,
    returns: Tensor | None,
    entropy: Tensor | None,
    ref_logprobs: Tensor | None,
    rollout_logprobs: Tensor | None,
    is_cap: float,
    reduction: str,
    normalizer: Tensor | float | None,
    whiten: Tensor | None,
    cu_seqlens: Tensor | None,
) -> LossTokens:
    """Select, upcast, whiten; all but logprobs, values and entropy become constants."""
    dtype = upcast(logprobs).dtype
    zero = torch.zeros((), dtype=dtype, device=logprobs.device)
    mask = torch.ones_like(logprobs, dtype=torch.bool) if mask is None else mask
    valid = mask != 0

    def pick(x: Tensor | None) -> Tensor | None:
        return None if x is None else torch.where(valid, x.to(dtype), zero)

    def constant(x: Tensor | None) -> Tensor | None:
        return None if x is None else pick(x.detach())

    weight, old, adv = constant(mask), constant(old_logprobs), constant(advantages)
    if whiten is not None:
        mean, rstd = mean_rstd(whiten)
        adv = pick((adv.double() - mean) * rstd)
    is_weight = torch.ones_like(old)
    if rollout_logprobs is not None:
        log_w = (old - constant(rollout_logprobs)).clamp(-LOG_RATIO_CLAMP, LOG_RATIO_CLAMP)
        is_weight = torch.exp(log_w).clamp(max=is_cap)
    return LossTokens(
        weight,
        token_coefs(weight, reduction, normalizer, cu_seqlens),
        pick(logprobs),
        old,
        adv,
        is_weight,
        pick(values),
        constant(old_values),
        constant(returns),
        pick(entropy),
        constant(ref_logprobs),
    )


def policy_terms(
    logp: Tensor,
    old: Tensor,
    adv: Tensor,
    policy_loss: str,
    low: float,
    high: float,
    dual_clip: float | None,
    kl_old_coef: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Per-token (loss, ratio, bound above, bound below). Nothing is clipped on the boundary.

    `min(r A, clip(r) A)` is `A` times a ratio that stops at 1 + high for A > 0 and at 1 - low
    for A < 0; dual clip stops it at dual_clip for A < 0. Where it stops the gradient is 0.
    """
    d = (logp - old).clamp(-LOG_RATIO_CLAMP, LOG_RATIO_CLAMP)
    ratio = torch.exp(d)
    none = torch.zeros_like(ratio, dtype=torch.bool)
    if policy_loss == "kl":
        # r - 1 - ln r: unbiased, non-negative estimate of KL(old || new) under samples from old.
        return -adv * ratio + kl_old_coef * (torch.expm1(d) - d), ratio, none, none
    if policy_loss == "a2c":
        return -adv * logp, ratio, none, none
    above = (adv > 0) & (ratio > 1 + high)
    below = (adv < 0) & (ratio < 1 - low)
    bounded = torch.where(above, 1 + high, torch.where(below, 1 - low, ratio))
    if dual_clip is not None:
        bounded = torch.where((adv < 0) & (ratio > dual_clip), dual_clip, bounded)
    return -adv * bounded, ratio, above, below


def value_terms(
    values: Tensor, old_values: Tensor | None, returns: Tensor, cliprange_value: float | None
) -> tuple[Tensor, Tensor]:
    """Per-token (0.5 max of the two squared errors, whether the clipped one was larger).

    Where the clipped error is larger the value lies outside the range and the gradient is 0.
    """
    plain = (values - returns) ** 2
    if cliprange_value is None:
        return 0.5 * plain, torch.zeros_like(plain, dtype=torch.bool)
    clipped = torch.clamp(values, old_values - cliprange_value, old_values + cliprange_value)
    squared = (clipped - returns) ** 2
    return 0.5 * torch.where(squared > plain, squared, plain), squared > plain


def ppo_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor | None = None,
    *,
    values: Tensor | None = None,
    old_values: Tensor | None = None,
    returns: Tensor | None = None,
    entropy: Tensor | None = None,
    ref_logprobs: Tensor | None = None,
    rollout_logprobs: Tensor | None = None,
    policy_loss: str = "clip",
    cliprange: float = 0.2,
    cliprange_high: float | None = None,
    dual_clip: float | None = None,
    cliprange_value: float | None = 0.2,
    vf_coef: float = 0.1,
    ent_coef: float = 0.0,
    kl_coef: float = 0.0,
    kl_kind: str = "k3+",
    kl_old_coef: float = 1.0,
    is_cap: float = 2.0,
    reduction: str = "token-mean",
    normalizer: Tensor | float | None = None,
    whiten: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(loss, stats [13] by STAT_NAMES); differentiable in logprobs, values and entropy."""
    t = loss_tokens(
        logprobs,
        old_logprobs,
        advantages,
        mask,
        values,
        old_values,
        returns,
        entropy,
        ref_logprobs,
        rollout_logprobs,
        is_cap,
        reduction,
        normalizer,
        whiten,
        cu_seqlens,
    )
    high = cliprange if cliprange_high is None else cliprange_high
    pg, ratio, above, below = policy_terms(
        t.logp, t.old, t.adv, policy_loss, cliprange, high, dual_clip, kl_old_coef
    )
    zero = torch.zeros_like(pg)
    vf, vclip = zero, zero
    if values is not None:
        vf, vclip = value_terms(t.values, t.old_values, t.returns, cliprange_value)
    ent = zero if entropy is None else t.entropy
    kl = zero if ref_logprobs is None else kl_penalty(t.logp, t.ref, kl_kind)
    terms = [(t.coef * x).sum() for x in (pg * t.is_weight, vf, ent, kl)]
    # A coefficient of 0 leaves its term out, which may be infinite where it is only watched.
    coefs = (1.0, vf_coef, -ent_coef, kl_coef)
    loss = sum(c * (x if c else x.nan_to_num(0, 0, 0)) for c, x in zip(coefs, terms))
    with torch.no_grad():
        d = (t.logp - t.old).clamp(-LOG_RATIO_CLAMP, LOG_RATIO_CLAMP)
        n = t.weight.sum()
        share = torch.where(n > 0, t.weight / torch.where(n > 0, n, 1.0), zero)
        high_frac, low_frac = (share * above).sum(), (share * below).sum()
        ratio = torch.where(t.weight != 0, ratio, zero)
        stats = torch.stack(
            [
                *(x.detach() for x in terms),
                (share * (torch.expm1(d) - d)).sum(),
                (share * (t.old - t.logp)).sum(),
                high_frac + low_frac,
                high_frac,
                low_frac,
                (share * vclip).sum(),
                (share * ratio).sum(),
                ratio.amax() if ratio.numel() else n,
                n,
            ]
        )
    return loss, stats


def ppo_loss_grads(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor | None,
    values: Tensor | None,
    old_values: Tensor | None,
    returns: Tensor | None,
    entropy: Tensor | None,
    ref_logprobs: Tensor | None,
    rollout_logprobs: Tensor | None,
    policy_loss: str,
    cliprange: float,
    cliprange_high: float,
    dual_clip: float | None,
    cliprange_value: float | None,
    vf_coef: float,
    ent_coef: float,
    kl_coef: float,
    kl_kind: str,
    kl_old_coef: float,
    is_cap: float,
    reduction: str,
    normalizer: Tensor | float | None,
    whiten: Tensor | None,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """d(ppo_loss)/d(logprobs, values, entropy) written out; autograd is not at hand in an op."""
    t = loss_tokens(
        logprobs,
        old_logprobs,
        advantages,
        mask,
        values,
        old_values,
        returns,
        entropy,
        ref_logprobs,
        rollout_logprobs,
        is_cap,
        reduction,
        normalizer,
        whiten,
        cu_seqlens,
    )
    _, ratio, above, below = policy_terms(
        t.logp, t.old, t.adv, policy_loss, cliprange, cliprange_high, dual_clip, kl_old_coef
    )
    if policy_loss == "a2c":
        d_pg = -t.adv
    else:
        d_pg = -t.adv * ratio
        if policy_loss == "kl":
            d_pg = d_pg + kl_old_coef * (ratio - 1)
        stopped = above | below | ((t.logp - t.old).abs() > LOG_RATIO_CLAMP)
        if dual_clip is not None and policy_loss == "clip":
            stopped = stopped | ((t.adv < 0) & (ratio > dual_clip))
        d_pg = torch.where(stopped, 0.0, d_pg)
    d_logp = t.is_weight * d_pg
    if ref_logprobs is not None and kl_coef:
        d_logp = d_logp + kl_coef * kl_penalty_grad(t.logp, t.ref, kl_kind)
    d_values = d_entropy = None
    if values is not None:
        _, vclip = value_terms(t.values, t.old_values, t.returns, cliprange_value)
        d_values = vf_coef * t.coef * torch.where(vclip | (vf_coef == 0), 0.0, t.values - t.returns)
    if entropy is not None:
        d_entropy = -ent_coef * t.coef
    return t.coef * d_logp, d_values, d_entropy
