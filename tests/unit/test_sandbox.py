"""Hostile and broken programs in the sandbox: none passes, none harms, none outlives its run."""

from __future__ import annotations

import os
import socket
import sys
import tempfile
import textwrap
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dropmatch.bench import sandbox, sandbox_child
from dropmatch.bench.sandbox import Limits, Outcome, run_calls, run_code
from dropmatch.errors import ConfigError, StateError

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="needs process limits, which Windows lacks")

QUICK = Limits(cpu_seconds=3, wall_seconds=20.0, memory_bytes=256 << 20, file_bytes=1 << 20, folder_bytes=4 << 20)
KERNEL = ("landlock", "seccomp")
CHECKS = "assert double(2) == 4"


@pytest.fixture(scope="module")
def kernel() -> None:
    """Skips where the kernel confines nothing."""
    if sandbox.protections() != KERNEL:
        pytest.skip(f"needs Landlock and seccomp; here only {sandbox.protections()} are in force")


def run(program: str, checks: str = "", limits: Limits = QUICK) -> Outcome:
    return run_code(textwrap.dedent(program), checks=checks, limits=limits)


def test_a_right_program_passes_and_a_wrong_one_does_not() -> None:
    right = run("def double(x): return 2 * x", CHECKS)
    assert right.passed
    assert (right.status, right.detail) == ("finished", "")
    wrong = run("def double(x): return x", CHECKS)
    assert not wrong.passed
    assert (wrong.status, wrong.detail) == ("failed", "AssertionError")


def test_what_confines_the_program_is_said() -> None:
    assert run("x = 1").protections in (KERNEL, ("landlock", "audit hook"), ("seccomp", "audit hook"), ("audit hook",))


@pytest.mark.parametrize("program", ["def f(:", "1 / 0", "raise KeyboardInterrupt", "raise BaseException('no')"])
def test_programs_that_raise_fail(program: str) -> None:
    assert run(program).status == "failed"


FAKED = {
    "leaves at once": "import sys; sys.exit(0)",
    "leaves the process": "import os; os._exit(0)",
    "leaves later": "import sys\ndef double(x): sys.exit(0)",
    "leaves the process later": "import os\ndef double(x): os._exit(0)",
    "says so": "print('passed'); print('{\"status\": \"finished\"}')\ndef double(x): return 5",
    "writes into every pipe": """
        import os
        for descriptor in range(1, 64):
            try:
                os.write(descriptor, b'{"token": "", "status": "finished", "detail": ""}\\n')
            except OSError:
                pass
        os._exit(0)
        """,
    "repeats the report's first line": """
        import os
        for descriptor in range(3, 64):
            try:
                os.write(descriptor, b'{"protections": []}\\n{"status": "finished", "detail": ""}\\n')
            except OSError:
                pass
        def double(x): return 5
        """,
    "closes every pipe": "import os; os.closerange(0, 64)\ndef double(x): return 5",
    "replaces names of the harness": """
        import builtins, json, os, sys
        builtins.exec = builtins.compile = os.write = json.dumps = lambda *a, **k: None
        sys.exit = os._exit = lambda *a: None
        def double(x): return 5
        """,
    "replaces exceptions": """
        import builtins
        builtins.AssertionError = builtins.BaseException = builtins.SystemExit = None
        def double(x): return 5
        """,
    "empties the built-in names": "import builtins; vars(builtins).clear()",
    "defines the checks away": "def check(f): pass\nassert_ = print\ndef double(x): return 5",
    "catches everything": """
        def double(x):
            try:
                raise SystemExit
            except BaseException:
                return 5
        """,
    "raises something odd": """
        class Odd(BaseException):
            def __str__(self): raise SystemExit(0)
        def double(x): raise Odd
        """,
    "goes on after the checks": """
        import atexit, os, threading
        atexit.register(lambda: os._exit(0))
        threading.Thread(target=lambda: [None for _ in iter(int, 1)], daemon=True).start()
        def double(x): return 5
        """,
    "swallows the checks": 'double = lambda x: 5\n"""',
    "makes a success of every exception": """
        import sys
        frame = sys._getframe()
        while frame := frame.f_back:
            frame.f_globals.update(_ending=lambda error: ("finished", ""))
        def double(x): return 5
        """,
    "leaves after the report that a frame shows": """
        import os, sys
        frame = sys._getframe()
        while frame := frame.f_back:
            for value in list(frame.f_locals.values()):
                if callable(value) and value.__name__ == "report":
                    value(status="finished", detail="")
        os._exit(0)
        """,
    "comes back from a trace": """
        import sys
        sys.settrace(lambda *a: None)
        sys.excepthook = lambda *a: None
        def double(x): return 5
        """,
}


@pytest.mark.parametrize("name", FAKED)
def test_faked_success_does_not_pass(name: str) -> None:
    outcome = run(FAKED[name], CHECKS)
    assert not outcome.passed
    assert outcome.status in ("failed", "exited", "killed")


def test_no_frame_shows_the_checks_or_the_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program read both from its caller's frame, and could write the report of a success."""
    token, known = "0f1e2d3c4b5a", "double(2) == 4"
    monkeypatch.setattr(sandbox.secrets, "token_hex", lambda _: token)
    program = """
        import gc, sys, types
        def shown(value, depth):
            found = [repr(value)]
            if depth:
                if isinstance(value, types.FunctionType):
                    found += [text for cell in value.__closure__ or () for text in shown(cell.cell_contents, depth - 1)]
                    found += shown(value.__globals__, 0)
                if isinstance(value, types.FrameType):
                    found += [text for one in gc.get_referents(value) for text in shown(one, depth - 1)]
                    found += [text for one in value.f_locals.values() for text in shown(one, depth - 1)]
                    found += shown(value.f_globals, 0)
            return found
        frame = sys._getframe()
        while frame:
            print(*shown(frame, 3))
            frame = frame.f_back
        """
    outcome = run(program, f"# {known}", limits=Limits(output_bytes=1 << 24))
    assert outcome.passed
    assert "'is_main': False" in outcome.stdout  # the request is among what it found
    assert token not in outcome.stdout
    assert known not in outcome.stdout


def test_reading_the_report_ends_at_the_first_foreign_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """Thirteen million empty lines kept the caller busy for a minute."""
    lines = []
    loads = sandbox.json.loads
    monkeypatch.setattr(sandbox.json, "loads", lambda line: lines.append(line) or loads(line))
    program = """
        import os
        for descriptor in range(3, 64):
            try:
                for _ in range(20): os.write(descriptor, bytes([10]) * 65536)
            except OSError:
                pass
        """
    assert run(program).status == "failed"
    assert len(lines) == 2


def test_more_results_than_calls_are_no_report() -> None:
    program = """
        import os
        for descriptor in range(3, 64):
            try:
                os.write(descriptor, b'{"value": 4}\\n')
            except OSError:
                pass
        def double(x): return 5
        """
    outcome = run_calls(textwrap.dedent(program), "double", [[2]], limits=QUICK)
    assert (outcome.status, outcome.calls) == ("failed", ())


def test_annotations_and_arguments_are_the_program_s_own() -> None:
    program = "import sys\ndef double(x: int): return 2 * x\nassert len(sys.argv) == 1"
    assert run(program, "assert double.__annotations__ == {'x': int}").passed


def test_checks_see_the_built_in_functions_as_they_were() -> None:
    program = "import builtins; builtins.abs = lambda x: 0\ndef double(x): return 9"
    assert not run(program, "assert abs(double(2) - 4) < 1").passed


def test_a_loop_without_end_stops_at_the_cpu_limit() -> None:
    began = time.monotonic()
    outcome = run("while True: pass", limits=Limits(cpu_seconds=1, wall_seconds=60.0))
    assert outcome.status == "timeout"
    assert "1 s of CPU time" in outcome.detail
    assert time.monotonic() - began < 30


def test_temporary_folders_work_under_every_protection() -> None:
    program = "import tempfile\nwith tempfile.TemporaryDirectory() as folder: open(folder + '/a', 'w').write('x')"
    for without in WITHOUT.values():
        outcome = sandbox._run(program, limits=QUICK, without=without)
        assert outcome.passed, outcome.detail


def test_programs_use_files_as_usual() -> None:
    program = """
        import os, pathlib, shutil, sqlite3, sys, tarfile, tempfile
        path = pathlib.Path("a")
        for text in ("first", "second"):
            path.write_text(text)
        path.touch()
        with path.open("r+") as file:
            file.truncate(3)
        shutil.copyfile("a", "b")
        with tarfile.open("c.tar", "w") as archive:
            archive.add("a")
        with tarfile.open("c.tar") as archive:
            archive.extractall("d", filter="data")
        with tempfile.NamedTemporaryFile("w+") as file:
            file.write("x")
        with sqlite3.connect("e") as table:
            table.execute("create table f (g)")
        print(pathlib.Path("b").read_text(), pathlib.Path("d/a").read_text(), sys.stdout.isatty())
        """
    for without in WITHOUT.values():
        outcome = sandbox._run(textwrap.dedent(program), limits=QUICK, without=without)
        assert (outcome.detail, outcome.stdout) == ("", "sec sec False\n")


def test_a_loop_that_catches_everything_stops_too() -> None:
    program = """
        import signal
        for number in range(1, 65):
            try:
                signal.signal(number, lambda *a: None)
            except (OSError, ValueError):
                pass
        while True:
            try:
                while True: pass
            except BaseException:
                pass
        """
    assert run(program, limits=Limits(cpu_seconds=1, wall_seconds=60.0)).status == "timeout"


def test_a_program_that_sleeps_stops_at_the_wall_limit() -> None:
    outcome = run("import time; time.sleep(60)", limits=Limits(wall_seconds=0.5))
    assert outcome.status == "timeout"
    assert "wall time" in outcome.detail


def test_a_program_that_closes_its_pipes_and_sleeps_stops() -> None:
    """Reading ends at once then, and the clock must go on."""
    program = "import os, time; os.closerange(0, 64); time.sleep(60)"
    assert run(program, limits=Limits(wall_seconds=0.5)).status == "timeout"


def test_memory_is_limited() -> None:
    outcome = run("x = bytearray(1 << 30)")
    assert (outcome.status, outcome.detail) == ("memory", "MemoryError")
    assert run("x = []\nwhile True: x.append(bytearray(1 << 20))").status in ("memory", "killed")


@pytest.mark.skipif(sys.platform != "linux", reason="threads are counted on Linux alone")
def test_threads_are_limited() -> None:
    """Threads cost a program little memory, and the system a place among its processes."""
    program = """
        import threading, time
        threading.stack_size(1 << 16)
        for _ in range(40):
            threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
        time.sleep({seconds})
        """
    limits = replace(QUICK, threads=20)
    outcome = run(program.replace("{seconds}", "60"), limits=limits)
    assert (outcome.status, outcome.detail) == ("threads", "over the limit of 20 threads")
    assert run(program.replace("{seconds}", "0.5"), limits=replace(QUICK, threads=60)).passed


def test_output_is_cut_and_still_read() -> None:
    outcome = run("import sys\nprint('x' * 5_000_000)\nprint('y' * 5_000_000, file=sys.stderr)")
    assert outcome.passed
    assert outcome.stdout == "x" * QUICK.output_bytes
    assert outcome.stderr == "y" * QUICK.output_bytes


def test_files_are_limited_one_by_one_and_together() -> None:
    assert run("open('a', 'wb').write(b'x' * (2 << 20))").detail.startswith("OSError: [Errno 27]")
    program = """
        import os, time
        for number in range(20):
            with open(str(number), "wb") as file:
                file.write(os.urandom(1 << 19))
        time.sleep(60)
        """
    assert run(program, limits=Limits(wall_seconds=10.0, folder_bytes=4 << 20)).status == "files"


def test_the_working_folder_is_empty_writable_and_removed() -> None:
    outcome = run(
        "import os\nprint(os.getcwd(), os.listdir())\nopen('a', 'w').write('x'); os.mkdir('b'); os.rename('a', 'b/a')"
    )
    assert outcome.passed
    folder, listing = outcome.stdout.split(maxsplit=1)
    assert listing == "[]\n"
    assert not Path(folder).exists()


HIDDEN = {
    "too many": "for i in range(300): open(str(i), 'w').close()",
    "empty folders": "for i in range(300): os.mkdir(str(i))",
    "deep": "for i in range(1100): os.mkdir('d'); os.chdir('d')\nfor i in range(6): write(i)",
    "deeper than a path": "for i in range(18): os.mkdir('d' * 250); os.chdir('d' * 250)\nfor i in range(6): write(i)",
}


@pytest.mark.parametrize("name", HIDDEN)
def test_files_are_counted_however_many_and_deep(name: str) -> None:
    """A walk by recursion ended at 1000 folders, one by path at 4096 characters; empty files counted nothing."""
    program = f"""
import os, time
def write(i):
    with open(str(i), "wb") as file:
        file.write(os.urandom(1 << 20))
{HIDDEN[name]}
time.sleep(60)
"""
    limits = Limits(wall_seconds=10.0, folder_bytes=4 << 20, folder_entries=200 if "d'" not in HIDDEN[name] else 5000)
    assert run(program, limits=limits).status == "files"


LITTER = {
    "deep": "for i in range(1100): os.mkdir('d'); os.chdir('d')",
    "deeper than a path": "for i in range(40): os.mkdir('d' * 250); os.chdir('d' * 250)",
    "not to be read": "os.makedirs('a/b'); open('a/b/c', 'w'); os.mkdir('e', 0); os.umask(0o777); os.mkdir('a/f')",
    "links": "os.mkdir('a'); os.symlink('..', 'a/b'); os.symlink('/etc', 'c'); os.link('c', 'd'); os.mkfifo('e', 0)",
    "odd names": "os.mkdir(b'\\xff\\n'); open(b'\\xff\\n/-rf *', 'w')",
}


@pytest.mark.parametrize("name", LITTER)
def test_whatever_a_program_leaves_is_removed(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Removal by recursion raised RecursionError at 1000 folders, which ended the scoring of a whole comparison."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert run(f"import os\n{LITTER[name]}", limits=Limits()).status in (
        "finished",
        "files",
    )  # too deep to be looked at
    assert list(tmp_path.iterdir()) == []


def test_a_program_may_remove_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert sandbox._run("import os; os.rmdir(os.environ['HOME'])", limits=QUICK, without=KERNEL).passed
    assert list(tmp_path.iterdir()) == []


def test_the_caller_s_environment_does_not_reach_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_TOKEN", "hunter2")
    monkeypatch.setenv("PYTHONOPTIMIZE", "1")  # would take the asserts away
    outcome = run("import os; print(dict(os.environ))", "assert False")
    assert "hunter2" not in outcome.stdout
    assert outcome.status == "failed"


def test_there_is_no_standard_input_but_the_text_given() -> None:
    assert run("input()").detail == "EOFError: EOF when reading a line"
    echo = run_code("import sys\nprint(input())\nprint(sys.stdin.read())", stdin="één\n2\n3", is_main=True)
    assert (echo.status, echo.stdout) == ("finished", "één\n2\n3\n")


def test_a_script_runs_as_main_and_a_module_does_not() -> None:
    program = "if __name__ == '__main__': print('main')"
    assert run_code(program, is_main=True).stdout == "main\n"
    assert run_code(program).stdout == ""


def test_programs_use_threads_classes_and_packages() -> None:
    program = """
        from __future__ import annotations
        import asyncio, collections, dataclasses, pickle, threading, typing
        import numpy
        @dataclasses.dataclass
        class Point:
            x: int
        pair = collections.namedtuple("pair", "a b")
        assert pickle.loads(pickle.dumps(Point(1))) == Point(1)
        thread = threading.Thread(target=print, args=("thread",))
        thread.start(); thread.join()
        asyncio.run(asyncio.sleep(0))
        def double(x): return int(numpy.array([x]).sum() * 2)
        """
    outcome = run(program, CHECKS, limits=Limits())
    assert outcome.passed, outcome.detail
    assert outcome.stdout == "thread\n"


def test_sets_of_strings_have_one_order() -> None:
    program = "print(list({str(i) for i in range(50)}))"
    assert run(program).stdout == run(program).stdout


# --- the world outside: each attempt under the kernel's protections, and under Python's alone ---

WITHOUT = {"kernel": (), "audit hook": KERNEL}


def attempt(program: str, without: str) -> Outcome:
    outcome = sandbox._run(textwrap.dedent(program), limits=QUICK, without=WITHOUT[without])
    if without == "audit hook":
        assert outcome.protections == ("audit hook",)
    elif outcome.protections != KERNEL:
        pytest.skip("needs Landlock and seccomp")
    return outcome


FORBIDDEN = {
    "a socket": "import socket; socket.socket()",
    "a connection": "import socket; socket.create_connection(('127.0.0.1', {port}), timeout=1)",
    "a web page": "import urllib.request; urllib.request.urlopen('http://127.0.0.1:{port}')",
    "a fork": "import os; os.fork()",
    "a fork bomb": "import os\nwhile True: os.fork()",
    "a program": "import subprocess; subprocess.run(['true'], check=True)",
    "a shell": "import os\nif os.system('true') != 0: raise PermissionError",
    "a replacement of the process": "import os; os.execv('/bin/true', ['true'])",
    "a worker": "import multiprocessing as m; p = m.get_context('fork').Process(target=print); p.start()",
    "a kill of the parent": "import os; os.kill(os.getppid(), 9)",
    "a kill of the group": "import os; os.killpg(os.getpgid(os.getppid()), 9)",
    "a file outside": "open({outside!r}, 'w')",
    "a file outside by climbing": "open('../escaped', 'w')",
    "a change of a file outside": "open({existing!r}, 'a')",
    "a removal outside": "import os; os.remove({existing!r})",
    "a renaming to the outside": "import os; open('a', 'w'); os.rename('a', {outside!r})",
    "a folder outside": "import os; os.mkdir({outside!r})",
    "a file by way of another folder": "import os; os.chdir({folder!r}); open('outside', 'w')",
    "a file by way of an open folder": (
        "import os; os.open('outside', os.O_CREAT | os.O_WRONLY, dir_fd=os.open({folder!r}, os.O_RDONLY))"
    ),
    "a file by way of a link": "import os; os.symlink({folder!r}, 'a'); open('a/outside', 'w')",
    "a file above an open folder": (
        "import os; os.open('../escaped', os.O_CREAT | os.O_WRONLY, dir_fd=os.open('.', os.O_RDONLY))"
    ),
    "a tree removed": "import shutil; shutil.rmtree({folder!r})",
    "a mode": "import os; os.chmod({existing!r}, 0)",
    "a mode of an open file": "import os; f = open(os.__file__); os.chmod(f.fileno(), os.stat(f.name).st_mode & 0o777)",
    "an owner": "import os; os.chown({existing!r}, -1, -1)",
    "an owner of a link": "import os; os.lchown({existing!r}, -1, -1)",
    "times": "import os; os.utime({existing!r}, (0, 0))",
    "times of an open file": (
        "import os; f = open(os.__file__); s = os.stat(f.fileno()); os.utime(f.fileno(), (s.st_atime, s.st_mtime))"
    ),
    "an attribute": "import os; os.setxattr({existing!r}, 'user.a', b'1')",
    "an attribute removed": "import os; os.removexattr({existing!r}, 'user.a')",
    "a truncation": "import os; os.truncate({existing!r}, 0)",
    "a truncation by reading": "import os; os.open({existing!r}, os.O_RDONLY | os.O_TRUNC)",
    "flags of an open file": "import fcntl; fcntl.ioctl(open(fcntl.__file__), 0x80086601, bytes(8))",
}


@pytest.mark.parametrize("without", WITHOUT)
@pytest.mark.parametrize("name", FORBIDDEN)
def test_the_outside_is_out_of_reach(name: str, without: str, tmp_path: Path) -> None:
    existing, outside = tmp_path / "existing", tmp_path / "outside"
    existing.write_text("kept")
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.0)
        port = server.getsockname()[1]
        program = FORBIDDEN[name].format(port=port, outside=str(outside), existing=str(existing), folder=str(tmp_path))
        outcome = attempt(program, without)
        with pytest.raises(BlockingIOError):
            server.accept()
    assert outcome.status == "failed"
    assert any(word in outcome.detail for word in ("Permission", "not permitted", "not allowed")), outcome.detail
    assert existing.read_text() == "kept"
    assert not outside.exists()
    assert not (Path(tempfile.gettempdir()) / "escaped").exists()


NATIVE = {
    "fork": "libc.fork()",
    "socket": "libc.socket(2, 1, 0)",
    "kill": "libc.kill(os.getppid(), 0)",
    "limits of the parent": "libc.prlimit(os.getppid(), 7, bytes(16), None)",
    "limits of its own": "libc.setrlimit(9, struct.pack('QQ', 2**63, 2**63))",
    "memory of the parent": "libc.ptrace(16, os.getppid(), 0, 0)",
    "a signal through a file": "libc.fcntl(1, 8, os.getppid())",
    "a namespace": "libc.unshare(0x10000000)",
    "a file outside": "libc.open(outside, 0x41, 0o600)",
    "another user": "libc.setuid(12345)",
    "shared memory of others": "libc.shmat(0, None, 0)",
    "removal of shared memory": "libc.shmctl(0, 0, None)",
    "a message to others": "libc.msgsnd(0, bytes(16), 8, 0o4000)",
    "a message of others": "libc.msgrcv(0, ctypes.create_string_buffer(16), 8, 0, 0o4000)",
    "removal of a queue": "libc.msgctl(0, 0, None)",
    "semaphores of others": "libc.semop(0, bytes(6), 1)",
    "removal of semaphores": "libc.semctl(0, 0, 0)",
    "a mode by the newest call": "libc.syscall(452, -100, outside, 0, 0)",
    "an attribute by the newest call": "libc.syscall(463, -100, outside, 0, b'user.a', bytes(16), 16)",
    "flags by the newest call": "libc.syscall(469, -100, outside, bytes(32), 32, 0)",
}


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("name", NATIVE)
def test_the_kernel_refuses_native_code_too(name: str, tmp_path: Path) -> None:
    program = f"""
        import ctypes, os, struct
        libc = ctypes.CDLL(None, use_errno=True)
        outside = {str(tmp_path / "outside")!r}.encode()
        result = {NATIVE[name]}
        print(result, ctypes.get_errno())
        """
    outcome = run(program)
    result, number = outcome.stdout.split()
    assert result == "-1"
    assert int(number) in (1, 13)  # EPERM, EACCES
    assert not (tmp_path / "outside").exists()


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize(
    "call", ["open(path, os.O_RDONLY | os.O_TRUNC)", "truncate(path, 0)", "syscall(437, -100, path)"]
)
def test_files_are_not_truncated_where_landlock_lets_them(call: str, tmp_path: Path) -> None:
    """Its first versions, of kernels before 6.2, know no truncation, and take opening to read for harmless."""
    existing = tmp_path / "existing"
    existing.write_text("kept")
    program = f"""
        import ctypes, os
        libc, path = ctypes.CDLL(None, use_errno=True), {str(existing)!r}.encode()
        print(libc.{call}, ctypes.get_errno())
        """
    outcome = sandbox._run(textwrap.dedent(program), limits=QUICK, without=("landlock",))
    assert outcome.stdout in ("-1 1\n", "-1 38\n")  # EPERM, ENOSYS
    assert existing.read_text() == "kept"


@pytest.mark.usefixtures("kernel")
def test_files_of_the_user_cannot_be_read(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("hunter2")
    for path in (secret, "/proc/self/environ", "/etc/passwd"):
        outcome = run(f"print(open({str(path)!r}).read())")
        assert outcome.detail.startswith("PermissionError"), path


@pytest.mark.usefixtures("kernel")
def test_root_gives_up_its_rights() -> None:
    program = "import resource\nresource.setrlimit(resource.RLIMIT_AS, (1 << 40, 1 << 40))"
    assert run(program).status == "failed"


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_filters_of_calls_jump_only_within_themselves(machine: str) -> None:
    """Each instruction is 8 bytes; a jump past the end would make the kernel refuse the whole filter."""
    program = sandbox_child._filter(machine, 1234)
    assert program is not None
    count = len(program) // 8
    assert count < 256
    for i in range(count):
        if program[8 * i] & 7 == 5:  # a jump
            assert i + 1 + max(program[8 * i + 2 : 8 * i + 4]) < count
    assert program[-8] == 6  # the last one returns
    assert sandbox_child._filter("riscv64", 1234) is None


def test_runs_leave_no_process_and_no_open_file(monkeypatch: pytest.MonkeyPatch) -> None:
    processes = []
    start = sandbox._start

    def recorded(folder: str) -> tuple[Any, int]:
        process, report = start(folder)
        processes.append(process)
        return process, report

    monkeypatch.setattr(sandbox, "_start", recorded)
    for program in ("import time; time.sleep(60)", "x = 1"):
        run(program, limits=Limits(wall_seconds=0.3))
    for process in processes:
        assert process.returncode is not None
        assert all(stream.closed for stream in (process.stdin, process.stdout, process.stderr))
        with pytest.raises(ProcessLookupError):
            os.killpg(process.pid, 0)


# --- calls and their values ---

VALUES = [
    None,
    True,
    0,
    -(2**80),
    1.5,
    float("inf"),
    1j,
    "é\ud800",
    b"\0a",
    [],
    (1, [2, (3,)]),
    {1, 2},
    {"a": {1: (2,)}},
]


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_values_cross_the_border_with_their_types(value: object) -> None:
    outcome = run_calls("def same(x): return x", "same", [[value]], limits=QUICK)
    assert outcome.passed
    returned = outcome.calls[0].value
    assert returned == value
    assert type(returned) is type(value)


def test_each_call_has_its_own_end() -> None:
    program = "class Solution:\n    def root(self, x):\n        return x ** 0.5 if x >= 0 else 1 / 0"
    outcome = run_calls(program, "Solution.root", [[4], [-1], ["a"], [9.0]], limits=QUICK)
    assert [call.value for call in outcome.calls] == [2.0, None, None, 3.0]
    assert outcome.calls[1].error == "ZeroDivisionError: division by zero"
    assert outcome.passed


def test_calls_end_with_the_process() -> None:
    outcome = run_calls(
        "import os\ndef f(x): return x if x < 2 else os._exit(0)", "f", [[0], [1], [2], [3]], limits=QUICK
    )
    assert [call.value for call in outcome.calls] == [0, 1]
    assert outcome.status == "killed"


def test_objects_that_equal_everything_do_not_leave_the_sandbox() -> None:
    program = "class Any:\n    def __eq__(self, other): return True\ndef f(): return Any()"
    call = run_calls(program, "f", [[]], limits=QUICK).calls[0]
    assert call.error == "TypeError: a value of type Any cannot leave the sandbox"
    nested = run_calls("def f():\n    x = []\n    x.append(x)\n    return x", "f", [[]], limits=QUICK).calls[0]
    assert nested.error == "ValueError: nested too deep"


def test_numbers_of_numpy_and_tuples_with_names_become_plain() -> None:
    program = """
        import collections, numpy
        pair = collections.namedtuple("pair", "a b")
        def f(): return [numpy.float64(1.5), numpy.arange(2), pair(1, 2), iter([3])]
        """
    assert run_calls(textwrap.dedent(program), "f", [[]]).calls[0].value == [1.5, [0, 1], (1, 2), [3]]


@pytest.mark.parametrize("value", [[1], ["object", []], ["tuple"], ["int", []], {"a": 1}, ["float", "x"], 1.5])
def test_what_is_no_encoded_value_is_refused(value: object) -> None:
    with pytest.raises((ValueError, TypeError)):
        sandbox_child.decode(value)


def test_values_that_are_slow_to_rebuild_are_refused() -> None:
    """Numbers whose hashes are equal made the caller wait without end, under no limit: 50,000 take a minute."""
    prime = sys.hash_info.modulus
    numbers = [["int", hex(prime * i)] for i in range(1, 50_000)]
    for value in (["set", numbers], ["dict", [[number, 0] for number in numbers]]):
        started = time.monotonic()
        with pytest.raises(ValueError, match="too many values with one hash"):
            sandbox_child.decode(value)
        assert time.monotonic() - started < 5.0
    assert sandbox_child.decode(sandbox_child.encode(set(range(-500, 500)))) == set(range(-500, 500))


# --- the caller's mistakes ---


@pytest.mark.parametrize(
    "limits", [{"cpu_seconds": 0}, {"memory_bytes": -1}, {"wall_seconds": 0.0}, {"cpu_seconds": 1.5}]
)
def test_limits_must_be_positive(limits: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=next(iter(limits))):
        Limits(**limits)  # type: ignore[arg-type]


def test_a_sandbox_that_cannot_start_is_no_verdict_on_the_program() -> None:
    with pytest.raises(StateError, match="did not start"):
        run("x = 1", limits=Limits(memory_bytes=1 << 20))


def test_windows_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox.sys, "platform", "win32")
    with pytest.raises(ConfigError, match="Windows"):
        run("x = 1")
