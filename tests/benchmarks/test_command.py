"""`python -m benchmarks`: its help, its JSON and its exit status, at sizes that mean nothing."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks.__main__ import EXIT_INVALID, EXIT_USAGE
from benchmarks.harness import Settings
from benchmarks.peers.environment import NotAvailableError, Recipe, ensure
from benchmarks.results import schema_errors
from benchmarks.worker import Worker, WorkerError

ROOT = Path(__file__).parents[2]
TINY = ("--size", "1M", "--runs", "1", "--no-quiet-check", "--no-peers")


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "benchmarks", *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=110)


def test_help_documents_the_exit_status_and_hides_what_is_for_tests() -> None:
    done = run("--help")
    assert done.returncode == 0
    assert "--quick" in done.stdout
    assert "results are not valid" in done.stdout
    assert "--size" not in done.stdout


def test_an_unknown_measurement_is_a_usage_error() -> None:
    done = run("--only", "nonsense")
    assert done.returncode == EXIT_USAGE
    assert "found 'nonsense'" in done.stderr


def test_results_that_could_not_be_written_are_a_usage_error(tmp_path: Path) -> None:
    """Found before the measurements, which take minutes."""
    for option in ("--json", "--markdown"):
        done = run("--only", "limits", option, str(tmp_path / "missing" / "out"), *TINY)
        assert done.returncode == EXIT_USAGE
        assert "missing/out" in done.stderr


def test_limits_give_valid_json_that_is_not_called_a_valid_result(shm_root: Path) -> None:
    """One run of a few microseconds is no measurement, and the command says so."""
    file = shm_root / "out.json"
    markdown = shm_root / "out.md"
    done = run("--only", "limits", "--json", str(file), "--markdown", str(markdown), "--dir", str(shm_root), *TINY)
    assert done.returncode == EXIT_INVALID, done.stderr
    rows = json.loads(file.read_text())
    assert schema_errors(rows) == []
    by_name = {row["name"]: row for row in rows}
    assert by_name["limit_memcpy"]["unit"] == "GB/s"
    assert by_name["limit_memcpy"]["value"] > 0
    assert set(by_name["limit_tcp_1"]["cpu_s_per_gb_by_process"]) == {"sender", "receiver"}
    assert not any(row["valid"] for row in rows)
    assert "| what | value |" in markdown.read_text()
    assert {path.name for path in shm_root.iterdir()} == {"out.json", "out.md"}


def test_a_worker_tells_what_went_wrong() -> None:
    with pytest.raises(WorkerError, match=r"copy into .*|No such file"):
        Worker("benchmarks.limits:CopyRole", {"directory": "/nonexistent", "size": 4096})


def test_a_peer_that_cannot_be_installed_is_not_available(tmp_path: Path) -> None:
    recipe = Recipe("absent", ("no-such-distribution-for-replicator",), "pass", options=("--no-index",))
    with pytest.raises(NotAvailableError, match=r"pip failed: .*no-such-distribution"):
        ensure(recipe, Settings(cache=tmp_path, log=lambda _: None))


def test_a_quick_run_does_not_compile_a_peer(tmp_path: Path) -> None:
    recipe = Recipe("compiled", ("anything",), "pass", builds=True)
    with pytest.raises(NotAvailableError, match="compiled when installed"):
        ensure(recipe, Settings(cache=tmp_path, quick=True, log=lambda _: None))


def test_real_agents_and_trainers_are_measured(shm_root: Path) -> None:
    """Nothing fails, and every row says which processes it is made of. The figures mean nothing at this size."""
    file = shm_root / "out.json"
    done = run(
        *("--only", "replicate", "--only", "load", "--only", "memory"),
        "--json",
        str(file),
        "--dir",
        str(shm_root),
        *TINY,
    )
    assert done.returncode == EXIT_INVALID, done.stderr
    rows = {row["name"]: row for row in json.loads(file.read_text())}
    assert schema_errors(list(rows.values())) == []
    assert set(rows["replicate"]["cpu_s_per_gb_by_process"]) == {"trainer", "agent 0", "agent 1"}
    assert rows["replicate"]["bar"] == "ratio >= 0.85"
    assert rows["replicate_cpu"]["value"] == rows["replicate"]["cpu_s_per_gb"]
    assert rows["replicate_vs_nixl"]["verdict"] == "not available"
    assert rows["load"]["ratio"] > 0
    assert rows["memory_buddy"]["details"]["objects"] == rows["memory_owner"]["details"]["objects"] == 2
    assert {path.name for path in shm_root.iterdir()} == {"out.json"}


def test_an_empty_node_is_restored_in_both_ways(shm_root: Path) -> None:
    file = shm_root / "out.json"
    done = run("--only", "restore", "--json", str(file), "--dir", str(shm_root), *TINY)
    assert done.returncode == EXIT_INVALID, done.stderr
    (row,) = json.loads(file.read_text())
    assert (row["name"], row["limit_name"]) == ("restore_empty_node", "retrieve into the store, then load")
    assert row["ratio"] > 0
    assert {path.name for path in shm_root.iterdir()} == {"out.json"}


def test_agents_end_with_the_program_however_it_ends(shm_root: Path) -> None:
    program = f"""
import os, signal
from pathlib import Path
from benchmarks.cluster import start_agents
from benchmarks.harness import Settings
(agent,) = start_agents(1, Settings(directory=Path({str(shm_root)!r})))
print(agent.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=100, cwd=ROOT)
    pid = int(done.stdout)
    end = time.monotonic() + 30
    while Path(f"/proc/{pid}").exists() and "Z (zombie)" not in Path(f"/proc/{pid}/status").read_text():
        assert time.monotonic() < end
        time.sleep(0.02)
