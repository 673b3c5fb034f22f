"""Pure wheel by default; `PPO_KERNELS_PREBUILD=1` adds the compiled extension (see _native.py)."""

import importlib.util
import os
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext


class BuildNative(build_ext):
    """Hands the compilation to `_native.build`, so that its flags are the only ones there are."""

    def build_extension(self, ext: Extension) -> None:
        path = Path(__file__).parent / "ppo_kernels" / "_native.py"
        spec = importlib.util.spec_from_file_location("_native", path)
        native = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(native)
        native.build(Path(self.get_ext_fullpath(ext.name)).absolute(), prebuilt=True)


prebuild = os.environ.get("PPO_KERNELS_PREBUILD") == "1"
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
    package_data={
        "ppo_kernels.csrc": ["*.cpp", "*.cu", "*.cuh", "*.h"],
        "ppo_kernels.csrc.cpu": ["*.h", "*.cpp"],
    },
    ext_modules=[Extension("ppo_kernels._C", [])] if prebuild else [],
    cmdclass={"build_ext": BuildNative},
)
