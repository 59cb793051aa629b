"""The server process of the sandbox: forks a confined child for each program. A script of the standard library alone.

`sandbox.py` starts it by its path. It reads requests as JSON lines from standard input and writes an answer for each to
standard output. A child has these layers, each tried and recorded by `probe`:

user               as root the server first becomes nobody; a child has no capabilities
user_namespace     user, network and IPC namespaces of its own: no network interface that is up
landlock           reads only the standard library and the system's shared libraries; writes nothing, anywhere
seccomp            an allow-list of system calls; EPERM for others, and for opening files other than for reading; SIGSYS
                   for processes, signals, sockets, tracing
limits             CPU time, address space, size of files (0), open files, no core; the server kills at the time limit

No child writes files, so that none can fill a disk. Landlock before version 3 (Linux 6.2) lets a program empty a file
that it may read; seccomp refuses this too, from the flags of open and openat. Threads are processes to the kernel, so
there are none either.
"""

from __future__ import annotations

import ast
import ctypes
import errno
import importlib
import json
import math
import os
import platform
import resource
import select
import signal
import struct
import sys
import sysconfig
import time
from typing import Any

NOBODY = 65534
REPORT = 3  # the file descriptor by which a child reports
REPORT_BYTES = 4096
# Modules that programs import: after the change of user their files may not be readable.
MODULES = """abc array ast base64 binascii bisect builtins calendar cmath codecs collections collections.abc colorsys
contextlib copy csv ctypes dataclasses datetime decimal difflib encodings.ascii encodings.idna encodings.latin_1
encodings.utf_16 encodings.utf_8 enum fractions functools gc hashlib heapq hmac html inspect io itertools json keyword
linecache locale math numbers operator os pathlib pprint queue random re secrets shutil signal socket statistics string
struct subprocess sys tempfile textwrap threading time timeit traceback types typing unicodedata unittest uuid warnings
weakref zlib"""

# System calls by machine, numbers of asm/unistd.h. Allowed: read write close fstat lseek mmap mprotect munmap brk
# rt_sigaction rt_sigprocmask rt_sigreturn pread64 readv writev mremap madvise dup nanosleep getpid exit getcwd
# gettimeofday sysinfo getuid getgid geteuid getegid getppid sigaltstack gettid futex sched_getaffinity getdents64
# clock_gettime clock_getres clock_nanosleep exit_group newfstatat readlinkat set_robust_list getrandom statx
# rseq faccessat faccessat2 uname. With conditions: open openat tgkill prlimit64 fcntl. Not creat, openat2, truncate and
# ftruncate.
MACHINES: dict[str, dict[str, Any]] = {
    "x86_64": {
        "arch": 0xC000003E,
        "allowed": [
            *(0, 1, 3, 5, 8, 9, 10, 11, 12, 13, 14, 15, 17, 19, 20, 25, 28, 32, 35, 39, 60, 79, 96, 99, 102, 104, 107),
            *(108, 110, 131, 186, 202, 204, 217, 228, 229, 230, 231, 262, 267, 273, 318, 332, 334, 269, 439, 63),
            # Older ones without a directory or with narrower arguments: stat lstat poll access select getrlimit dup2
            # readlink arch_prctl time
            *(4, 6, 7, 21, 23, 97, 33, 89, 158, 201),
        ],
        # fork vfork clone clone3 execve execveat ptrace kill tkill rt_sigqueueinfo rt_tgsigqueueinfo pidfd_open
        # pidfd_send_signal process_vm_readv process_vm_writev socket socketpair connect bind mount umount2 unshare
        # setns bpf keyctl io_uring_setup userfaultfd perf_event_open chroot pivot_root reboot kexec_load init_module
        # finit_module
        "killed": [
            *(57, 58, 56, 435, 59, 322, 101, 62, 200, 129, 297, 434, 424, 310, 311, 41, 53, 42, 49, 165, 166, 272, 308),
            *(321, 250, 425, 323, 298, 161, 155, 169, 246, 175, 313),
        ],
        "opens": {2: 1, 257: 2},  # open, openat: which argument has the flags
        "tgkill": 234,
        "prlimit64": 302,
        "fcntl": 72,
    },
    "aarch64": {
        "arch": 0xC00000B7,
        "allowed": [
            *(63, 64, 57, 80, 62, 222, 226, 215, 214, 134, 135, 139, 67, 65, 66, 216, 233, 23, 101, 172, 93, 17, 169),
            *(179, 174, 176, 175, 177, 173, 132, 178, 98, 123, 61, 113, 114, 115, 94, 79, 78, 99, 278, 291, 293, 48),
            *(439, 160),
            *(24, 72, 73),  # dup3 pselect6 ppoll
        ],
        "killed": [
            *(
                220,
                435,
                221,
                281,
                117,
                129,
                130,
                138,
                240,
                434,
                424,
                270,
                271,
                198,
                199,
                203,
                200,
                40,
                39,
                97,
                268,
                280,
            ),
            *(219, 425, 282, 241, 51, 41, 142, 104, 105, 273),
        ],
        "opens": {56: 2},
        "tgkill": 131,
        "prlimit64": 261,
        "fcntl": 25,
    },
}
ALLOW, KILL, EPERM = 0x7FFF0000, 0x80000000, 0x00050000 | errno.EPERM  # SECCOMP_RET_*, linux/seccomp.h
FCNTL = (0, 1, 2, 3, 1030)  # F_DUPFD, F_GETFD, F_SETFD, F_GETFL, F_DUPFD_CLOEXEC; F_SETOWN could signal other processes
# Flags with which open changes a file: O_WRONLY, O_RDWR (O_TMPFILE needs one of them), O_CREAT, O_TRUNC.
CHANGES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
# BPF: ld [k], jeq k, jge k, jset k, ret k
LOAD, EQUAL, AT_LEAST, ANY_BIT, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
NEW_USER, NEW_NET, NEW_IPC = 0x10000000, 0x40000000, 0x08000000  # linux/sched.h
READ_FILE, READ_DIR = 1 << 2, 1 << 3  # linux/landlock.h
# Bits of access rights by version of Landlock: 1 has 13, refer (2), truncate (3), device ioctl (5).
ACCESS_BITS = {1: 13, 2: 14, 3: 15, 4: 15, 5: 16}

libc = ctypes.CDLL(None, use_errno=True)


def call(name: str, *arguments: Any) -> int:
    """Calls a function of libc. Raises OSError."""
    result = int(getattr(libc, name)(*arguments))
    if result < 0:
        raise OSError(ctypes.get_errno(), f"{name}: {os.strerror(ctypes.get_errno())}")
    return result


def readable_folders() -> list[str]:
    """What a program may read: the standard library and the shared libraries."""
    library = {sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"), f"{sys.base_prefix}/lib"}
    return sorted(path for path in {*library, "/lib", "/lib64", "/usr/lib", "/usr/lib64"} if os.path.isdir(path))


def become_nobody() -> str:
    """As root, becomes nobody; returns a description of the user."""
    if os.geteuid() != 0:
        return f"user {os.geteuid()}"
    os.setgroups([])
    os.setresgid(NOBODY, NOBODY, NOBODY)
    os.setresuid(NOBODY, NOBODY, NOBODY)
    return "nobody, since it was started as root"


def new_namespaces() -> None:
    """User, network and IPC namespaces. Raises OSError where the kernel refuses them."""
    call("unshare", NEW_USER | NEW_NET | NEW_IPC)


def drop_capabilities() -> None:
    """Capabilities, also those of a new user namespace."""
    header = struct.pack("Ii", 0x20080522, 0)  # _LINUX_CAPABILITY_VERSION_3, this process
    call("capset", ctypes.create_string_buffer(header), ctypes.create_string_buffer(24))


def landlock_version() -> int:
    """The version of Landlock (its ABI) of this kernel. Raises OSError without Landlock."""
    return call("syscall", 444, None, 0, 1)


def restrict_files(folders: list[int]) -> None:
    """Landlock: reading below open folders, nothing else; no TCP, no abstract sockets or signals to other processes."""
    version = landlock_version()
    bits = ACCESS_BITS.get(version, 16)
    attributes = struct.pack("QQQ", (1 << bits) - 1, 3 if version >= 4 else 0, 3 if version >= 6 else 0)
    size = 24 if version >= 6 else 16 if version >= 4 else 8
    ruleset = call("syscall", 444, ctypes.create_string_buffer(attributes, 24), size, 0)
    for folder in folders:
        rule = ctypes.create_string_buffer(struct.pack("=Qi", READ_FILE | READ_DIR, folder))
        call("syscall", 445, ruleset, 1, rule, 0)
    call("syscall", 446, ruleset, 0)
    os.close(ruleset)


def restrict_calls() -> None:
    """seccomp: the allow-list. Raises OSError, also for a machine without a table."""
    table = MACHINES.get(platform.machine())
    if table is None:
        raise OSError(errno.ENOSYS, f"there is no table of system calls for {platform.machine()}")

    def when(number: int, *then: tuple[int, int, int, int]) -> list[tuple[int, int, int, int]]:
        return [(EQUAL, 0, len(then), number), *then]

    def end(action: int) -> tuple[int, int, int, int]:
        return RETURN, 0, 0, action

    program = [(LOAD, 0, 0, 4), (EQUAL, 1, 0, table["arch"]), end(KILL), (LOAD, 0, 0, 0)]
    program += [(AT_LEAST, 0, 1, 0x40000000), end(KILL)]  # x32: the same calls with other numbers
    for number in table["allowed"]:
        program += when(number, end(ALLOW))
    for number in table["killed"]:
        program += when(number, end(KILL))
    for number, argument in table["opens"].items():  # the kernel takes 32 bits of the flags
        program += when(number, (LOAD, 0, 0, 16 + 8 * argument), (ANY_BIT, 1, 0, CHANGES), end(ALLOW), end(EPERM))
    own = os.getpid()
    program += when(table["tgkill"], (LOAD, 0, 0, 16), (EQUAL, 0, 1, own), end(ALLOW), end(KILL))
    program += when(table["prlimit64"], (LOAD, 0, 0, 16), (EQUAL, 0, 1, 0), end(ALLOW), end(EPERM))
    commands = [step for command in FCNTL for step in ((EQUAL, 0, 1, command), end(ALLOW))]
    program += when(table["fcntl"], (LOAD, 0, 0, 24), *commands, end(EPERM))
    program.append(end(EPERM))
    code = b"".join(struct.pack("HBBI", *step) for step in program)
    filters = ctypes.create_string_buffer(code, len(code))
    description = struct.pack("HxxxxxxP", len(program), ctypes.addressof(filters))
    call("prctl", 22, 2, ctypes.create_string_buffer(description), 0, 0)  # PR_SET_SECCOMP, SECCOMP_MODE_FILTER


def limit(seconds: float, megabytes: int) -> None:
    """Resource limits of this process."""
    cpu = math.ceil(seconds) + 1
    for which, most in (
        (resource.RLIMIT_CPU, cpu),
        (resource.RLIMIT_AS, megabytes << 20),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_NOFILE, 32),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_NPROC, 64),  # binds where seccomp was left out; never root
    ):
        hard = resource.getrlimit(which)[1]
        value = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(which, (value, value))


def confine(layers: set[str], folders: list[int], seconds: float, megabytes: int) -> None:
    """Puts this process into the given layers. The last one forbids what the others need."""
    call("prctl", 1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG
    call("prctl", 38, 1, 0, 0, 0)  # PR_SET_NO_NEW_PRIVS
    if "user_namespace" in layers:
        new_namespaces()
    drop_capabilities()
    limit(seconds, megabytes)
    if "landlock" in layers:
        restrict_files(folders)
    os.closerange(REPORT + 1, 4096)
    if "seccomp" in layers:
        restrict_calls()


def has_body(source: str) -> bool:
    """Whether the last function of a module has a statement besides its docstring and pass."""
    functions = [node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    body = functions[-1].body if functions else []
    return any(
        not isinstance(node, ast.Pass) and not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))
        for node in body
    )


def work(kind: str, source: str, token: str) -> str:
    """Runs or compiles a program in this process; returns the report of its end. Raises what the program raises."""
    code = compile(source, "program", "exec", dont_inherit=True)
    if kind == "compile":
        return token if has_body(source) else "failed the function has no statement besides pass"
    exec(code, {"__name__": "__main__"})
    return token


def described(error: BaseException) -> str:
    """The report of an exception of a program. Its first word is the outcome."""
    if isinstance(error, MemoryError):
        return "memory"
    forbidden = isinstance(error, OSError) and error.errno in (errno.EPERM, errno.EACCES, errno.EFBIG)
    return f"{'forbidden' if forbidden else 'failed'} {type(error).__name__}: {error}"


def in_child(request: dict[str, Any], layers: set[str], folders: list[int], report: int) -> None:
    """The child: never returns."""
    status = 1
    try:
        null = os.open(os.devnull, os.O_RDWR)
        os.dup2(report, 100)
        for descriptor in (0, 1, 2):
            os.dup2(null, descriptor)
        moved = [os.dup2(folder, 110 + number) for number, folder in enumerate(folders)]
        os.dup2(100, REPORT)
        os.setsid()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGPIPE, signal.SIGXFSZ):
            signal.signal(number, signal.SIG_DFL)
        token, text = request["token"], ""
        confine(layers, moved, request["seconds"], request["megabytes"])
        try:
            text = work(request["kind"], request["source"], token)
        finally:  # not `except`: sys.exit and KeyboardInterrupt too mean that the program has not come to its end
            error = sys.exc_info()[1]
            os.write(REPORT, (text if error is None else described(error)).encode("utf-8", "replace")[:REPORT_BYTES])
            status = 0
    finally:
        os._exit(status)


def judge(request: dict[str, Any], layers: set[str], folders: list[int]) -> dict[str, Any]:
    """Runs a request in a child: {"outcome", "detail", "seconds"}."""
    request["token"] = os.urandom(16).hex()
    begun = time.monotonic()
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        in_child(request, layers, folders, writing)
    os.close(writing)
    report, ended, status = b"", False, 0
    process = os.pidfd_open(child)
    waiting = [reading, process]
    while not ended:
        left = begun + request["seconds"] - time.monotonic()
        ready = select.select(waiting, [], [], max(0.0, left))[0]
        if not ready:
            break
        if reading in ready:
            piece = os.read(reading, REPORT_BYTES)
            report += piece
            if not piece or len(report) > REPORT_BYTES:
                waiting = [process]
        ended = process in ready
    try:
        os.killpg(child, signal.SIGKILL)  # also what it has started, where there is no seccomp
    except ProcessLookupError:
        os.kill(child, signal.SIGKILL)  # before its setsid; it is not yet waited for
    _, status = os.waitpid(child, 0)
    while reading in waiting and len(report) <= REPORT_BYTES and (piece := _rest(reading)):
        report += piece
    os.close(reading)
    os.close(process)
    outcome, detail = outcome_of(ended, status, report.decode("utf-8", "replace"), request["token"])
    return {"outcome": outcome, "detail": detail[:300], "seconds": round(time.monotonic() - begun, 4)}


def _rest(reading: int) -> bytes:
    return os.read(reading, REPORT_BYTES) if select.select([reading], [], [], 0)[0] else b""


def outcome_of(ended: bool, status: int, report: str, token: str) -> tuple[str, str]:
    """The outcome of a child, and what is known of it. Only the token alone is believed."""
    if not ended:
        return "timeout", "it was still running at the time limit"
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        if number == signal.SIGSYS:
            return "forbidden", "a system call that is not allowed"
        if number == signal.SIGXCPU:
            return "timeout", "CPU time"
        if number == signal.SIGXFSZ:
            return "forbidden", "it wrote a file"
        return "crashed", _signal_name(number)
    if report == token:
        return ("passed", "") if os.WEXITSTATUS(status) == 0 else ("crashed", "it ended with an error after the tests")
    word, _, detail = report.partition(" ")
    if word in ("memory", "failed", "forbidden"):
        return word, detail
    return "failed", f"it ended with status {os.WEXITSTATUS(status)} before the tests were over"


def _signal_name(number: int) -> str:
    """SIGSEGV for 11. Real-time signals have no names in Python, but for the first and the last."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def probe(folders: list[int]) -> dict[str, str]:
    """Which layers work here, each tried in a child of its own: "" or why not."""

    def reason(layer: str) -> str:
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                moved = [os.dup2(folder, 110 + number) for number, folder in enumerate(folders)]
                os.dup2(writing, REPORT)
                confine({layer}, moved, 5, 512)
                os.write(REPORT, b"works")
            except OSError as error:
                os.write(REPORT, (error.strerror or str(error)).encode())
            finally:
                os._exit(0)
        os.close(writing)
        text = os.read(reading, REPORT_BYTES).decode()
        os.close(reading)
        os.waitpid(child, 0)
        return "" if text == "works" else text or "the trial ended before its answer"

    layers = {layer: reason(layer) for layer in ("user_namespace", "landlock", "seccomp")}
    # What they are for, tried in fact.
    trials = [("landlock", "open('/etc/passwd')"), ("seccomp", "import socket; socket.socket()")]
    # Emptying the null device changes nothing, and every user may.
    trials += [("seccomp", f"import os; os.open({os.devnull!r}, os.O_RDONLY | os.O_TRUNC)")]
    for layer, source in trials:
        if not layers[layer]:
            request = {"kind": "run", "source": source, "seconds": 10.0, "megabytes": 512}
            found = judge(request, {layer}, folders)
            if found["outcome"] != "forbidden":
                layers[layer] = f"it did not hold a trial: {found['outcome']} {found['detail']}"
    return layers


def main() -> None:
    """Serves until standard input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends the parent, and so the input
    os.umask(0o077)
    for name in MODULES.split():
        importlib.import_module(name)
    folders = [os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC) for path in readable_folders()]
    try:
        user = become_nobody()
    except OSError as error:
        user = f"root, and it cannot become nobody: {error}"
    os.chdir("/")
    layers = probe(folders)
    version = 0 if layers["landlock"] else landlock_version()
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    answers.write(json.dumps({"user": user, "layers": layers, "landlock_abi": version}) + "\n")
    answers.flush()
    on = {layer for layer, why in layers.items() if not why}
    for line in sys.stdin:
        answers.write(json.dumps(judge(json.loads(line), on, folders)) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
