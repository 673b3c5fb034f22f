"""Stages of a long run: shown with a bar and a time, saved when complete, skipped when done."""

import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from ppo_kernels._errors import UserError

Tick = Callable[[str], None]
# Seconds between two lines of progress where no bar can be shown.
LINE_EVERY = 15.0


class Stages:
    """Runs stages in order inside the folder `out`; `infos` keeps what each said about itself."""

    def __init__(self, out: Path, run: dict[str, Any], console: Console) -> None:
        self.out, self.console = out, console
        self.infos: dict[str, dict[str, Any]] = {}
        stamp = out / "run.json"
        if stamp.exists() and json.loads(stamp.read_text()) != run:
            raise UserError(
                f"--out {out} holds a run with another seed or other settings (see {stamp}): "
                "choose another folder, or remove this one"
            )
        out.mkdir(parents=True, exist_ok=True)
        stamp.write_text(json.dumps(run, indent=2))

    def run(
        self,
        name: str,
        steps: int,
        make: Callable[[Tick], tuple[Any, dict[str, Any]]],
        load: Callable[[Path], Any] = lambda folder: None,
    ) -> Any:
        """What the stage made: by load(folder) if its folder is there, else by make(tick).

        make calls tick(text) at each of its `steps`, and returns a model or tokenizer (anything
        with save_pretrained, or None) and a dict for `infos`.
        """
        folder = self.out / name
        if (folder / "info.json").exists():
            self.note(name, json.loads((folder / "info.json").read_text()), "done before")
            return load(folder)
        began = time.perf_counter()
        if self.console.is_terminal:
            with self._bar() as bar:
                task = bar.add_task(name, total=steps, text="")
                result, info = make(lambda text: bar.update(task, advance=1, text=text))
        else:
            result, info = make(self._lines(name, steps))
        info = info | {"seconds": time.perf_counter() - began}
        self._save(folder, result, info)
        self.note(name, info)
        return result

    def note(self, name: str, info: dict[str, Any], when: str | None = None) -> None:
        """Keep what a stage says about itself, and show its time and its numbers."""
        self.infos[name] = info
        numbers = [
            f"{k.replace('_', ' ')} {v:.3f}"
            if isinstance(v, float)
            else f"{k.replace('_', ' ')} {v}"
            for k, v in info.items()
            if k != "seconds" and isinstance(v, (int, float))
        ]
        when = when or f"{info['seconds']:.1f} s"
        self.console.print(f"{name:<11}{when:>12}  {', '.join(numbers)}", highlight=False)

    def _lines(self, name: str, steps: int) -> Tick:
        """A line at the start and every LINE_EVERY seconds: for a file, which shows no bar."""
        self.console.print(f"{name:<11} 0/{steps}", highlight=False)
        done, last = 0, time.perf_counter()

        def tick(text: str) -> None:
            nonlocal done, last
            done, now = done + 1, time.perf_counter()
            if now - last >= LINE_EVERY:
                last = now
                self.console.print(f"{name:<11} {done}/{steps}  {text}", highlight=False)

        return tick

    def _save(self, folder: Path, result: Any, info: dict[str, Any]) -> None:
        """The folder appears at once and complete; a run killed before that repeats the stage."""
        scratch = folder.with_name(f".{folder.name}")
        for old in (scratch, folder):
            shutil.rmtree(old, ignore_errors=True)
        scratch.mkdir()
        if result is not None:
            result.save_pretrained(scratch)
        (scratch / "info.json").write_text(json.dumps(info, indent=2))
        os.replace(scratch, folder)

    def _bar(self) -> Progress:
        return Progress(
            TextColumn("{task.description:<11}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[text]}"),
            console=self.console,
            transient=True,
        )
