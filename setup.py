"""Pure wheel by default; `PPO_KERNELS_PREBUILD=1` adds the compiled extension (see _native.py)."""

from setuptools import setup

setup(
    packages=[
        "ppo_kernels",
        "ppo_kernels.csrc",
        "ppo_kernels.csrc.cpu",
        "ppo_kernels.demo",
        "ppo_kernels.integrations",
        "ppo_kernels.kernels",
        "ppo_kernels.ops",
        "ppo_kernels.trainer",
    ],
    package_dir={"ppo_kernels.csrc": "csrc"},
    package_data={"ppo_kernels.csrc": ["*.cpp", "*.cu", "*.cuh"], "ppo_kernels.csrc.cpu": ["*.h"]},
)
