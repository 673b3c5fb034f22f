"""Every tolerance of the test-suite, with its reason. Tests import names, never write numbers."""

# fp64 against fp64: rounding of a few hundred operations.
FP64 = {"rtol": 1e-10, "atol": 1e-10}
# The worked example's literals are printed with 12 decimals.
LITERAL = {"rtol": 0.0, "atol": 1e-12}
# fp32 kernels against fp64: sums of up to a few thousand terms of order one.
FP32 = {"rtol": 1e-5, "atol": 1e-5}
# A mean of small terms, none of which cancels: relative only.
FP32_RELATIVE = {"rtol": 1e-5, "atol": 0.0}
# bf16 output rounded once: half a unit of 2^-8.
BF16_OUT = {"rtol": 2**-8, "atol": 1e-5}
# Triton's interpreter truncates fp32 -> bf16 instead of rounding: a whole unit of 2^-7.
BF16_OUT_INTERPRETER = {"rtol": 2**-7, "atol": 1e-5}
# fp16 output rounded once: half a unit of 2^-10; and truncated by the interpreter.
FP16_OUT = {"rtol": 2**-11, "atol": 1e-5}
FP16_OUT_INTERPRETER = {"rtol": 2**-10, "atol": 1e-5}
# Design section 6: log-probs of fp32 logits with |z| <= 32 over 151936 columns.
LOGPROBS = {"rtol": 0.0, "atol": 2e-5}
# Recorded numbers of other projects, mostly fp32 themselves.
ORACLE = {"rtol": 2e-5, "atol": 3e-5}
# The vector functions in units of the last place of fp32: 1.2 is the most seen of exp and exp2,
# without fused multiply-add; and tanh's 1 - 2 / (..).
EXP_ULPS = 1.25
TANH_ULPS = 2
# H of a row with one likely column, eps (1 + |ln eps|), of which the sums keep eps |ln eps|.
PEAKED_ENTROPY = {"rtol": 0.06, "atol": 0.0}
# The trainer in fp32 against TRL 0.7.1's recorded run, from weights to weights: fp32 noise of two
# forwards by different kernels; the largest seen is a tenth to a third of each bound. Real mistakes
# are far larger: a wrong variance divisor 4e-2, gamma left out 7e-2, a mask off by one 1e-1.
TRL_LOGPROBS = {"rtol": 0.0, "atol": 2e-5}
TRL_LOGPROBS_LATER = {"rtol": 0.0, "atol": 1e-4}
TRL_SCORES = {"rtol": 0.0, "atol": 2e-6}
TRL_REWARDS = {"rtol": 0.0, "atol": 2e-5}
TRL_ADVANTAGES = {"rtol": 0.0, "atol": 5e-5}
TRL_STATS = {"rel": 1e-5, "abs": 5e-5}
TRL_PARAMETERS = {"rtol": 0.0, "atol": 2e-6}
# And relative to how far the parameters moved: |after - mine| / |after - before|.
TRL_MOVED = 1e-4
# The same rows in another padding, batch or micro-batch: fp32 sums in another order, two layers.
REORDERED = {"rtol": 1e-5, "atol": 2e-5}
# Parameters after Adam steps on gradients that differ by such noise; Adam divides by |g|, so the
# atol is a small part of one step (learning rate 1e-3), the rest is agreement to fp32.
STEPPED = {"rtol": 1e-4, "atol": 5e-5}
# Parameters after SGD steps with micro-batches of another size: the noise itself, times lr.
STEPPED_SGD = {"rtol": 1e-5, "atol": 1e-6}
# A bf16 model or bf16 autocast against fp32, per log-prob of a tiny model: a few units of 2^-8 on
# logits of size ten.
BF16_LOGPROBS = {"rtol": 0.0, "atol": 0.3}
# dW and db in fp32: sums over all tokens of terms of order one that mostly cancel.
FP32_SUM = {"rtol": 1e-5, "atol": 1e-4}
# A scan over 131072 tokens in fp32 against fp64, advantages of up to a few hundred: half the digits
# that a sequential fp32 sum of as many terms may lose.
LONG_SCAN = {"rtol": 1e-4, "atol": 2e-3}
# Recorded fp64 numbers; some divide by a count plus 1e-8, which whitening passes on.
ORACLE_FP64 = {"rtol": 1e-9, "atol": 1e-9}
# fp32 numbers around 30000 with a deviation of 0.05: the input itself has only that many digits.
FAR_FROM_ZERO = {"rtol": 0.0, "atol": 1e-3}
# fp64 numbers around 1e7 with a deviation of 1: 2e-9 apart, and eps of 1e-8 in the variance.
FAR_FROM_ZERO_FP64 = {"rtol": 1e-15, "atol": 1e-7}
# bf16 gradients through bf16 GEMMs: d(logits) and the result are each rounded to 2^-9 relative.
BF16_GRADIENT = {"rtol": 2**-7, "atol": 2e-2}
# A loss in fp32 split into micro-batches: the same per-token numbers, added in fp64.
SPLIT = {"rtol": 1e-6, "atol": 1e-7}
# fp32 numbers that may be tiny, against fp64: their own digits, nothing absolute.
RELATIVE = {"rtol": 1e-5, "atol": 0.0}
# Logits of |z| < 8 rounded to bf16: half a unit, 2^-6, of the label's logit and as much of the
# sum's logarithm. And their gradient: p is off by the same, relative to itself, at random.
BF16_LOGITS = {"rtol": 0.0, "atol": 2**-5}
BF16_LOGITS_GRADIENT = 2**-5
# Sums of bf16 products in fp32, rounded once to 24 bits (16 of precision) or to bf16 (8).
SUM_24_BITS = {"rtol": 2**-16, "atol": 1e-4}
SUM_BF16 = {"rtol": 2**-8, "atol": 1e-4}
# Sums of up to 200 chunks in 24 bits, by norm and relative to the error of rounding to bf16 once:
# at random 200 errors of 2^-16 add up to a 20th of one of 2^-8, and that as squares.
MANY_SUMS = 1.01
# How much smaller or larger on average numbers are that were rounded to bf16; cut off it is 2^-8.5.
ROUNDING_BIAS = 2**-11
# fp16 gradients of fp16 inputs, by norm: d(logits) stays fp32, so that only the result is rounded.
FP16_GRADIENT = 2**-11
