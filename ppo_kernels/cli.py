"""`ppo-kernels demo | train | bench | info`."""

import argparse
import contextlib
import os
import subprocess
import sys
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path

from ppo_kernels import __version__
from ppo_kernels._errors import Terminated, UserError

# How to go on from what an interrupted command has saved.
GO_ON = {"train": "--resume goes on from there", "demo": "the same command goes on from there"}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command: 0, 1 for a UserError, 2 for wrong flags, 130 or 143 by Ctrl-C or SIGTERM."""
    argv = list(sys.argv[1:] if argv is None else argv)
    parser = _parser(argv)
    args, rest = parser.parse_known_args(argv)
    if rest and args.command != "bench":
        parser.error(f"unrecognized arguments: {' '.join(rest)}{_hint(args.command, rest[0])}")
    try:
        return COMMANDS[args.command](args, rest)
    except UserError as error:
        if error.__cause__ is not None:
            traceback.print_exception(error.__cause__)
        print(f"ppo-kernels {args.command}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt as stop:
        saved = f": {stop}; {GO_ON[args.command]}" if str(stop) else ""
        how, status = ("terminated", 143) if isinstance(stop, Terminated) else ("interrupted", 130)
        print(f"ppo-kernels {args.command}: {how}{saved}", file=sys.stderr)
        return status
    except BrokenPipeError:
        # The reader (head, less) has gone: nothing to say, and nothing to flush at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _parser(argv: list[str]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="ppo-kernels", description="PPO for language models")
    parser.add_argument("--version", action="version", version=f"ppo_kernels {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)

    demo = commands.add_parser("demo", help="the worked example, or RLHF on real reviews")
    which = demo.add_subparsers(dest="demo", required=True)
    which.add_parser("worked-example", help="one answer of seven tokens, step by step")
    sentiment = which.add_parser("sentiment", help="SFT, reward model, PPO and a report")
    minute = "a minute instead of three on two free cores, more on busy ones"
    sentiment.add_argument("--quick", action="store_true", help=minute)
    sentiment.add_argument("--out", type=Path, help="default runs/sentiment[-quick]-SEED")
    sentiment.add_argument("--seed", type=int, default=0)

    train = commands.add_parser(
        "train",
        help="PPO on your model, prompts and reward function",
        usage="ppo-kernels train --model MODEL --prompts FILE.jsonl --reward MODULE:FUNCTION "
        "--steps N [..]",
        description="FUNCTION returns a number for (text), prompt and response together, or for "
        "(prompt, response); after these two it may name other fields of the prompt's line. "
        "Ctrl-C or SIGTERM saves the step that it interrupts. Behind each flag its default; 'none' "
        "switches off what may be None.",
        allow_abbrev=False,
    )
    train.add_argument("--out", type=Path, default=Path("runs/train"), help="[runs/train]")
    train.add_argument(
        "--resume",
        action="store_true",
        help="go on from OUT/checkpoint.pt with the settings in OUT/config.yaml, changed by the "
        "other flags",
    )
    train.add_argument(
        "--config", type=Path, metavar="FILE.yaml", help="`field: value` lines, fields as below"
    )
    if "train" in argv[:1]:
        from ppo_kernels import train_settings

        train_settings.add_flags(train)

    commands.add_parser(
        "bench", help="run the repository's benchmarks; takes their flags", add_help=False
    )
    commands.add_parser("info", help="which kernels are active, and why")
    return parser


def _hint(command: str, flag: str) -> str:
    if command != "train":
        return ""
    from ppo_kernels import train_settings

    return train_settings.hint(flag)


@contextlib.contextmanager
def _needs(extra: str) -> Iterator[None]:
    """Around imports of what only an extra installs."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise UserError(
            f"{error}; run `pip install '.[{extra}]'` in the project's folder"
        ) from None


def _demo(args: argparse.Namespace, rest: list[str]) -> int:
    if args.demo == "worked-example":
        from ppo_kernels.demo import worked_example

        worked_example.main()
        return 0
    if os.environ.get("WORLD_SIZE", "1") != "1":
        raise UserError("it runs in one process, without torchrun")
    with _needs("demo"):
        from ppo_kernels.demo import sentiment, settings
    import torch

    # The matrices are so small that more threads only wait for each other.
    torch.set_num_threads(min(4, torch.get_num_threads()))
    name = f"sentiment{'-quick' if args.quick else ''}-{args.seed}"
    chosen = settings.QUICK if args.quick else settings.FULL
    sentiment.main(chosen, args.seed, args.out or Path("runs") / name)
    return 0


def _train(args: argparse.Namespace, rest: list[str]) -> int:
    from ppo_kernels import train_settings

    with _needs("train"):
        from ppo_kernels import train
    given = {name: vars(args)[name] for name in train_settings.FIELDS}
    flags = {name: value for name, value in given.items() if value is not None}
    train.run(args.out, args.config, args.resume, flags)
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
