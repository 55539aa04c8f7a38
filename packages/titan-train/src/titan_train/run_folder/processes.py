"""Which process owns something: told apart from processes of other boots, containers and hosts, and from a reused number."""

import platform
import time
from pathlib import Path


def process_place() -> str:
    """Where process numbers mean what they mean here: this boot of this kernel, and this process namespace."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{platform.node()} {boot} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return platform.node()


def process_start(pid: int) -> str:
    """When a process started, in the kernel's ticks; empty if there is no such process, or only its exit code is left."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] == "Z" else fields[19]


def before_this_boot(touched: float, now: float) -> bool:
    """Whether a file that was touched then is older than this machine's start; both in Unix seconds of one clock."""
    return touched < now - time.clock_gettime(time.CLOCK_BOOTTIME)
