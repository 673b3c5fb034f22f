"""One place that decides how the tests run: interpreter, threads, seeds."""

import os

# Before triton is imported anywhere: without a GPU its kernels run in the interpreter.
if not os.path.exists("/dev/nvidiactl"):
    os.environ.setdefault("TRITON_INTERPRET", "1")

import pytest
import torch

try:
    from hypothesis import settings
except ImportError:  # bench/gpu.sh runs the gpu tests on machines that lack it
    pass
else:
    settings.register_profile("default", deadline=None, max_examples=40, derandomize=True)
    settings.load_profile("default")
# Two workers on two cores: a second thread each would only wait for the other worker's.
THREADS = 1 if "PYTEST_XDIST_WORKER" in os.environ else 2
torch.set_num_threads(THREADS)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(autouse=True)
def _threads(request: pytest.FixtureRequest) -> None:
    """On tiny models a second thread is slower, many times so when its core is busy."""
    torch.set_num_threads(1 if "tiny" in vars(request.module) else THREADS)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)
