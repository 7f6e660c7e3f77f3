"""The number of compiles that may run at once on this machine, or in this container."""

from __future__ import annotations

import os
from pathlib import Path

#: The most memory that one compile takes: Triton, LLVM and ptxas for the largest tiles.
BYTES_PER_JOB = 1 << 30

_CGROUP = Path("/sys/fs/cgroup")


def available_cores() -> int:
    """Return the cores that this process may use: its affinity, and the quota of its control group."""
    try:
        cores = len(os.sched_getaffinity(0))
    except AttributeError:  # not on Linux
        cores = os.cpu_count() or 1
    quota = _words(_CGROUP / "cpu.max")
    if len(quota) == 2 and quota[0] != "max":
        cores = min(cores, max(1, int(quota[0]) // int(quota[1])))
    return cores


def available_bytes() -> int | None:
    """Bytes that can be allocated without swapping, or None where the system does not say."""
    limits = []
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                limits.append(1024 * int(line.split()[1]))
    except OSError:
        pass
    limit, used = _words(_CGROUP / "memory.max"), _words(_CGROUP / "memory.current")
    if limit and used and limit[0] != "max":
        limits.append(max(0, int(limit[0]) - int(used[0])))
    return min(limits, default=None)


def job_limit(requested: int | None = None) -> int:
    """Number of jobs to run at once: as requested, or one per core, as far as memory suffices."""
    jobs = requested if requested is not None else available_cores()
    memory = available_bytes()
    if memory is not None:
        jobs = min(jobs, memory // BYTES_PER_JOB)
    return max(1, jobs)


def _words(path: Path) -> list[str]:
    try:
        return path.read_text().split()
    except OSError:
        return []
