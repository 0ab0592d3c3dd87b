"""The environment that a figure was measured in: versions, processor, instruction set and threads."""

from __future__ import annotations

import os
import platform
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import snnk

PACKAGES = (
    *("numpy", "scipy", "transformers", "peft", "accelerate", "scikit-learn", "scikit-image", "onnxruntime"),
    *("openvino", "nncf"),
)
INSTRUCTIONS = {  # names as in /proc/cpuinfo, without underscores
    "AVX2": {"avx2"},
    "AVX-512": {"avx512f"},
    "VNNI": {"avx512vnni", "avxvnni"},
    "AMX": {"amxtile"},
    "bf16": {"avx512bf16", "amxbf16", "bf16"},
    "i8mm": {"i8mm"},
}


def environment() -> dict[str, str]:
    """Return the versions of installed packages, and the processor with the instruction set that torch uses.

    Example:
        >>> sorted({"torch", "processor", "capability"} & environment().keys())
        ['capability', 'processor', 'torch']
    """
    import torch

    found = {name: installed for name in PACKAGES if (installed := version_of(name))}
    return {
        **found,
        "snnk": snnk.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "processor": processor(),
        # ATEN_CPU_CAPABILITY, or the best of the processor. Results of different instruction sets differ by rounding.
        "capability": torch.backends.cpu.get_cpu_capability(),
        "instructions": instructions(),  # of the processor, whatever torch uses
        "threads": str(torch.get_num_threads()),
    }


def instructions() -> str:
    """Return which instruction sets for fast inference the processor has, such as "AVX2, AVX-512, VNNI".

    Example:
        >>> instructions() in ("unknown", "none") or "i8mm" in INSTRUCTIONS
        True
    """
    flags: set[str] = set()
    with suppress(OSError), open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
        line = next((line for line in file if line.startswith(("flags", "Features"))), "")
        flags = set(line.partition(":")[2].split())
    if not flags:
        with suppress(ImportError, OSError, AttributeError):  # a torch that is missing, broken or older
            import torch

            flags = {name for name, there in torch.cpu.get_capabilities().items() if there is True}
    if not flags:
        return "unknown"
    flags = {flag.replace("_", "") for flag in flags}
    return ", ".join(name for name, own in INSTRUCTIONS.items() if own & flags) or "none"


def total_memory() -> int | None:
    """Return the bytes of memory of the machine, or the limit of its container; None if unknown."""
    found = []
    with suppress(OSError, ValueError, AttributeError):  # AttributeError on Windows
        found.append(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    with suppress(OSError, ValueError):  # "max" without a limit
        found.append(int(Path("/sys/fs/cgroup/memory.max").read_text()))
    return min(found, default=None)


def available_memory() -> int | None:
    """Return the bytes that this process may still use, within the limits of its container; None if unknown."""
    found = []
    with suppress(OSError, ValueError, StopIteration), open("/proc/meminfo", encoding="utf-8") as file:
        line = next(line for line in file if line.startswith("MemAvailable:"))
        found.append(int(line.split()[1]) * 1024)
    with suppress(OSError, ValueError):  # "max" without a limit
        most, used = (int(Path("/sys/fs/cgroup", name).read_text()) for name in ("memory.max", "memory.current"))
        found.append(max(0, most - used))
    return min(found, default=None)


def version_of(name: str) -> str:
    """Return the version of an installed package, or "" without it."""
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


def processor() -> str:
    """Return the name of the processor's model, which only Linux has in a file."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
            for line in file:
                if line.startswith(("model name", "Model", "Hardware")):
                    return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
