"""Every tolerance of the test-suite, with its reason. Tests import names, never write numbers."""

# fp64 against fp64: rounding of a few hundred operations.
FP64 = {"rtol": 1e-10, "atol": 1e-10}
# The worked example's literals are printed with 12 decimals.
LITERAL = {"rtol": 0.0, "atol": 1e-12}
# fp32 kernels against fp64: sums of up to a few thousand terms of order one.
FP32 = {"rtol": 1e-5, "atol": 1e-5}
# bf16 output rounded once: half a unit of 2^-8.
BF16_OUT = {"rtol": 2**-8, "atol": 1e-5}
# Triton's interpreter truncates fp32 -> bf16 instead of rounding: a whole unit of 2^-7.
BF16_OUT_INTERPRETER = {"rtol": 2**-7, "atol": 1e-5}
