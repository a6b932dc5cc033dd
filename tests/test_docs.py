"""What the documents name exists: paths, modules, flags, metrics, make targets."""

import re
import subprocess
from pathlib import Path

import pytest

from kvtransfer.figures import RoomFigures, WriteFigures, peer_stats
from kvtransfer.link_dial import DialState
from pdserve import build_parser

ROOT = Path(__file__).parents[1]
NAMES = ("README.md", "CHANGELOG.md", "deploy/README.md", "bench/README.md", "router/README.md")
DOCUMENTS = sorted(path for path in (ROOT / name for name in NAMES) if path.exists())
PACKAGES = ("common", "kvtransfer", "prefill_node", "decode_node", "router")
FOREIGN_FLAGS = {"--no-deps"}  # of other programs
SUFFIXES = (".py", ".md", ".toml", ".txt", ".sh", ".yaml")


def in_backticks(document: Path) -> list[str]:
    return re.findall(r"(?<!`)`([^`\n]+)`(?!`)", document.read_text())


def words(document: Path) -> list[str]:
    return [word.strip(",;:()") for text in in_backticks(document) for word in text.split()]


def test_the_readme_is_there() -> None:
    assert ROOT / "README.md" in DOCUMENTS


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_paths_exist(document: Path) -> None:
    """A word that ends in / or in a suffix of ours is a path from the root, or beside a folder named before it in the same line."""
    missing = []
    for line in document.read_text().splitlines():
        folders = [ROOT, document.parent]
        for word in re.findall(r"`([^`\s]+)`", line):
            if word.startswith(("/", "~", "http")) or "*" in word or not word.endswith(("/", *SUFFIXES)) or word in SUFFIXES:
                continue
            found = [folder / word for folder in folders if (folder / word).exists()]
            if not found:
                missing.append(word)
            elif word.endswith("/"):
                folders.append(found[0])
    assert not missing


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_modules_exist(document: Path) -> None:
    dotted = [word for word in words(document) if re.fullmatch(rf"({'|'.join(PACKAGES)})(\.\w+)+", word) and not word.endswith(SUFFIXES)]
    missing = [word for word in dotted if not (ROOT / word.replace(".", "/")).is_dir() and not (ROOT / (word.replace(".", "/") + ".py")).exists()]
    assert not missing


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_flags_exist(document: Path) -> None:
    """In backticks, in code blocks and in prose: a flag is of one of our commands, or of a program in bench/."""
    _, commands = build_parser()
    flags = {option for parser in commands.values() for action in parser._actions for option in action.option_strings}
    for program in (ROOT / "bench").glob("*.py"):
        flags |= set(re.findall(r'"(--[a-z][a-z-]*)"', program.read_text()))
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", document.read_text()))
    assert named - flags - FOREIGN_FLAGS == set()


def test_commands_in_the_readme_parse() -> None:
    """Every `pdserve ...` line of a code block is accepted by the command line."""
    lines = re.findall(r"^    pdserve (.+)$", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert len(lines) >= 3
    for line in lines:
        build_parser()[0].parse_args(line.split())


def test_metrics_exist() -> None:
    """A metric is named in full, or by the part after pdserve_, in some source file, or is one that the transfer sessions put together."""
    sources = "\n".join(path.read_text() for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
    figures = {**RoomFigures("offer_wait", "wait").stats(), **WriteFigures().stats(0.0), **peer_stats(DialState, [], [], 0.0)}
    for metric in set(re.findall(r"`(pdserve_[a-z_]+)`", (ROOT / "README.md").read_text())):
        stem = metric.removeprefix("pdserve_")
        if stem in figures:
            continue
        forms = {stem, stem.removesuffix("_total"), stem.removesuffix("_seconds")}
        spellings = [spelling for form in forms for spelling in (f'"{form}"', f'"pdserve_{form}"', f"'{form}{{")]  # the last one: with labels
        assert any(spelling in sources for spelling in spellings), metric


def test_make_targets_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for target in set(re.findall(r"make ([a-z]+)", " ".join(in_backticks(ROOT / "README.md")))) | {"serve", "test"}:
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


def test_make_without_a_target_lists_them() -> None:
    done = subprocess.run(["make", "--no-print-directory"], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    targets = [line.split(":")[0] for line in done.stdout.splitlines()]
    assert targets == ["make serve", "make test", "make lint", "make model", "make bench", "make compare", "make vllm", "make clean"]


def test_every_package_is_in_the_module_map() -> None:
    readme = (ROOT / "README.md").read_text()
    for package in [f"{path.parent.relative_to(ROOT)}/" for name in PACKAGES for path in (ROOT / name).rglob("__init__.py")]:
        assert f"`{package}" in readme, package
