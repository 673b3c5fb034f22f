"""`python -m ppo_kernels` is `ppo-kernels`."""

import sys

from ppo_kernels.cli import main

if __name__ == "__main__":
    sys.exit(main())
