"""The demo's data: 10,605 movie-review snippets, each with the mean rating of twenty people.

They travel inside the PyPI sdist of vaderSentiment 3.3.2 (Hutto & Gilbert, ICWSM 2014; the
sentences are from Pang & Lee's rotten.tomatoes.com collection). pip fetches the sdist once into
the user's cache; its sha256 is pinned; no text of it is in this repository.

Cleaning: lower case, runs of white space become one space, later copies of a text are dropped.
Split: a permutation with a seed of its own, so that every run, whatever its seed, holds out the
same tenth of the snippets.
"""

import hashlib
import io
import os
import random
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import NamedTuple

from ppo_kernels._errors import UserError

PACKAGE = "vaderSentiment==3.3.2"
SDIST = "vaderSentiment-3.3.2.tar.gz"
SHA256 = "5d7c06e027fc8b99238edb0d53d970cf97066ef97654009890b83703849632f9"
ARCHIVE = "vaderSentiment-3.3.2/additional_resources/hutto_ICWSM_2014.tar.gz"
MEMBER = "hutto_ICWSM_2014/movieReviewSnippets_GroundTruth.txt"
SPLIT_SEED = 20140601
HELD_OUT = 0.1


class Snippet(NamedTuple):
    """One review snippet and its mean human rating in [-4, 4]."""

    text: str
    rating: float


class Split(NamedTuple):
    """Snippets that are trained on, and snippets that nothing is trained on."""

    train: list[Snippet]
    held_out: list[Snippet]


def cache_dir() -> Path:
    """`$XDG_CACHE_HOME/ppo_kernels`, or `~/.cache/ppo_kernels`."""
    root = os.environ.get("XDG_CACHE_HOME")
    return (Path(root) if root else Path.home() / ".cache") / "ppo_kernels"


def load() -> Split:
    """The cleaned snippets in their fixed split; downloads the sdist when it is not cached."""
    return split(clean(parse(_extract(fetch()))))


def fetch() -> Path:
    """Path of the verified sdist in the cache. UserError without network or on a bad sha256."""
    path = cache_dir() / SDIST
    if path.exists() and _sha256(path) == SHA256:
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        command += ["--no-binary", "vaderSentiment", "--dest", scratch, PACKAGE]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        got = Path(scratch) / SDIST
        if done.returncode or not got.exists():
            raise UserError(
                f"could not download the sdist of {PACKAGE}: the demo's data needs PyPI (or a "
                f"mirror that pip is configured for) once. Without network, put {SDIST} at {path}. "
                f"pip said:\n{done.stderr.strip()}"
            )
        if _sha256(got) != SHA256:
            raise UserError(f"{SDIST} has sha256 {_sha256(got)}, expected {SHA256}: not used")
        # Readers see the whole file or none, also when two runs download at once.
        os.replace(got, path)
    return path


def parse(text: str) -> list[Snippet]:
    """Lines `id <tab> rating <tab> text`; ValueError names the line that is not."""
    rows = []
    for number, line in enumerate(text.splitlines(), 1):
        fields = line.split("\t")
        try:
            rows.append(Snippet(fields[2], float(fields[1])))
        except (IndexError, ValueError):
            raise ValueError(f"line {number}: expected id, rating, text, got {line!r}") from None
    return rows


def clean(snippets: list[Snippet]) -> list[Snippet]:
    """Lower case, single spaces, the first of equal texts; empty texts are dropped."""
    first: dict[str, Snippet] = {}
    for text, rating in snippets:
        text = " ".join(text.lower().split())
        if text:
            first.setdefault(text, Snippet(text, rating))
    return list(first.values())


def split(snippets: list[Snippet]) -> Split:
    """A tenth held out, by a permutation that does not depend on the run's seed."""
    order = list(snippets)
    random.Random(SPLIT_SEED).shuffle(order)
    n = round(HELD_OUT * len(order))
    return Split(train=order[n:], held_out=order[:n])


def _extract(sdist: Path) -> str:
    with tarfile.open(sdist) as outer:
        inner = outer.extractfile(ARCHIVE).read()
    with tarfile.open(fileobj=io.BytesIO(inner)) as archive:
        return archive.extractfile(MEMBER).read().decode("utf-8")


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
