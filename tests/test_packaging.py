"""The distribution holds our packages and nothing else, and nothing in it reaches up a layer."""

import ast
import email
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TOP_LEVEL = {"common", "kvtransfer", "prefill_node", "decode_node", "router", "pdserve"}
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def packages_on_disk() -> set[str]:
    """Every folder with .py files below the flat packages, dotted."""
    files = [path for name in TOP_LEVEL - {"pdserve"} for path in (ROOT / name).rglob("*.py")]
    return {".".join(path.parent.relative_to(ROOT).parts) for path in files}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """Built from a copy: setuptools leaves build/ and *.egg-info in the tree it builds from."""
    source, target = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    names = [*(TOP_LEVEL - {"pdserve"}), "pdserve.py", "pyproject.toml", "README.md", "LICENSE"]
    subprocess.run(["cp", "-r", *(str(ROOT / name) for name in names), str(source)], check=True)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--disable-pip-version-check", "--no-build-isolation", "--no-deps", "--no-index"]
    subprocess.run([*command, "--wheel-dir", str(target), str(source)], check=True, timeout=100)
    [path] = target.glob("*.whl")
    return zipfile.ZipFile(path)


def test_pyproject_lists_every_package() -> None:
    assert set(PROJECT["tool"]["setuptools"]["packages"]) == packages_on_disk()


def test_every_package_has_an_init_file() -> None:
    """A folder without one would be a namespace package, which anything of that name on the path joins."""
    assert [name for name in packages_on_disk() if not (ROOT / name.replace(".", "/") / "__init__.py").exists()] == []


def test_tests_are_no_package() -> None:
    """An __init__.py there makes `import router` find tests/router."""
    assert list((ROOT / "tests").rglob("__init__.py")) == []


def test_wheel_has_exactly_our_top_level_names(wheel: zipfile.ZipFile) -> None:
    [name] = [name for name in wheel.namelist() if name.endswith("top_level.txt")]
    assert set(wheel.read(name).decode().split()) == TOP_LEVEL
    assert {path.split("/")[0].removesuffix(".py") for path in wheel.namelist() if ".dist-info/" not in path} == TOP_LEVEL


def test_wheel_holds_every_module(wheel: zipfile.ZipFile) -> None:
    on_disk = {str(path.relative_to(ROOT)) for name in TOP_LEVEL - {"pdserve"} for path in (ROOT / name).rglob("*.py")}
    assert {name for name in wheel.namelist() if name.endswith(".py")} == on_disk | {"pdserve.py"}


def test_wheel_says_licence_version_and_entry_point(wheel: zipfile.ZipFile) -> None:
    [metadata] = [email.message_from_bytes(wheel.read(name)) for name in wheel.namelist() if name.endswith("/METADATA")]
    assert (metadata["Name"], metadata["Version"], metadata["License-Expression"]) == ("pdserve", PROJECT["project"]["version"], "Apache-2.0")
    assert any(name.endswith("licenses/LICENSE") for name in wheel.namelist())
    [entry_points] = [wheel.read(name).decode() for name in wheel.namelist() if name.endswith("entry_points.txt")]
    assert "pdserve = pdserve:main" in entry_points


def test_no_package_imports_the_command_line() -> None:
    """The top layer, which import-linter cannot check: it takes packages, and this is a module."""
    for package in TOP_LEVEL - {"pdserve"}:
        for path in (ROOT / package).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Import):
                    assert "pdserve" not in [alias.name for alias in node.names], path
                elif isinstance(node, ast.ImportFrom):
                    assert node.module != "pdserve", path


def test_constraints_pin_what_is_required() -> None:
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line and not line.startswith("#")]
    requirements = [*PROJECT["project"]["dependencies"], *PROJECT["project"]["optional-dependencies"]["test"]]
    assert {name_of(requirement) for requirement in requirements} - {name_of(line) for line in lines} == set()


def name_of(requirement: str) -> str:
    return re.split(r"[=<>~\[ ]", requirement)[0].lower().replace("_", "-")
