"""Where no C++ compiler is found the package is built without its native core, works, and says so."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2]
# What a build needs beside Python. Compilers are not among them, so the PATH made of these has none.
BUILD_TOOLS = ("cmake", "ninja", "sh", "env", "uname")

PROBE = """
import json, socket, threading
from replicator import native
left, right = socket.socketpair()
sent = bytes(range(256)) * 64
threading.Thread(target=left.sendall, args=(sent,)).start()
received = bytearray(len(sent))
crcs = native.recv_crc32c(right.fileno(), received, block_size=4096, progress_timeout_s=5.0)
print(json.dumps({
    "implementation": native.IMPLEMENTATION,
    "reason": native.FALLBACK_REASON,
    "check": native.crc32c(b"123456789"),
    "received": bytes(received) == sent,
    "combined": native.combine_blocks(crcs, len(sent), 4096) == native.crc32c(sent),
    "copied": native.copy_crc32c(bytearray(9), b"123456789"),
}))
"""


def build_wheel(folder: Path) -> Path:
    """A wheel of this source tree, built while no compiler is on the PATH or in CXX."""
    tools = folder / "tools"
    tools.mkdir()
    for name in BUILD_TOOLS:
        found = shutil.which(name)
        if found:
            (tools / name).symlink_to(Path(found).resolve())
    # CMake also looks in /usr/bin; a CXX that does not exist is the one answer it takes for "there is none".
    environ = {key: value for key, value in os.environ.items() if key not in ("CC", "CFLAGS", "CXXFLAGS")}
    environ |= {"PATH": str(tools), "CXX": str(folder / "no-such-compiler")}
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(folder)]
    made = subprocess.run(
        [*pip, "--config-settings", f"build-dir={folder / 'build'}", str(SOURCE)],
        env=environ,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert made.returncode == 0, made.stdout + made.stderr
    return next(folder.glob("replicator-*.whl"))


@pytest.mark.timeout(360)
def test_wheel_without_compiler_works_and_says_why(tmp_path: Path) -> None:
    wheel = build_wheel(tmp_path)
    installed = tmp_path / "installed"
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        archive.extractall(installed)
    assert not [name for name in names if Path(name).name.startswith("_native") and name.endswith(".so")], (
        "a compiler was found after all"
    )
    assert "replicator/v1/peer_pb2.py" in names

    # -S: no .pth file is read, so the editable install of the running environment stays out of the way.
    path = [str(installed), sysconfig.get_path("purelib"), sysconfig.get_path("platlib")]
    ran = subprocess.run(
        [sys.executable, "-S", "-c", f"import sys; sys.path[:0] = {path!r}\n{PROBE}"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert ran.returncode == 0, ran.stderr
    told = json.loads(ran.stdout)
    assert told["implementation"] == "python"
    assert told["reason"].strip(), "the fallback gives no reason"
    assert told["check"] == told["copied"] == 0xE3069283
    assert told["received"]
    assert told["combined"]
