"""Agents that several tests share."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster import Cluster, cluster


@pytest.fixture(scope="session")
def agents() -> Iterator[Cluster]:
    """Three nodes for all tests that leave their agents alone."""
    path = Path(tempfile.mkdtemp(prefix="replicator-test-", dir="/dev/shm"))
    try:
        with cluster(path, 3) as made:
            yield made
    finally:
        shutil.rmtree(path, ignore_errors=True)


@pytest.fixture
def three(agents: Cluster) -> Cluster:
    """A new job on the three nodes that tests share."""
    return agents.new_job()


@pytest.fixture
def own_three(shm_root: Path) -> Iterator[Cluster]:
    """Three nodes for one test, which may kill them, in a job."""
    with cluster(shm_root, 3) as made:
        made.join()
        yield made


@pytest.fixture(scope="session")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An authority (ca), a certificate of it (node), and one of another authority (other)."""
    folder = tmp_path_factory.mktemp("tls")

    def openssl(*words: str) -> None:
        subprocess.run(["openssl", *words], cwd=folder, check=True, capture_output=True)

    key = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2"]
    (folder / "ext").write_text("subjectAltName=IP:127.0.0.1")
    for authority, leaf in (("ca", "node"), ("other-ca", "other")):
        openssl(
            "req", "-x509", *key, "-subj", f"/CN={authority}", "-keyout", f"{authority}.key", "-out", f"{authority}.pem"
        )
        openssl("req", *key[:-2], "-subj", f"/CN={leaf}", "-keyout", f"{leaf}.key", "-out", f"{leaf}.csr")
        openssl(
            *("x509", "-req", "-in", f"{leaf}.csr", "-CA", f"{authority}.pem", "-CAkey", f"{authority}.key"),
            *("-CAcreateserial", "-days", "2", "-extfile", "ext", "-out", f"{leaf}.pem"),
        )
    return folder
