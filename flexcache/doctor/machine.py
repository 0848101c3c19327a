"""Checks the kernel, io_uring and the limit of open files."""

from __future__ import annotations

import errno
import os
import platform
import re
import resource
from collections.abc import Iterator

from flexcache.doctor.findings import Finding, error, ok, warning
from flexcache.doctor.subject import Subject
from flexcache.errors import MissingDependencyError
from flexcache.storage.block_io import io_uring_problem

_PIDFD = (5, 3)  # reports the death of a worker
_POPULATE = (5, 14)  # faults in the host pool's pages in advance
_URING = (5, 1)
_FEW_FILES = 4096


def check_kernel(subject: Subject) -> Iterator[Finding]:
    yield judge_kernel(platform.release())


def judge_kernel(release: str) -> Finding:
    version = kernel_version(release)
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


def kernel_version(release: str) -> tuple[int, int]:
    found = re.match(r"(\d+)\.(\d+)", release)
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
    if code == errno.ENOSYS and kernel_version(release) < _URING:
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
