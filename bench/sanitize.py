"""Small shapes of every op on the GPU, for compute-sanitizer to watch; checked against the CPU.

Sizes lie just beside the tile sizes, buffers start off their alignment, rows are masked and empty.
"""

import torch

import ppo_kernels as ppo

for T in (1, 31, 33, 129, 1025, 5000):
    g = torch.Generator().manual_seed(T)
    r, v, mask = (torch.randn(3, T, generator=g) for _ in range(3))
    padded = [x.cuda()[:, 1:] for x in (r, v, mask > 0)]
    here = ppo.gae(*(x.cpu() for x in padded))
    there = ppo.gae(*padded)
    torch.testing.assert_close(there.advantages.cpu(), here.advantages, rtol=1e-4, atol=1e-4)
    lengths = torch.tensor([0, T // 3, 0, T - T // 3])
    cu = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int().cuda()
    ppo.gae(r[0].cuda(), v[0].cuda(), (mask[0] > 0).cuda(), cu_seqlens=cu)

for N, V, dtype in ((5, 1000, torch.float32), (3, 4097, torch.bfloat16)):
    logits = torch.randn(N, V, device="cuda", dtype=dtype)
    labels = torch.randint(V, (N,), device="cuda")
    labels[0] = -100
    for in_place in (False, True):
        x = logits.clone().requires_grad_()
        logp, entropy = ppo.logprobs_from_logits(
            x, labels, return_entropy=True, inplace_backward=in_place
        )
        (logp.sum() + entropy.sum()).backward()
    old, adv, mask = logp.detach().view(1, N), torch.randn(1, N, device="cuda"), labels >= 0
    x = logp.detach().view(1, N).requires_grad_()
    ppo.ppo_loss(x, old, adv, mask.view(1, N)).loss.backward()
    reduction = "seq-mean-token-mean"
    for in_place in (False, True):
        x = logits.clone().requires_grad_()
        ppo.ppo_loss_from_logits(
            (x * 1).view(1, N, V), labels.view(1, N), old, adv, inplace_backward=in_place,
            ent_coef=0.1, reduction=reduction,
        ).loss.backward()  # fmt: skip
    hidden = torch.randn(N, 64, device="cuda", dtype=dtype, requires_grad=True)
    weight = torch.randn(V, 64, device="cuda", dtype=dtype, requires_grad=True)
    loss = ppo.ppo_loss_from_hidden(
        hidden, weight, labels, old.view(N), adv.view(N), mask, chunk_tokens=2
    ).loss
    loss.backward()
torch.cuda.synchronize()
print("every op ran")
