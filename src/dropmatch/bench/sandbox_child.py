"""The inside of the sandbox: confines its own process, runs one program and reports how it ended.

Started by bench.sandbox as a script in a fresh interpreter, and stands alone for that: standard library only. The
request comes as JSON on standard input; the report goes to the pipe that the first argument numbers. Its lines are
JSON, but for the one that says that the program ran to its end: the token of the request and "finished".
"""

from __future__ import annotations

import builtins
import json
import os
import struct
import sys
import sysconfig
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any

_WRITE_FLAGS = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_MAX_DEPTH = 60  # of nested containers in a value
_MAX_SAME_HASH = 100  # entries of one set or dict: more are made so, and take a time that grows with their square
_DETAIL_CHARACTERS = 500


def main() -> None:
    request = json.loads(sys.stdin.buffer.read())
    descriptor = int(sys.argv.pop())
    write, dumps, leave = os.write, json.dumps, os._exit  # what a program may replace later

    def report(**fields: Any) -> None:
        data = dumps(fields).encode() + b"\n"
        while data:
            data = data[write(descriptor, data) :]

    _replace_stdin(request["stdin"])
    _limit(request["limits"])
    protections = _confine(os.getcwd(), request["without"])
    with open(os.__file__, "rb"):  # the library must stay readable, or every import would fail
        pass
    report(protections=protections)
    try:
        # Operands are evaluated from the left: while the program runs, the token waits on the interpreter's own stack,
        # where no name of a frame leads to it, and an exception drops it.
        write(descriptor, request.pop("token").encode() + _run(request, report))
    except BaseException as error:  # noqa: BLE001  # whatever the program raises is its result
        status, detail = _ending(error)
        report(status=status, detail=detail)
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except BaseException:  # noqa: BLE001  # the program may have put anything in its place
            continue
    leave(0)  # neither atexit functions nor threads of the program run on


def _run(request: dict[str, Any], report: Callable[..., None]) -> bytes:
    """Run the program, then the checks in its names, then the calls. Raises what the first two raise."""
    name = "__main__" if request["is_main"] else "solution"
    module = types.ModuleType(name)
    sys.modules["__main__"] = sys.modules[name] = module
    # the checks wait on the stack as the token does
    exec(_compiled(request.pop("checks"), "checks.py"), _define(request["program"], module))
    if request["calls"] is not None:
        function = _function(vars(module), request["entry_point"])
        for arguments in request["calls"]:
            try:
                result: dict[str, Any] = {"value": encode(function(*map(decode, arguments)))}
            except Exception as error:  # noqa: BLE001  # the result of this call
                result = {"error": _ending(error)[1]}
            report(**result)
    return b" finished\n"


def _define(program: str, module: types.ModuleType) -> dict[str, Any]:
    """The names of the module once the program has run in it, with the built-in functions as they were."""
    kept, restore = dict(vars(builtins)), vars(builtins).update
    try:
        exec(_compiled(program, "program.py"), vars(module))
    finally:
        restore(kept)  # so that the checks, and this module, mean what they say
    return vars(module)


def _compiled(text: str, name: str) -> types.CodeType:
    code: types.CodeType = compile(text, name, "exec", dont_inherit=True)  # not this module's __future__
    return code


def _function(names: dict[str, Any], entry_point: str) -> Callable[..., Any]:
    """entry_point: a function, or Class.method of a class that is made without arguments."""
    owner, _, method = entry_point.rpartition(".")
    found: Callable[..., Any] = getattr(names[owner](), method) if owner else names[method]
    return found


def _ending(error: BaseException) -> tuple[str, str]:
    """Status and detail of a program that raised."""
    if isinstance(error, SystemExit):
        return "exited", f"SystemExit: {error.code!r}"[:_DETAIL_CHARACTERS] if _is_plain(error.code) else "SystemExit"
    try:
        detail = f"{type(error).__name__}: {error}".removesuffix(": ")[:_DETAIL_CHARACTERS]
    except BaseException:  # noqa: BLE001  # a __str__ of the program
        detail = "an exception that cannot be printed"
    return ("memory" if isinstance(error, MemoryError) else "failed"), detail


def _is_plain(value: object) -> bool:
    return value is None or type(value) in (int, str)


# --- values that cross the border: plain types only, so that reading them back runs no code ---


def encode(value: Any, depth: int = 0) -> Any:
    """A value of plain types as JSON with the types kept: 1 -> 1, (1, 2.0) -> ["tuple", [1, ["float", "2.0"]]].

    Raises TypeError for other types and ValueError for values nested too deep, such as a list within itself.
    """
    kind = type(value)
    if depth > _MAX_DEPTH:
        raise ValueError("nested too deep")
    if value is None or kind in (bool, str):
        return value
    if kind is int:
        return value if abs(value) < 2**53 else ["int", hex(value)]
    if kind in (float, complex):
        return [kind.__name__, repr(value)]
    if kind in (bytes, bytearray):
        return [kind.__name__, value.hex()]
    if kind in (list, tuple, set, frozenset):
        return [kind.__name__, [encode(one, depth + 1) for one in value]]
    if isinstance(value, dict):
        return ["dict", [[encode(key, depth + 1), encode(one, depth + 1)] for key, one in value.items()]]
    if kind.__module__ == "numpy":
        return encode(value.tolist(), depth + 1)
    for base in (tuple, list, set, int, float, str):  # named tuples, enumerations and the like
        if isinstance(value, base):
            plain: Callable[[Any], Any] = base
            return encode(plain(value), depth + 1)
    if isinstance(value, Iterator | range) or kind.__name__ == "deque":
        return encode(list(value), depth + 1)
    raise TypeError(f"a value of type {kind.__name__} cannot leave the sandbox")


def decode(value: Any) -> Any:
    """The value that `encode` was given, or ValueError."""
    if value is None or type(value) in (bool, int, str):
        return value
    if type(value) is not list or len(value) != 2:
        raise ValueError("not an encoded value")
    kind, content = value
    scalars: dict[str, Callable[[Any], Any]] = {
        "int": lambda text: int(text, 16),
        "float": float,
        "complex": complex,
        "bytes": bytes.fromhex,
        "bytearray": bytearray.fromhex,
    }
    if kind in scalars:
        return scalars[kind](content)
    containers: dict[str, Callable[[Iterable[Any]], Any]] = {
        "list": list,
        "tuple": tuple,
        "set": set,
        "frozenset": frozenset,
    }
    if kind in containers:
        values = [decode(one) for one in content]
        if kind in ("set", "frozenset"):
            _check_hashes(values)
        return containers[kind](values)
    if kind == "dict":
        pairs = [(decode(key), decode(one)) for key, one in content]
        _check_hashes([key for key, _ in pairs])
        return dict(pairs)
    raise ValueError(f"no such kind of value: {kind!r}")


def _check_hashes(values: list[Any]) -> None:
    """Raise ValueError if too many values have one hash."""
    counts: dict[int, int] = {}
    for value in values:
        at = hash(value)
        counts[at] = counts.get(at, 0) + 1
        if counts[at] > _MAX_SAME_HASH:
            raise ValueError("too many values with one hash")


# --- limits and confinement ---


def _replace_stdin(text: str) -> None:
    """The program's standard input: the text, or an end of file. The request is no longer there."""
    path = "stdin" if text else os.devnull
    if text:
        with open(path, "w", encoding="utf-8", newline="") as file:
            file.write(text)
    descriptor = os.open(path, os.O_RDONLY)
    os.dup2(descriptor, 0)
    os.close(descriptor)
    if text:
        os.unlink(path)
    sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115  # stays open


def _limit(limits: dict[str, int]) -> None:
    import resource

    for name, value in (
        ("RLIMIT_CORE", 0),
        ("RLIMIT_AS", limits["memory_bytes"]),
        ("RLIMIT_CPU", limits["cpu_seconds"]),
        ("RLIMIT_FSIZE", limits["file_bytes"]),
        ("RLIMIT_NOFILE", 64),
    ):
        kind = getattr(resource, name)
        hard = resource.getrlimit(kind)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        # one second more until SIGKILL, which no handler catches
        top = value + 1 if name == "RLIMIT_CPU" and hard == resource.RLIM_INFINITY else value
        resource.setrlimit(kind, (value, top))


def _confine(folder: str, without: list[str]) -> list[str]:
    """Take away network, other processes and files outside the folder. Returns the protections that are in force.

    without: kernel protections to do without; what they would cover falls to the audit hook.
    """
    in_force = []
    if sys.platform == "linux":
        import ctypes

        kernel = _Kernel(ctypes)
        kernel.give_up_rights()
        if "landlock" not in without and kernel.restrict_files(folder):
            in_force.append("landlock")
        if "seccomp" not in without and kernel.filter_calls():
            in_force.append("seccomp")
    if missing := {"landlock", "seccomp"} - set(in_force):
        _add_audit_hook(folder, guards_files="landlock" in missing, guards_calls="seccomp" in missing)
        in_force.append("audit hook")
    return in_force


def _readable() -> list[str]:
    """Where Python, its packages and the system's libraries lie."""
    paths = [sys.base_prefix, sys.prefix, sys.base_exec_prefix, sys.exec_prefix, *sysconfig.get_paths().values()]
    paths += ["/usr", "/lib", "/lib64", "/bin", "/etc/ld.so.cache", "/etc/localtime", "/etc/mime.types"]
    return [path for path in dict.fromkeys(map(os.path.realpath, paths)) if os.path.exists(path) and path != "/"]


class _Kernel:
    """Linux system calls that have no wrapper in the standard library."""

    def __init__(self, ctypes: Any) -> None:
        self._ctypes = ctypes
        self._libc = ctypes.CDLL(None, use_errno=True)

    def _call(self, number: int, *arguments: Any) -> int:
        kinds = [self._ctypes.c_long(one) if isinstance(one, int) else one for one in arguments]
        return int(self._libc.syscall(self._ctypes.c_long(number), *kinds))

    def give_up_rights(self) -> None:
        """No new rights through programs, and no capabilities: root can no longer lift limits or signal others."""
        if self._libc.prctl(38, 1, 0, 0, 0) != 0:  # PR_SET_NO_NEW_PRIVS
            raise OSError(self._ctypes.get_errno(), "PR_SET_NO_NEW_PRIVS was refused")
        header = struct.pack("Ii", 0x20080522, 0)  # _LINUX_CAPABILITY_VERSION_3, this thread
        if self._libc.capset(header, bytes(24)) != 0:
            raise OSError(self._ctypes.get_errno(), "capset was refused")

    def restrict_files(self, folder: str) -> bool:
        """Landlock: read the libraries, write below the folder only. False where the kernel has no Landlock."""
        abi = self._call(444, None, 0, 1)
        if abi < 1:
            return False
        read, write = 0b1101, 0b1_1111_1111_0010  # execute, read file, read folder; write, remove and make entries
        if abi >= 2:
            write |= 1 << 13  # rename across folders
        if abi >= 3:
            write |= 1 << 14  # truncate
        handled = read | write | (1 << 15 if abi >= 5 else 0)  # ioctl on devices is given to no path
        # from ABI 4 TCP bind and connect; from 6 abstract sockets and signals to the outside
        fields = [handled, *([0b11] if abi >= 4 else []), *([0b11] if abi >= 6 else [])]
        rules = self._call(444, struct.pack(f"{len(fields)}Q", *fields), 8 * len(fields), 0)
        if rules < 0:
            return False
        grants = [(path, read) for path in _readable()]
        grants += [(folder, read | write), (os.devnull, 0b110), ("/dev/urandom", 0b100), ("/dev/random", 0b100)]
        for path, access in grants:
            if not os.path.isdir(path):
                access &= 0b111 | 1 << 14  # the rights that a file can have
            descriptor = os.open(path, os.O_PATH)
            added = self._call(445, rules, 1, struct.pack("=Qi", access, descriptor), 0)
            os.close(descriptor)
            if added != 0:
                raise OSError(self._ctypes.get_errno(), f"Landlock refused a rule for {path}")
        is_on = self._call(446, rules, 0) == 0
        os.close(rules)
        return is_on

    def filter_calls(self) -> bool:
        """seccomp: no sockets, no processes, no signals to others, no new modes, owners, times or attributes of files.

        False where the kernel or machine has no filter.
        """
        program = _filter(os.uname().machine, os.getpid())
        if program is None:
            return False
        ctypes = self._ctypes
        code = ctypes.create_string_buffer(program, len(program))
        # struct sock_fprog: how many instructions, and where
        pointer = struct.pack("@HP", len(program) // 8, ctypes.addressof(code))
        return int(self._libc.prctl(22, 2, pointer, 0, 0)) == 0  # PR_SET_SECCOMP, SECCOMP_MODE_FILTER


# name: numbers on (x86_64, aarch64); None where the machine has no such call
_DENIED = {
    "socket": (41, 198),
    "fork": (57, None),
    "vfork": (58, None),
    "execve": (59, 221),
    "execveat": (322, 281),
    "tkill": (200, 130),
    "ptrace": (101, 117),
    "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240),
    "pidfd_send_signal": (424, 424),
    "pidfd_open": (434, 434),
    "pidfd_getfd": (438, 438),
    "process_madvise": (440, 440),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "kcmp": (312, 272),
    "migrate_pages": (256, 238),
    "move_pages": (279, 239),
    "setpriority": (141, 140),
    "sched_setparam": (142, 118),
    "sched_setscheduler": (144, 119),
    "sched_setattr": (314, 274),
    "ioprio_set": (251, 30),
    "unshare": (272, 97),
    "setns": (308, 268),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    # shared memory, queues and semaphores of the user's other processes, by number
    "shmget": (29, 194),
    "shmat": (30, 196),
    "shmctl": (31, 195),
    "msgget": (68, 186),
    "msgsnd": (69, 189),
    "msgrcv": (70, 188),
    "msgctl": (71, 187),
    "semget": (64, 190),
    "semop": (65, 193),
    "semtimedop": (220, 192),
    "semctl": (66, 191),
    "mq_open": (240, 180),
    "mq_unlink": (241, 181),
    # open files sent through a socket pair would escape the limit on open files
    "sendmsg": (46, 211),
    "sendmmsg": (307, 269),
    # what Landlock lets happen to files outside the folder (truncate: before its third version)
    "truncate": (76, 45),
    "chmod": (90, None),
    "fchmod": (91, 52),
    "fchmodat": (268, 53),
    "fchmodat2": (452, 452),
    "chown": (92, None),
    "fchown": (93, 55),
    "lchown": (94, None),
    "fchownat": (260, 54),
    "utime": (132, None),
    "utimes": (235, None),
    "futimesat": (261, None),
    "utimensat": (280, 88),
    "setxattr": (188, 5),
    "lsetxattr": (189, 6),
    "fsetxattr": (190, 7),
    "setxattrat": (463, 463),
    "removexattr": (197, 14),
    "lremovexattr": (198, 15),
    "fremovexattr": (199, 16),
    "removexattrat": (466, 466),
    "file_setattr": (469, 469),
}
# calls whose first argument is a process: this one only
_OWN_PROCESS = {"kill": (62, 129), "tgkill": (234, 131), "prlimit64": (302, 261), "sched_setaffinity": (203, 122)}
_ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
_CLONE, _CLONE3, _FCNTL, _IOCTL = (56, 220), (435, 435), (72, 25), (16, 29)
_OPEN, _OPENAT, _OPENAT2 = (2, None), (257, 56), (437, 437)
_CLONE_THREAD = 0x10000
_F_SETOWN, _F_SETOWN_EX = 8, 15  # who gets SIGIO: another way to signal
_ACCESS_MODE, _TRUNCATE = 0o3, 0o1000  # opening to read may truncate too
_TERMINAL_REQUESTS, _FICLONE = 0x5400, 0x40049409  # of the requests, others change the flags of files open to read
_EPERM, _ENOSYS = 1, 38
_ALLOW, _ERRNO, _KILL = 0x7FFF0000, 0x00050000, 0x80000000
_ARGUMENT_0, _ARGUMENT_1, _ARGUMENT_2 = 16, 24, 32  # low words of arguments within struct seccomp_data, little-endian


def _filter(machine: str, pid: int) -> bytes | None:
    """A filter of system calls for this process as BPF instructions, or None for an unknown machine."""
    if machine not in _ARCHITECTURES:
        return None
    column, architecture = _ARCHITECTURES[machine]
    load, equal, at_least, any_bit, mask, give = 0x20, 0x15, 0x35, 0x45, 0x54, 0x06

    def op(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
        return struct.pack("=HBBI", code, if_true, if_false, value)

    denied, missing, allowed = op(give, _ERRNO | _EPERM), op(give, _ERRNO | _ENOSYS), op(give, _ALLOW)
    program = [op(load, 4), op(equal, architecture, 1, 0), op(give, _KILL), op(load, 0)]
    if machine == "x86_64":
        program += [op(at_least, 0x40000000, 0, 1), op(give, _KILL)]  # the x32 calls
    for pair in _DENIED.values():
        if (number := pair[column]) is not None:
            program += [op(equal, number, 0, 1), denied]
    for numbers in (_CLONE3, _OPENAT2):  # clone and openat are used then, whose flags can be read
        program += [op(equal, numbers[column], 0, 1), missing]

    def check_arguments(number: int | None, *check: bytes) -> None:
        if number is not None:
            program.extend([op(equal, number, 0, len(check)), *check])

    check_arguments(_CLONE[column], op(load, _ARGUMENT_0), op(any_bit, _CLONE_THREAD, 0, 1), allowed, denied)
    read_flags = [op(mask, _TRUNCATE | _ACCESS_MODE), op(equal, _TRUNCATE, 0, 1), denied, allowed]
    check_arguments(_OPEN[column], op(load, _ARGUMENT_1), *read_flags)
    check_arguments(_OPENAT[column], op(load, _ARGUMENT_2), *read_flags)
    read_kind = [op(mask, 0xFF00), op(equal, _TERMINAL_REQUESTS, 0, 1), allowed, denied]
    check_arguments(_IOCTL[column], op(load, _ARGUMENT_1), op(equal, _FICLONE, 0, 1), allowed, *read_kind)
    for name, numbers in _OWN_PROCESS.items():
        # pid 0 means the caller, but for kill its whole group
        others = [] if name in ("kill", "tgkill") else [op(equal, 0, 1, 0)]
        check_arguments(numbers[column], op(load, _ARGUMENT_0), *others, op(equal, pid, 0, 1), allowed, denied)
    read_command = [op(equal, _F_SETOWN, 1, 0), op(equal, _F_SETOWN_EX, 0, 1), denied, allowed]
    check_arguments(_FCNTL[column], op(load, _ARGUMENT_1), *read_command)
    return b"".join([*program, allowed])


_CALL_EVENTS = (
    "socket.",
    "subprocess.",
    "os.exec",
    "os.fork",
    "os.kill",
    "os.spawn",
    "os.posix_spawn",
    "pty.",
    "ctypes.",
)
_CALL_NAMES = {
    *("os.system", "os.startfile", "fcntl.ioctl"),
    *("os.chmod", "os.lchmod", "os.chown", "os.chflags", "os.utime", "os.setxattr", "os.removexattr"),
}
_CALL_MODULES = {"_posixsubprocess", "_socket", "_ctypes", "_multiprocessing"}
_FILE_EVENTS = {"os.remove", "os.rename", "os.rmdir", "os.mkdir", "os.link", "os.symlink", "os.truncate", "os.chdir"}


def _add_audit_hook(folder: str, *, guards_files: bool, guards_calls: bool) -> None:
    """What Python itself can refuse. Weaker than the kernel: native code does not ask."""
    root, flags = os.path.realpath(folder), _WRITE_FLAGS
    # names that the program may replace later
    real, is_folder, fsdecode, null, is_a = os.path.realpath, os.path.isdir, os.fsdecode, os.devnull, isinstance

    def is_outside(path: Any) -> bool:
        if path is None or is_a(path, int):
            return False  # the working folder, or open already
        text = fsdecode(path)
        if not text.startswith("/") and ".." in text.split("/"):
            return True  # it may be meant from an open folder, which no event names
        full = real(text)
        return full != root and not full.startswith(root + "/")

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if guards_calls and (
            event.startswith(_CALL_EVENTS)
            or event in _CALL_NAMES
            or (event == "import" and arguments[0] in _CALL_MODULES)
        ):
            raise PermissionError(f"{event} is not allowed in the sandbox")
        if not guards_files:
            return
        if event == "open":
            path, _, mode = arguments
            # an open folder would be a way to name files outside it without a path
            if path != null and is_outside(path) and (mode & flags or is_folder(path)):
                raise PermissionError("writing outside the working folder is not allowed in the sandbox")
        elif event in _FILE_EVENTS:
            count = 2 if event in ("os.rename", "os.link", "os.symlink") else 1
            if any(is_outside(path) for path in arguments[:count]):
                raise PermissionError(f"{event} outside the working folder is not allowed in the sandbox")

    sys.addaudithook(hook)


if __name__ == "__main__":
    main()
