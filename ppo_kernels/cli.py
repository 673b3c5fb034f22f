"""`ppo-kernels demo | train | bench | info`."""

import argparse
import os
import subprocess
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

from ppo_kernels._errors import UserError


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit status is 0, or 1 for a UserError, or 2 for wrong flags."""
    argv = list(sys.argv[1:] if argv is None else argv)
    parser = _parser(argv)
    args, rest = parser.parse_known_args(argv)
    if rest and args.command != "bench":
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    try:
        return COMMANDS[args.command](args, rest)
    except UserError as error:
        if error.__cause__ is not None:
            traceback.print_exception(error.__cause__)
        print(f"ppo-kernels {args.command}: {error}", file=sys.stderr)
        return 1
    except BrokenPipeError:
        # The reader (head, less) has gone: nothing to say, and nothing to flush at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _parser(argv: list[str]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="ppo-kernels", description="PPO for language models")
    commands = parser.add_subparsers(dest="command", required=True)

    demo = commands.add_parser("demo", help="the worked example, or RLHF on real reviews")
    which = demo.add_subparsers(dest="demo", required=True)
    which.add_parser("worked-example", help="one answer of seven tokens, step by step")
    sentiment = which.add_parser("sentiment", help="SFT, reward model, PPO and a report")
    sentiment.add_argument("--quick", action="store_true", help="a minute instead of five")
    sentiment.add_argument("--out", type=Path, help="default runs/sentiment[-quick]-SEED")
    sentiment.add_argument("--seed", type=int, default=0)

    train = commands.add_parser(
        "train",
        help="PPO on your model, prompts and reward function",
        description='FILE.jsonl has a text, or an object with a text as "prompt", on each line. '
        "FUNCTION takes one text (prompt and response together) or two (prompt, response) and "
        "returns a number; MODULE is looked for in the current folder first.",
    )
    train.add_argument("--model", required=True, help="a folder or a name on the hub")
    train.add_argument("--prompts", required=True, type=Path, metavar="FILE.jsonl")
    train.add_argument("--reward", required=True, metavar="MODULE:FUNCTION")
    train.add_argument("--config", type=Path, metavar="FILE.yaml", help="fields of PPOConfig")
    train.add_argument("--out", type=Path, default=Path("runs/train"))
    train.add_argument("--resume", action="store_true", help="go on from OUT/checkpoint.pt")
    train.add_argument("--max-new-tokens", type=_positive, default=64, metavar="N")
    train.add_argument("--save-every", type=_positive, default=20, metavar="STEPS")
    if "train" in argv[:1]:
        from ppo_kernels.train import add_config_flags

        add_config_flags(train)

    commands.add_parser(
        "bench", help="run the repository's benchmarks; takes their flags", add_help=False
    )
    commands.add_parser("info", help="which kernels are active, and why")
    return parser


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be >= 1, got {value}")
    return value


def _demo(args: argparse.Namespace, rest: list[str]) -> int:
    if args.demo == "worked-example":
        from ppo_kernels.demo import worked_example

        worked_example.main()
        return 0
    try:
        from ppo_kernels.demo import sentiment, settings
    except ModuleNotFoundError as error:
        raise UserError(f"{error}; the demo needs `pip install 'ppo_kernels[demo]'`") from None
    import torch

    # The matrices are so small that more threads only wait for each other.
    torch.set_num_threads(min(4, torch.get_num_threads()))
    name = f"sentiment{'-quick' if args.quick else ''}-{args.seed}"
    chosen = settings.QUICK if args.quick else settings.FULL
    sentiment.main(chosen, args.seed, args.out or Path("runs") / name)
    return 0


def _train(args: argparse.Namespace, rest: list[str]) -> int:
    from dataclasses import fields

    from ppo_kernels import train
    from ppo_kernels.trainer import PPOConfig

    given = vars(args)
    train.run(args, {f.name: given[f.name] for f in fields(PPOConfig) if f.name in given})
    return 0


def _bench(args: argparse.Namespace, rest: list[str]) -> int:
    root = Path(__file__).resolve().parents[1]
    if not (root / "bench" / "__main__.py").exists():
        raise UserError(
            f"there is no bench/ in {root}: the benchmarks are in the repository, not in the "
            "installed package; clone it and run `make bench` there"
        )
    # Not -m: a folder called bench may lie where the user is.
    code = f"import sys; sys.path[0] = {str(root)!r}; from bench.__main__ import main; exit(main())"
    with subprocess.Popen([sys.executable, "-c", code, *rest]) as process:
        while True:
            try:
                return process.wait()
            except KeyboardInterrupt:
                continue  # the benchmark has got it too, and prints what it has measured


def _info(args: argparse.Namespace, rest: list[str]) -> int:
    from ppo_kernels import _native

    print(_native.describe())
    return 0


COMMANDS = {"demo": _demo, "train": _train, "bench": _bench, "info": _info}

if __name__ == "__main__":
    sys.exit(main())
