"""Runs code that a model wrote, in a process of its own that can do little harm.

What is in force is said in the Outcome. On Linux (x86_64, aarch64) the kernel enforces it: seccomp refuses sockets,
new processes, signals to others, their shared memory, queues and semaphores, and new modes, owners, times or attributes
of files; Landlock (kernel 5.13 and later) lets the program write below its temporary folder and read the Python and
system libraries, and nothing else. Where one of them is missing, an audit hook of Python does its part, which native
code can go around. Everywhere: limits on memory, CPU time, wall time, files and output; an empty environment; no
standard input but the text given; the process group is killed at the end. Threads are counted on Linux.

Not covered: a program that is written to cheat the checks it shares a process with (returning objects that equal
everything; reading the checks from the frame that calls it, or tracing them; searching the interpreter's memory for
the report's token), reading the files of installed packages, seeing which other files there are and how large, faults
of the kernel, use of a CPU core and of memory up to the limits, what the folder holds and how many threads run between
two looks, and timing; nor are files counted that were removed while open (at most 64 of file_bytes each, and
memory_bytes of mapped ones). It is made for code that is wrong or careless, not for a determined attacker: run
untrusted models in a virtual machine or container as well.
"""

from __future__ import annotations

import contextlib
import errno
import io
import itertools
import json
import os
import secrets
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from dropmatch.bench import sandbox_child
from dropmatch.errors import ConfigError, StateError

Status = Literal["finished", "exited", "failed", "timeout", "memory", "output", "files", "threads", "killed"]

_CHILD = Path(sandbox_child.__file__)
_START_SECONDS = 60.0  # for the interpreter to start on a busy machine
_POLL_SECONDS = 0.2  # between looks at the working folder
_ENDING_SECONDS = 0.002  # between looks at a process that has closed its pipes
_REPORT_BYTES = 16 << 20  # of values that calls return
_FAILURES: tuple[Status, ...] = ("exited", "failed", "memory")  # that a program may claim, for they pass nothing


@dataclass(frozen=True, slots=True)
class Limits:
    """What one program may use. cpu_seconds is what usually stops an endless loop, so that a busy machine fails no
    program that is right; wall_seconds stops one that sleeps. file_bytes: one file; folder_bytes: all files together;
    folder_entries: files and folders, empty or not; output_bytes: what is kept of each of the two outputs; threads:
    counted on Linux alone."""

    cpu_seconds: int = 10
    wall_seconds: float = 40.0
    memory_bytes: int = 1 << 30
    file_bytes: int = 8 << 20
    folder_bytes: int = 64 << 20
    folder_entries: int = 5000
    output_bytes: int = 1 << 16
    threads: int = 256

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if value <= 0 or (name != "wall_seconds" and not isinstance(value, int)):
                raise ConfigError(f"{name}={value!r} is not allowed. Give a positive number (whole, but for seconds).")


@dataclass(frozen=True, slots=True)
class Call:
    """What one call returned, or the exception it raised, such as "ValueError: no root"."""

    value: Any = None
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a program ended.

    status: finished (ran to its end), exited (raised SystemExit), failed (raised), timeout, memory, output, files or
    threads (over a limit), killed (the process ended without a report); detail: the exception or signal, for people;
    calls: of run_calls, those that came to an end; protections: "seccomp", "landlock", "audit hook".
    """

    status: Status
    detail: str
    stdout: str
    stderr: str
    seconds: float
    protections: tuple[str, ...]
    calls: tuple[Call, ...] = ()

    @property
    def passed(self) -> bool:
        """Whether the program and its checks ran to their end."""
        return self.status == "finished"


def run_code(
    program: str,
    *,
    checks: str = "",
    stdin: str = "",
    is_main: bool = False,
    limits: Limits | None = None,
) -> Outcome:
    """Run a program and then, in its names and with the built-in functions restored, the checks.

    is_main: run as a script (__name__ == "__main__"), not as a module; stdin: its standard input.
    Raises ConfigError where the system cannot run a sandbox (Windows), StateError if the sandbox itself fails.
    """
    return _run(program, checks=checks, stdin=stdin, is_main=is_main, limits=limits or Limits())


def run_calls(
    program: str, entry_point: str, calls: Sequence[Sequence[Any]], *, limits: Limits | None = None
) -> Outcome:
    """Run a program and call its function (or Class.method) with each list of arguments; see Outcome.calls.

    Arguments and results are of plain types: numbers, strings, bytes, lists, tuples, sets, dicts, None. What the
    results should be never enters the sandbox. Raises as run_code does, and TypeError for other arguments.
    """
    encoded = [[sandbox_child.encode(argument) for argument in arguments] for arguments in calls]
    return _run(program, entry_point=entry_point, calls=encoded, limits=limits or Limits())


def protections() -> tuple[str, ...]:
    """What confines programs on this system: "landlock" and "seccomp" of the kernel, or an "audit hook" of Python."""
    return run_code("").protections


def _run(
    program: str,
    *,
    limits: Limits,
    checks: str = "",
    stdin: str = "",
    is_main: bool = False,
    entry_point: str = "",
    calls: list[list[Any]] | None = None,
    without: Sequence[str] = (),
) -> Outcome:
    """without: kernel protections to do without, as on a system that lacks them."""
    if sys.platform == "win32":
        raise ConfigError("Model-written code is not run on Windows: nothing confines it there. Use Linux or macOS.")
    token = secrets.token_hex(16)
    request = {
        "token": token,
        "program": program,
        "checks": checks,
        "stdin": stdin,
        "is_main": is_main,
        "entry_point": entry_point,
        "calls": calls,
        "limits": {name: value for name, value in asdict(limits).items() if name != "wall_seconds"},
        "without": list(without),
    }
    with _working_folder() as folder:
        process, report = _start(folder)
        try:
            watch = _Watch(process, report, folder, limits)
            over = watch.run(json.dumps(request).encode("utf-8", "surrogatepass"))
        finally:
            _kill(process)
            os.close(report)
    return _outcome(watch, token, over, num_calls=len(calls or []))


def _start(folder: str) -> tuple[subprocess.Popen[bytes], int]:
    """The process, waiting for its request, and the end of the report's pipe that is read."""
    reading, writing = os.pipe()
    # -s and -P: neither the user's own packages nor files of the working folder are imported
    command = [sys.executable, "-s", "-P", "-X", "utf8", str(_CHILD), str(writing)]
    environment = {
        "PATH": os.defpath,
        "HOME": folder,
        "TMPDIR": folder,
        "LANG": "C.UTF-8",
        "PYTHONHASHSEED": "0",  # the order of sets of strings, and so what a program prints, is the same each time
        "PYTHONDONTWRITEBYTECODE": "1",
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
    }
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=folder,
            env=environment,
            pass_fds=(writing,),
            start_new_session=True,
        )
    except BaseException:
        os.close(reading)
        raise
    finally:
        os.close(writing)
    return process, reading


def _has_ended(process: subprocess.Popen[bytes]) -> bool:
    """Without waiting for it, where the system can: a process that is waited for gives its group's number free."""
    if hasattr(os, "waitid"):
        return os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is not None
    return process.poll() is not None


def _kill(process: subprocess.Popen[bytes]) -> None:
    """End the process and whatever is left of its group, and close the pipes."""
    with contextlib.suppress(ProcessLookupError, PermissionError):  # the group is gone with its last process
        os.killpg(process.pid, signal.SIGKILL)
    process.kill()
    process.wait()
    for stream in (process.stdin, process.stdout, process.stderr):
        if stream is not None:
            with contextlib.suppress(BrokenPipeError):
                stream.close()


@contextlib.contextmanager
def _working_folder() -> Iterator[str]:
    """A temporary folder that is removed with whatever a program leaves there. A failure to remove it is no error."""
    folder = tempfile.mkdtemp(prefix="dropmatch-")
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)  # whatever the program makes of the name
        try:
            yield folder
        finally:
            _empty(descriptor)
            os.close(descriptor)
    finally:
        with contextlib.suppress(OSError):
            os.rmdir(folder)


def _empty(top: int) -> None:
    """Remove everything in an open folder, however deep and of whatever mode. The program has ended.

    Folders are moved to the top first, under new names: no path grows long, and nothing recurses.
    """
    new_names = map(f"{secrets.token_hex(8)}-{{}}".format, itertools.count())
    pending = ["."]
    with contextlib.suppress(OSError):
        os.fchmod(top, 0o700)
    while pending:
        name = pending.pop()
        with contextlib.suppress(OSError):  # what one folder refuses is no reason to leave the others
            folder = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=top)
            try:
                pending += _move_folders(folder, top, new_names)
            finally:
                os.close(folder)
            os.rmdir(name, dir_fd=top)


def _move_folders(folder: int, top: int, new_names: Iterator[str]) -> list[str]:
    """Remove the files of an open folder and move its folders to the top; returns their new names."""
    moved = []
    with os.scandir(folder) as found:
        entries = list(found)
    for entry in entries:
        with contextlib.suppress(OSError):
            if not entry.is_dir(follow_symlinks=False):
                os.unlink(entry.name, dir_fd=folder)
                continue
            os.chmod(entry.name, 0o700, dir_fd=folder)  # or its owner could neither move nor read it
            name = next(new_names)
            os.rename(entry.name, name, src_dir_fd=folder, dst_dir_fd=top)
            moved.append(name)
    return moved


class _Watch:
    """Feeds a process, reads its output and report, and looks at the clock and the folder."""

    def __init__(self, process: subprocess.Popen[bytes], report: int, folder: str, limits: Limits) -> None:
        self.process, self.folder, self.limits = process, folder, limits
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        self._stdin = process.stdin.fileno()
        self._report = report
        self.kept: dict[int, bytearray] = {
            process.stdout.fileno(): bytearray(),
            process.stderr.fileno(): bytearray(),
            report: bytearray(),
        }
        self.stdout, self.stderr, self.report = self.kept.values()
        self.started: float | None = None  # when the program itself began
        self.seconds = 0.0

    def run(self, request: bytes) -> Status | None:
        """Until the process ends (None), or is over a limit that only its parent sees (its name)."""
        unsent = memoryview(request)
        launched = time.monotonic()
        next_look = launched + _POLL_SECONDS
        with selectors.DefaultSelector() as selector:
            for descriptor in self.kept:
                selector.register(descriptor, selectors.EVENT_READ)
            os.set_blocking(self._stdin, False)
            selector.register(self._stdin, selectors.EVENT_WRITE)
            while True:
                is_open = any(descriptor in selector.get_map() for descriptor in self.kept)
                if not is_open and _has_ended(self.process):
                    return None
                for key, _ in selector.select(_POLL_SECONDS if is_open else _ENDING_SECONDS):
                    if key.fd == self._stdin:
                        unsent = self._send(unsent, selector)
                    else:
                        self._read(key.fd, selector)
                now = time.monotonic()
                if self.started is None and b"\n" in self.report:
                    self.started = now
                self.seconds = now - (self.started or launched)
                if self.seconds > (self.limits.wall_seconds if self.started else _START_SECONDS):
                    return "timeout"
                if len(self.report) > _REPORT_BYTES:
                    return "output"
                if now >= next_look:
                    next_look = now + _POLL_SECONDS
                    if _is_too_full(self.folder, self.limits):
                        return "files"
                    if _num_threads(self.process.pid) > self.limits.threads:
                        return "threads"

    def _send(self, unsent: memoryview, selector: selectors.BaseSelector) -> memoryview:
        try:
            unsent = unsent[os.write(self._stdin, unsent) :]
        except BrokenPipeError:
            unsent = unsent[:0]
        if not unsent:
            selector.unregister(self._stdin)
            assert self.process.stdin is not None
            self.process.stdin.close()
        return unsent

    def _read(self, descriptor: int, selector: selectors.BaseSelector) -> None:
        data = os.read(descriptor, 1 << 16)
        if not data:
            selector.unregister(descriptor)
        kept = self.kept[descriptor]
        room = _REPORT_BYTES + 1 if descriptor == self._report else self.limits.output_bytes
        kept += data[: max(0, room - len(kept))]  # the rest is read and forgotten


def _is_too_full(folder: str, limits: Limits) -> bool:
    """Whether a folder holds too many bytes or entries, or a folder that cannot be looked into."""
    num_bytes = num_entries = 0
    pending = [folder]
    while pending:
        try:
            with os.scandir(pending.pop()) as entries:
                for entry in entries:
                    num_entries += 1
                    with contextlib.suppress(FileNotFoundError):  # removed meanwhile
                        num_bytes += entry.stat(follow_symlinks=False).st_blocks * 512
                    if num_bytes > limits.folder_bytes or num_entries > limits.folder_entries:
                        return True
                    if entry.is_dir(follow_symlinks=False):
                        pending.append(entry.path)
        except OSError as error:
            if error.errno in (errno.ENAMETOOLONG, errno.EACCES):  # hidden: too deep for a path, or not to be read
                return True
    return False


def _num_threads(pid: int) -> int:
    """Threads of a process; 0 where the system has no /proc to tell."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()  # behind the name, from the third on
    except OSError:
        return 0
    return int(fields[17])


def _outcome(watch: _Watch, token: str, over: Status | None, num_calls: int) -> Outcome:
    lines = io.BytesIO(watch.report)
    stdout, stderr = (bytes(data).decode("utf-8", "replace") for data in (watch.stdout, watch.stderr))
    if watch.started is None:
        raise StateError(f"The sandbox did not start ({over or watch.process.returncode}): {stderr.strip()[-500:]}")
    protections = tuple(json.loads(lines.readline())["protections"])  # written before the program runs

    def outcome(status: Status, detail: str, calls: Sequence[Call] = ()) -> Outcome:
        return Outcome(status, detail, stdout, stderr, watch.seconds, protections, tuple(calls))

    try:
        calls, ending = _read_report(lines, token, num_calls)
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
        return outcome("failed", "something else than the report stands in the report")
    if over is not None:
        return outcome(over, f"over the limit of {_limit_in_words(over, watch.limits)}", calls)
    if ending is not None:
        return outcome(*ending, calls)
    code = watch.process.returncode
    if code == -signal.SIGXCPU or (code == -signal.SIGKILL and watch.seconds >= watch.limits.cpu_seconds):
        return outcome("timeout", f"over the limit of {watch.limits.cpu_seconds} s of CPU time", calls)
    signal_or_code = signal.Signals(-code).name if code < 0 else f"exit code {code}"
    return outcome("killed", f"the process ended ({signal_or_code}) before the program's end", calls)


def _read_report(lines: Iterable[bytes], token: str, num_calls: int) -> tuple[list[Call], tuple[Status, str] | None]:
    """The calls that ended, and status and detail of the program's end if it is reported.

    Raises ValueError or what decoding raises at the first line that is not the sandbox's: the rest is not looked at.
    """
    calls: list[Call] = []
    ending: tuple[Status, str] | None = None
    for line in lines:
        if ending is not None:
            raise ValueError("more after the end")
        if not line.endswith(b"\n"):
            break  # the process ended within it
        if secrets.compare_digest(line, f"{token} finished\n".encode()):
            ending = "finished", ""
            continue
        fields = json.loads(line)
        if "status" in fields:
            ending = _FAILURES[_FAILURES.index(fields["status"])], str(fields["detail"])
        elif len(calls) < num_calls:
            calls.append(_call(fields))
        else:
            raise ValueError("more calls than asked for")
    return calls, ending


def _call(line: dict[str, Any]) -> Call:
    return Call(error=str(line["error"])) if "error" in line else Call(sandbox_child.decode(line["value"]))


def _limit_in_words(over: Status, limits: Limits) -> str:
    words = {
        "timeout": f"{limits.wall_seconds:g} s of wall time",
        "files": f"{limits.folder_bytes >> 20} MiB, {limits.folder_entries} entries or the longest path of files",
        "output": f"{_REPORT_BYTES >> 20} MiB of results",
        "threads": f"{limits.threads} threads",
    }
    return words[over]
