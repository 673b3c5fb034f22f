"""What the numbers were measured on: it stands at the head of every result."""

import os
import subprocess
import sys
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[1]
PACKAGES = ("torch", "triton", "transformers", "trl", "liger-kernel", "cut-cross-entropy")
PACKAGES += ("torchrl", "verl", "openrlhf", "quack-kernels", "flash-attn", "pufferlib-core")


def describe(device: torch.device) -> dict[str, Any]:
    return {
        "device": device.type,
        "machine": _hardware(device),
        "versions": _versions(),
        "commit": commit(),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }


def _hardware(device: torch.device) -> dict[str, Any]:
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        memory = torch.cuda.get_device_properties(device).total_memory
    else:
        info = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
        models = [line.split(":")[1].strip() for line in info.splitlines() if "model name" in line]
        name = models[0] if models else "unknown CPU"
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {"device": name, "cores": os.cpu_count(), "memory": f"{memory / 2**30:.0f} GiB"}


def _versions() -> dict[str, str]:
    found = {"python": sys.version.split()[0]}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def is_of_this_commit(result: dict[str, Any]) -> bool:
    now = commit()
    return result["commit"] == now and now != "unknown" and "+" not in now


def commit() -> str:
    """The commit of this checkout, marked when files differ from it; results do not count."""

    def git(*args: str) -> str:
        command = ["git", "-C", str(ROOT), *args]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        changed = git("status", "--porcelain", "--", ".", ":!bench/results")
        return git("rev-parse", "--short", "HEAD") + ("+changes" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
