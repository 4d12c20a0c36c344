"""The documents tell the truth where a machine can check it: settings, links, commands, targets."""

from __future__ import annotations

import dataclasses
import re
import subprocess
import sys
from pathlib import Path

import pytest

from replicator.admin.cli import COMMANDS, build_parser
from replicator.config import CLIENT_ENV, ENV_PREFIX, AgentConfig, default_root

SOURCE = Path(__file__).parents[2]
DOCUMENTS = sorted([SOURCE / "README.md", *SOURCE.glob("docs/*.md"), *SOURCE.glob("deploy/**/*.md")])


def table(text: str, heading: str) -> list[list[str]]:
    """The cells of the first table below a heading, without its head."""
    rows = []
    for line in text.split(heading, 1)[1].splitlines():
        if line.startswith("|"):
            rows.append([cell.strip() for cell in line.strip("|").split("|")])
        elif rows:
            break
    return rows[2:]


def code_blocks(path: Path) -> list[str]:
    """Commands shown in a document: lines of shell blocks, without comments."""
    blocks = re.findall(r"^```(?:sh|bash)\n(.*?)^```", path.read_text(), flags=re.MULTILINE | re.DOTALL)
    lines = re.sub(r"\\\n\s*", " ", "\n".join(blocks)).splitlines()
    return [line.split("  #")[0].strip() for line in lines if line.strip() and not line.startswith("#")]


def test_every_setting_of_the_agent_is_in_the_table_with_its_default() -> None:
    rows = table((SOURCE / "docs" / "configuration.md").read_text(), "## Settings of the agent")
    told = {row[0].strip("`"): row[1].strip("`") for row in rows}
    fields = {item.name: item for item in dataclasses.fields(AgentConfig)}
    assert list(told) == list(fields), "every field, in the order of AgentConfig"
    for name, item in fields.items():
        if name in ("root", "node_id"):
            continue  # computed, told in words
        value = item.default
        text = str(value).lower() if isinstance(value, bool) else str(value).removesuffix(".0")
        assert told[name] == (text or "empty") or (value == () and told[name] == "none"), name
    assert default_root().startswith("/dev/shm/replicator-")


def test_variables_that_the_documents_name_exist() -> None:
    known = {ENV_PREFIX + item.name.upper() for item in dataclasses.fields(AgentConfig)} | CLIENT_ENV
    for path in DOCUMENTS:
        named = set(re.findall(r"\bREPLICATOR_[A-Z_]+[A-Z]\b", path.read_text()))
        assert named <= known, f"{path.name}: {named - known}"


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(SOURCE)))
def test_links_lead_somewhere(path: Path) -> None:
    for target in re.findall(r"\]\(([^)]+)\)", path.read_text()):
        if "://" in target:
            continue
        file, _, anchor = target.partition("#")
        linked = path.parent / file if file else path
        assert linked.exists(), target
        if anchor and linked.suffix == ".md":
            heads = re.findall(r"^#+ (.+)$", linked.read_text(), flags=re.MULTILINE)
            slugs = {re.sub(r"[^\w\- ]", "", head.lower()).strip().replace(" ", "-") for head in heads}
            assert anchor in slugs, target


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(SOURCE)))
def test_files_that_are_named_exist(path: Path) -> None:
    named = re.findall(r"`((?:replicator|native|protos|deploy|docs|tests)/[\w./-]*\w/?)`", path.read_text())
    for name in named:
        assert (SOURCE / name).exists(), name


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(SOURCE)))
def test_commands_that_are_shown_are_understood(path: Path) -> None:
    """replicator-admin's parser, the agent's parser and make accept every line that is shown."""
    for line in code_blocks(path):
        words = line.split("|")[0].split()
        if words[0] == "replicator-admin":
            build_parser(words[1:]).parse_args(words[1:])
            assert words[1] in COMMANDS or words[1].startswith("-")
        elif words[0] == "make":
            made = subprocess.run(["make", "-n", *words[1:2]], cwd=SOURCE, capture_output=True, text=True, timeout=30)
            assert made.returncode == 0, made.stderr
        elif words[0] == "replicator-agent":
            from replicator.agent.__main__ import parser

            parser().parse_args(words[1:])


def test_the_readme_shows_what_it_promises() -> None:
    first_screen = (SOURCE / "README.md").read_text().splitlines()[:40]
    text = "\n".join(first_screen)
    assert "make demo" in text
    assert "make test" in text


def test_importing_the_agent_does_not_load_torch() -> None:
    """Neither the agent, the command line, nor the package itself."""
    for module in ("replicator", "replicator.agent.daemon", "replicator.admin.cli", "replicator.demo.cli"):
        code = f"import sys, {module}; sys.exit('torch' in sys.modules)"
        assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0, module
