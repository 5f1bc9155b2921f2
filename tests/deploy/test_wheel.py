"""The wheel and the editable installation: files, command, service and the README's Python."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.deploy import processes
from tools.docs import conversation
from tools.docs.conversation import normalised

ROOT = Path(__file__).parents[2]
PACKAGES = ("app", "calibrators", "models")
PYCON = re.compile(r"^```pycon\n.*?^```$", re.MULTILINE | re.DOTALL)

PLAY = """
import pathlib, runpy, sys
import boxcal
url, readme, conversation = sys.argv[1:]
assert pathlib.Path(boxcal.__file__).is_relative_to(sys.prefix), boxcal.__file__
play = runpy.run_path(conversation)["Conversation"](url, pathlib.Path.cwd()).played
sys.stdout.write(play(pathlib.Path(readme).read_text()))
"""


def run(*command: str | Path, cwd: Path) -> str:
    """Run a command without anything of this checkout in its environment; give its output."""
    own = {name: value for name, value in os.environ.items() if name != "PYTHONPATH" and "BOXCAL" not in name}
    done = subprocess.run(command, cwd=cwd, env=own, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def copy_checkout(source: Path) -> Path:
    for package in PACKAGES:
        shutil.copytree(ROOT / package, source / package, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(ROOT / "boxcal", source / "boxcal", symlinks=True)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    return source


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Give the folder of the wheel and the source archive: DIST, or built from a copy of the checkout."""
    if "DIST" in os.environ:
        return Path(os.environ["DIST"])
    source = copy_checkout(tmp_path_factory.mktemp("source"))
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", source / "dist", cwd=source)
    return source / "dist"


def empty_environment(home: Path) -> Path:
    """Create an environment that borrows the dependencies of this one; give its folder of packages."""
    venv.create(home, symlinks=True)
    packages = Path(sysconfig.get_path("purelib", "venv", {"base": str(home)}))
    # A path in a .pth file brings the packages of a folder, but not its own .pth files: no editable boxcal.
    folders = [folder for folder in sys.path if folder.endswith("site-packages")]
    (packages / "dependencies.pth").write_text("\n".join(folders))
    return packages


@pytest.fixture(scope="module")
def environment(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Install the wheel into an empty environment."""
    home = tmp_path_factory.mktemp("environment")
    packages = empty_environment(home)
    (wheel,) = built.glob("*.whl")
    python = home / "bin" / "python"
    run(
        sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index", wheel, cwd=home
    )
    bring_compiled_loops(packages / "boxcal" / "calibrators")
    return home


def bring_compiled_loops(installed: Path) -> None:
    """Copy what numba compiled for the checkout, which it takes for current by the sources' times."""
    source = ROOT / "calibrators"
    for module in installed.rglob("*.py"):
        shutil.copystat(source / module.relative_to(installed), module)
    for cached in source.rglob("*.nb[ci]"):
        copy = installed / cached.relative_to(source)
        copy.parent.mkdir(exist_ok=True)
        shutil.copy2(cached, copy)


def source_files() -> set[str]:
    return {
        f"boxcal/{path.relative_to(ROOT)}"
        for package in PACKAGES
        for path in (ROOT / package).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts and path.name != ".gitignore"
    } | {"boxcal/__init__.py", "boxcal/py.typed"}


def test_the_wheel_holds_every_file_in_one_package(built: Path) -> None:
    (wheel,) = built.glob("*.whl")
    files = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert files == source_files()


def test_the_source_archive_holds_every_file(built: Path) -> None:
    (archive,) = built.glob("*.tar.gz")
    with tarfile.open(archive) as packed:
        files = {name.partition("/")[2] for name in packed.getnames()}
    assert source_files() | {"pyproject.toml", "README.md", "LICENSE"} <= files


def test_an_editable_clone_is_imported_from_every_folder(tmp_path: Path) -> None:
    clone = copy_checkout(tmp_path / "boxcal")
    empty_environment(tmp_path / "environment")
    python = tmp_path / "environment" / "bin" / "python"
    (options,) = re.findall(r"^EDITABLE := (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    run(sys.executable, "-m", "pip", "--python", python, "install", *options.split(), cwd=clone)
    (tmp_path / "elsewhere").mkdir()
    for folder in (tmp_path, clone, tmp_path / "elsewhere"):
        found = run(python, "-c", "import boxcal; print(boxcal.BoxcalClient, boxcal.__file__)", cwd=folder)
        assert str(clone / "boxcal" / "__init__.py") in found


@pytest.fixture
def service(environment: Path, tmp_path: Path) -> Iterator[str]:
    with processes.service(tmp_path, environment / "bin" / "boxcal") as url:
        yield url


@pytest.mark.long
def test_the_readmes_python_runs_against_the_installed_service(
    environment: Path, service: str, tmp_path: Path
) -> None:
    documents = (ROOT / name for name in ("README.md", "docs/api/calibrators.md"))
    blocks = "\n".join(block for document in documents for block in PYCON.findall(document.read_text()))
    assert "BoxcalClient" in blocks
    (tmp_path / "blocks.md").write_text(blocks)
    folder = tmp_path / "reader"
    folder.mkdir()
    script = ("-c", PLAY, service, str(tmp_path / "blocks.md"), conversation.__file__)
    played = run(environment / "bin" / "python", *script, cwd=folder)
    assert normalised(played) == normalised(blocks)
