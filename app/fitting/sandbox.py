"""What a worker gives up before its first task: rights, the network, files of the service and processes.

The kernel holds it to that, whatever a file makes of the libraries that read it. A host may forbid parts.
"""

from __future__ import annotations

import ctypes
import os
import platform
import re
import struct
import sys
from collections.abc import Callable, Iterable, Mapping
from errno import ENOSYS, EPERM
from pathlib import Path

import boxcal

NO_NEW_PRIVILEGES = 38
"""Of `prctl`: no program that this process starts has more rights than it."""
NAMESPACES = 0x10000000 | 0x40000000
"""Of `unshare`, CLONE_NEWUSER and CLONE_NEWNET: no network, and no look into processes of the service."""

# Landlock (Linux 5.13): the numbers of its calls on every processor, and its rights by linux/landlock.h
CREATE, ADD, RESTRICT = 444, 445, 446
READ = 1 << 2 | 1 << 3  # files, and the names in folders
CHANGE = 1 << 1 | 1 << 4 | 1 << 5 | 1 << 7 | 1 << 8 | 1 << 13 | 1 << 14  # write, remove, make, move, truncate
RIGHTS = {1: 13, 2: 14, 3: 15, 5: 16}
"""How many rights on files there are from a version on."""
OF_FILES = 1 | 1 << 1 | 1 << 2 | 1 << 14
TCP_FROM, SCOPES_FROM = 4, 6
"""Versions from which connections, and then signals and abstract sockets, can be forbidden; two bits each."""
SYSTEM = (
    *("/usr", "/lib", "/lib64", "/nix/store", "/etc/ld.so.cache", "/etc/localtime", "/dev/null"),
    *(
        "/dev/urandom",
        "/proc/self",
        "/proc/cpuinfo",
        "/proc/meminfo",
        "/proc/stat",
        "/sys/devices/system/cpu",
    ),
)

MACHINES = {"x86_64": (0xC000003E, 317, 56), "aarch64": (0xC00000B7, 277, 220)}
"""By processor: its name in filters, and the numbers of `seccomp` and `clone`."""
CLONE3, CLONE_THREAD, OTHER_NUMBERING = 435, 0x10000, 0x40000000
FORBIDDEN = {
    # fork, vfork, execve, execveat, kill, ptrace, process_vm_readv and _writev, socket, connect, socketpair,
    # bind; unshare, setns, mount, bpf, perf_event_open, userfaultfd, add_key, request_key, keyctl
    "x86_64": (
        *(57, 58, 59, 322, 62, 101, 310, 311, 41, 42, 53, 49),
        *(272, 308, 165, 321, 298, 323, 248, 249, 250),
    ),
    "aarch64": (  # which has no fork and vfork
        *(221, 281, 129, 117, 270, 271, 198, 203, 199, 200),
        *(97, 268, 40, 280, 241, 282, 217, 218, 219),
    ),
}
FORBIDDEN_ANYWHERE = (424, 425, 434, 438)  # pidfd_send_signal, io_uring_setup, pidfd_open, pidfd_getfd


def enter_sandbox(folder: Path | None = None, readable: Iterable[Path] = ()) -> list[str]:
    """Give up what a worker does not need; return what this host does not allow.

    Called while the process has one thread. With a `folder`, which must outlast the process, no other can be
    written, only that, the `readable` ones and the libraries can be read, and no process can be started.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    steps: list[tuple[str, Callable[[], int]]] = [
        ("no_new_privs", lambda: libc.prctl(NO_NEW_PRIVILEGES, 1, 0, 0, 0)),
        ("namespaces of users and networks", lambda: libc.unshare(NAMESPACES)),
    ]
    if folder is not None:
        steps.append(("Landlock", lambda: _restrict_files(libc, folder, readable)))
        steps.append(("seccomp", lambda: _restrict_calls(libc)))
    return [f"{name}: {os.strerror(ctypes.get_errno())}" for name, step in steps if step()]


def _restrict_files(libc: ctypes.CDLL, folder: Path, more: Iterable[Path]) -> int:
    """Allow only files below a folder, and to read more folders and libraries; -1 where this fails."""
    version = libc.syscall(CREATE, None, 0, 1)
    if version < 0:
        return -1
    all_rights = (1 << max(count for since, count in RIGHTS.items() if since <= version)) - 1
    fields = [all_rights]
    fields += [3] * (version >= TCP_FROM)
    fields += [3] * (version >= SCOPES_FROM)
    rules = struct.pack(f"={len(fields)}Q", *fields)
    ruleset = libc.syscall(CREATE, rules, ctypes.c_size_t(len(rules)), 0)
    if ruleset < 0:
        return -1
    readable = {*more, *map(Path, (*SYSTEM, sys.prefix, sys.base_prefix))}
    readable |= {Path(path) for path in sys.path if Path(path).name in {"site-packages", "dist-packages"}}
    # Not what is beside the package: in a checkout, these may be the files of the service.
    package = Path(boxcal.__file__).parent
    readable |= {package, *(package / name for name in ("app", "calibrators", "models"))}
    allowed = dict.fromkeys(readable, READ) | {folder: READ | CHANGE, Path("/dev/null"): READ | CHANGE}
    for path, rights in allowed.items():
        if not path.exists():
            continue
        place = os.open(path, os.O_PATH | os.O_CLOEXEC)
        applicable = rights & all_rights & (~0 if path.is_dir() else OF_FILES)
        failed = libc.syscall(ADD, ruleset, 1, struct.pack("=Qi", applicable, place), 0)
        os.close(place)
        if failed:
            return -1
    failed = libc.syscall(RESTRICT, ruleset, 0)
    os.close(ruleset)
    return int(failed)


def _restrict_calls(libc: ctypes.CDLL) -> int:
    """Forbid the calls that start processes, reach into others, or open sockets; -1 where this fails."""
    machine = platform.machine()
    if machine not in MACHINES:
        ctypes.set_errno(ENOSYS)
        return -1
    architecture, seccomp, clone = MACHINES[machine]
    allow, refuse, unknown = 0x7FFF0000, 0x00050000 | EPERM, 0x00050000 | ENOSYS
    load, equal, at_least, has_bits, answer = 0x20, 0x15, 0x35, 0x45, 0x06
    # Each instruction: operation, how many to skip if it holds and if not, operand. A filter sees the number
    # of the call at 0, the processor at 4, and the first argument at 16.
    program = [
        (load, 0, 0, 4),
        (equal, 1, 0, architecture),
        (answer, 0, 0, refuse),
        (load, 0, 0, 0),
        (at_least, 0, 1, OTHER_NUMBERING),
        (answer, 0, 0, refuse),
        (equal, 0, 1, CLONE3),  # Its flags lie in memory, unseen by a filter; libraries try `clone` next.
        (answer, 0, 0, unknown),
    ]
    for number in (*FORBIDDEN[machine], *FORBIDDEN_ANYWHERE):
        program += [(equal, 0, 1, number), (answer, 0, 0, refuse)]
    program += [
        (equal, 0, 3, clone),
        (load, 0, 0, 16),
        (has_bits, 1, 0, CLONE_THREAD),
        (answer, 0, 0, refuse),
        (answer, 0, 0, allow),
    ]
    code = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *one) for one in program))
    header = struct.pack("@HP", len(program), ctypes.addressof(code))
    with_log = 2  # what is refused is written to the kernel's audit log
    return int(libc.syscall(seccomp, 1, with_log, header))


INHERITED = re.compile(
    r"(PATH|HOME|USER|TZ|TMPDIR|LANG|LC_.*|SSL_CERT_.*|XDG_.*|LD_.*|MALLOC_.*|GLIBC_TUNABLES|PYTHON.*|"
    r"(NUMBA|OMP|OPENBLAS|MKL|KMP|ARROW|CUDA|NVIDIA|TORCH|PYTORCH|ORT|HF|TRANSFORMERS)_.*)"
)
SECRET = re.compile(r"TOKEN|SECRET|PASS|CREDENTIAL|_KEY")


def inherited(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the part of an environment that a worker gets: what libraries read, and nothing secret.

    It finds modules where this process does.
    """
    kept = {
        name: value
        for name, value in environment.items()
        if INHERITED.fullmatch(name) and not SECRET.search(name)
    }
    return kept | {"PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)}
