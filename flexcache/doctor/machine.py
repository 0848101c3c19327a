"""Kernel, io_uring, limits and memory of this machine.

The DRAM tier is an anonymous file in memory (memfd). It counts as the process's memory, also
against a container's limit, but not against the size of /dev/shm, which other parts of an engine
use.
"""

from __future__ import annotations

import errno
import os
import platform
import re
import resource
from collections.abc import Iterator, Sequence

from flexcache.config.remote_url import check_remote_url
from flexcache.doctor.subject import Finding, Subject, error, in_gb, ok, warning
from flexcache.errors import MissingDependencyError
from flexcache.storage import machine
from flexcache.storage.block_io import io_uring_problem
from flexcache.storage.host_pool import HostSegment
from flexcache.storage.machine import memory_limits

_PIDFD = (5, 3)  # reports the death of a worker
_POPULATE = (5, 14)  # faults in the host pool's pages in advance
_URING = (5, 1)
_FEW_FILES = 4096


def check_kernel(subject: Subject) -> Iterator[Finding]:
    yield judge_kernel(platform.release())


def judge_kernel(release: str) -> Finding:
    version = first_two(release)
    if version < _PIDFD:
        return error(
            f"kernel {release}: processes cannot be watched (pidfd)", "use Linux 5.3 or later"
        )
    if version < _POPULATE:
        return warning(
            f"kernel {release}: the DRAM tier's pages are faulted in at first use, which is slower",
            "use Linux 5.14 or later",
        )
    return ok(f"kernel {release}")


def first_two(version: str) -> tuple[int, int]:
    """Return the first two numbers of a version; (0, 0) if it does not begin with numbers."""
    found = re.match(r"(\d+)\.(\d+)", version)
    return (int(found[1]), int(found[2])) if found else (0, 0)


def check_io_uring(subject: Subject) -> Iterator[Finding]:
    engine = "auto" if subject.config is None else subject.config.io_engine
    if engine == "threads":
        yield ok("io_uring is not requested (io_engine = 'threads')")
        return
    problem = io_uring_problem()
    if problem is None:
        yield ok("io_uring works")
        return
    why, remedy = explain_io_uring(
        problem,
        sysctl=subject.read("/proc/sys/kernel/io_uring_disabled"),
        is_filtered=bool(re.search(r"^Seccomp:\s*2", subject.read("/proc/self/status"), re.M)),
        release=platform.release(),
    )
    if engine == "io_uring":
        yield error(f"no io_uring, which io_engine requires: {why}", remedy)
    else:
        yield warning(f"no io_uring, I/O runs on threads instead: {why}", remedy)


def explain_io_uring(
    problem: str, *, sysctl: str, is_filtered: bool, release: str
) -> tuple[str, str]:
    """Return why io_uring does not work, and what to do.

    Args:
        problem: The error of an attempt to use it.
        sysctl: Value of ``kernel.io_uring_disabled``; "" if there is none.
        is_filtered: Whether this process has a seccomp filter.
        release: Kernel release.
    """
    if problem.startswith(MissingDependencyError.__module__):
        return problem.partition(": ")[2], "pip install '.[uring]'"
    if "dies by" in problem:
        why, _, remedy = problem.partition("; ")
        return why, f"pip install {remedy.split(' ')[0]}"
    number = re.search(r"\[Errno (\d+)\]", problem)
    code = int(number[1]) if number else 0
    if code == errno.ENOSYS and first_two(release) < _URING:
        return f"kernel {release} is too old", "use Linux 5.1 or later"
    if code in (errno.EPERM, errno.EACCES, errno.ENOSYS):
        if sysctl in ("1", "2"):
            return (
                f"kernel.io_uring_disabled is {sysctl}",
                "on the host: sysctl -w kernel.io_uring_disabled=0"
                + (", or add the user to the group kernel.io_uring_group" * (sysctl == "1")),
            )
        if is_filtered:
            return (
                f"a seccomp filter forbids it, as container defaults do ({os.strerror(code)})",
                "allow io_uring_setup, io_uring_enter and io_uring_register: docker run "
                "--security-opt seccomp=PROFILE.json (or unconfined); Kubernetes: "
                "securityContext.seccompProfile of type Localhost (or Unconfined)",
            )
    if code == errno.ENOMEM:
        return (
            "no memory may be locked for its rings (they count before Linux 5.12)",
            "raise the limit: ulimit -l, docker run --ulimit memlock=-1",
        )
    return problem, "check the kernel log and the container's security profile"


def check_open_files(subject: Subject) -> Iterator[Finding]:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= hard < _FEW_FILES:
        yield warning(
            f"at most {hard:,} files may be open: a server runs out with many clients",
            "raise the limit: ulimit -n 65536, LimitNOFILE=, docker run --ulimit nofile=65536",
        )
    else:
        yield ok("any number of files may be open" if hard < 0 else f"{hard:,} files may be open")


_MUCH_OF_LIMIT = 0.8
_ASKS_FOR_HUGE_PAGES = (6, 1)
_PEER_CHUNKS = 16  # of bounce memory of the peer worker
_RDMA_BYTES = 128 << 20  # bounce memory, for blocks of up to 20 MiB, and the client's own buffer
_SCRATCH_BYTES = 1 << 16
_MIN_SHARED_BYTES = 1_000_000_000
"""Room for vLLM's queues between its processes (240 MiB each) and for NCCL, with a margin."""


def check_memory(subject: Subject) -> Iterator[Finding]:
    pool = subject.pool_bytes
    fields = dict(re.findall(r"(\w+):\s+(\d+) kB", subject.read("/proc/meminfo")))
    total, free = (int(fields.get(key, 0)) * 1024 for key in ("MemTotal", "MemAvailable"))
    there_is = f"{in_gb(total)} of memory, {in_gb(free)} available"
    if not total:
        yield warning("/proc/meminfo does not show how much memory there is", "mount /proc")
    elif pool is None:
        yield ok(there_is)
    elif pool > total:
        yield error(f"{there_is}: the DRAM tier takes {in_gb(pool)}", "lower cpu_cache_gb")
    elif _is_reserved(subject):  # so not part of the available memory
        yield ok(f"{there_is}; the DRAM tier takes reserved huge pages")
    elif pool > free and not subject.is_served:  # a running server's pool is not available memory
        yield warning(
            f"{there_is}: the DRAM tier takes {in_gb(pool)}",
            "lower cpu_cache_gb, or stop what uses the memory: the kernel would kill some process",
        )
    else:
        yield ok(f"{there_is}; the DRAM tier takes {in_gb(pool)}")


def check_container_limit(subject: Subject) -> Iterator[Finding]:
    limits = memory_limits(subject.root)
    if not limits:
        yield ok("no memory limit by a container or control group")
        return
    limit = min(found.limit for found in limits)
    pool = 0 if _is_reserved(subject) else subject.pool_bytes or 0
    text = f"a control group limits memory to {in_gb(limit)}"
    if pool:
        text += f"; the DRAM tier takes {in_gb(pool)} of it"
    remedy = (
        "lower cpu_cache_gb, or raise the limit (docker run --memory; Kubernetes: "
        "resources.limits.memory): the DRAM tier counts in addition to the engine's own memory"
    )
    if pool > limit:
        yield error(text, remedy)
    elif pool > _MUCH_OF_LIMIT * limit:
        yield warning(text, remedy)
    else:
        yield ok(text)


def check_shared_memory(subject: Subject) -> Iterator[Finding]:
    try:
        found = os.statvfs(subject.root / "dev/shm")
    except OSError as failure:
        yield warning(
            f"no /dev/shm: {failure.strerror}", "mount one: docker run --shm-size=8g; vLLM needs it"
        )
        return
    size, free = found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize
    text = f"/dev/shm: {in_gb(free)} of {in_gb(size)} free"
    if free < _MIN_SHARED_BYTES:
        yield warning(
            f"{text}: too small for vLLM with several workers, and for NCCL (the DRAM tier does "
            "not use it)",
            "docker run --shm-size=8g (or --ipc=host); Kubernetes: an emptyDir with medium: Memory "
            "mounted on /dev/shm; elsewhere: mount -o remount,size=8g /dev/shm",
        )
    else:
        yield ok(f"{text}; the DRAM tier does not use it")


def check_locked_memory(subject: Subject) -> Iterator[Finding]:
    """Check the limit of locked memory, against which RDMA's registration of memory counts.

    Copies on a CPU lock nothing, nor does io_uring as used here since Linux 5.12, and a GPU's
    driver pins outside this limit.
    """
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY:
        yield ok("any amount of memory may be locked")
        return
    text = f"{in_gb(soft)} of memory may be locked"
    if soft < (needed := _rdma_bytes(subject)):
        yield warning(
            f"{text}: RDMA pins {in_gb(needed)}, and may fail",
            "raise the limit: ulimit -l unlimited, LimitMEMLOCK=infinity, docker run --ulimit "
            "memlock=-1",
        )
    else:
        yield ok(f"{text}; nothing here needs more")


def _rdma_bytes(subject: Subject) -> int:
    """Return how much is registered: about that, by the remote store's client besides its segment
    and by the peer worker."""
    config = subject.config
    if config is None:
        return 0
    options = {} if config.remote_url is None else check_remote_url(config.remote_url).options
    num_bytes = 0
    if options.get("protocol") == "rdma":
        num_bytes += _RDMA_BYTES + int(float(options.get("segment_gb", "0")) * 1e9)
    if config.has_peers and config.rdma_devices is not None:
        num_bytes += int(_PEER_CHUNKS * config.transfer_chunk_mb * 1e6)
    return num_bytes


def check_huge_pages(subject: Subject) -> Iterator[Finding]:
    if _is_reserved(subject):
        yield from _check_reserved(subject, subject.pool_bytes)
        return
    chosen = re.search(
        r"\[(\w+)\]", subject.read("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
    )
    kernel = first_two(subject.read("/proc/sys/kernel/osrelease"))
    if chosen is not None and chosen[1] in ("always", "within_size", "advise", "force"):
        yield ok(f"huge pages: shared memory gets them (shmem_enabled is {chosen[1]})")
    elif chosen is not None and chosen[1] == "never" and kernel >= _ASKS_FOR_HUGE_PAGES:
        yield ok("huge pages: the DRAM tier asks for them as it is filled")
    else:
        yield ok(
            "huge pages: none for shared memory; SSD I/O is faster with hugepages = 'reserved', "
            "or with `advise` in /sys/kernel/mm/transparent_hugepage/shmem_enabled"
        )


def _is_reserved(subject: Subject) -> bool:
    """Return whether the DRAM tier uses reserved huge pages, which control groups do not count."""
    return subject.config is not None and subject.config.hugepages == "reserved"


def _check_reserved(subject: Subject, pool: int | None) -> Iterator[Finding]:
    fields: Sequence[tuple[str, str]] = re.findall(
        r"(HugePages_Free|Hugepagesize):\s+(\d+)", subject.read("/proc/meminfo")
    )
    values = {key: int(value) for key, value in fields}
    num_free, page_bytes = values.get("HugePages_Free", 0), values.get("Hugepagesize", 2048) * 1024
    text = f"huge pages: {num_free:,} of {page_bytes >> 10:,} KiB are free"
    if pool is None:
        yield ok(text)
        return
    num_wanted = -(-pool // page_bytes)
    if num_free < num_wanted and not subject.is_served:
        yield error(
            f"{text}; the DRAM tier takes {num_wanted:,}",
            f"sysctl -w vm.nr_hugepages={num_wanted} (Kubernetes: resources.limits.hugepages-2Mi), "
            "or set hugepages to 'transparent'",
        )
    else:
        yield ok(f"{text}; the DRAM tier takes {num_wanted:,}")


def check_numa(subject: Subject) -> Iterator[Finding]:
    """Check whether memory can be had near a GPU."""
    refusal = ""
    if machine.count_nodes() > 1:
        with HostSegment.create(_SCRATCH_BYTES, 1) as segment:
            segment.map(populate=False)
            refusal = machine.prefer_node(segment.address, segment.size, 0)
    yield judge_numa(machine.count_nodes(), refusal)


def judge_numa(num_nodes: int, refusal: str) -> Finding:
    if num_nodes == 1:
        return ok("one NUMA node: all memory is equally near")
    if refusal:
        return warning(
            f"{num_nodes} NUMA nodes, and memory cannot be bound to one: {refusal}. A rank still "
            "makes its part of the DRAM tier from CPUs of its GPU's node, if it may run there",
            "docker run --cap-add SYS_NICE; do not keep the engine off the CPUs of its GPUs' nodes",
        )
    return ok(f"{num_nodes} NUMA nodes; a rank's part of the DRAM tier is on its GPU's node")
