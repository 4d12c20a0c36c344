"""The native core under AddressSanitizer and UndefinedBehaviorSanitizer (tests/native/sanitize_program.cpp)."""

from __future__ import annotations

import os
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from replicator import _native

NATIVE = Path(__file__).parents[2] / "native"
PROGRAM = Path(__file__).with_name("sanitize_program.cpp")
# -O1: no check is optimised away, and the compiler needs half the time.
FLAGS = ["-std=c++20", "-O1", "-g1", "-Wall", "-Wextra", "-Werror", "-pthread", f"-I{NATIVE}"]
SANITIZE = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
ENVIRONMENT = {
    **{name: value for name, value in os.environ.items() if name != "LD_PRELOAD"},
    # Leaks are looked for with ptrace, which containers often forbid.
    "ASAN_OPTIONS": "detect_leaks=0:detect_stack_use_after_return=1",
    "UBSAN_OPTIONS": "print_stacktrace=1",
}


def run(*command: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, timeout=100, env=ENVIRONMENT)


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """sanitize_program, built together with all of native/ but the Python module."""
    folder = tmp_path_factory.mktemp("sanitized")
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("no g++ on the PATH")
    nothing = folder / "nothing.cpp"
    nothing.write_text("int main() {}\n")
    probe = run(compiler, *SANITIZE, nothing, "-o", folder / "nothing")
    if probe.returncode != 0:
        pytest.skip(f"g++ builds nothing with {' '.join(SANITIZE)}, libasan and libubsan come with it: {probe.stderr}")
    sources = [PROGRAM, *(path for path in sorted(NATIVE.glob("*.cpp")) if path.name != "module.cpp")]

    def build(source: Path) -> Path:
        made = run(compiler, *FLAGS, *SANITIZE, "-c", source, "-o", folder / f"{source.stem}.o")
        assert made.returncode == 0, made.stderr
        return folder / f"{source.stem}.o"

    with ThreadPoolExecutor(2) as pool:
        objects = list(pool.map(build, sources))
    linked = run(compiler, *SANITIZE, "-pthread", *objects, "-o", folder / "sanitized")
    assert linked.returncode == 0, linked.stderr
    return folder / "sanitized"


def test_nothing_is_overrun_and_nothing_undefined(program: Path) -> None:
    """All functions, all kernels of this processor, odd sizes, alignments, short reads, ends and cancellations."""
    ran = run(program)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert ran.stdout.split() == ["kernels:", *_native.kernels()], "the installed core is another one than native/"


@pytest.mark.parametrize(
    ("misuse", "report"),
    [
        ("overrun-read", "heap-buffer-overflow"),
        ("overrun-write", "heap-buffer-overflow"),
        ("overrun-stream", "SEGV"),
        ("undefined", "signed integer overflow"),
    ],
)
def test_what_is_wrong_is_noticed(program: Path, misuse: str, report: str) -> None:
    """The test above can fail: the same program ends with a report when a buffer is a byte too short."""
    ran = run(program, misuse)
    assert ran.returncode != 0
    assert report in ran.stderr
