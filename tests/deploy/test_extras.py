"""Each extra installs all that it needs: every other package is hidden from the import system."""

from __future__ import annotations

import importlib.metadata
import re
import subprocess
import sys
import tomllib
from collections.abc import Collection
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from packaging.requirements import Requirement

from boxcal.app.cli import output
from boxcal.app.client import BoxcalClient
from boxcal.calibrators.method import reads_of_methods
from boxcal.models import BackboneError
from boxcal.models.backends.onnx_file import RUNTIMES, check_one_runtime, installed_runtimes
from tests.app.fitting.validation_data import overconfident
from tests.deploy import processes
from tools import resolve

ROOT = Path(__file__).parents[2]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
HEAVY = {"torch", "numba", "scipy", "sklearn", "fastapi", "uvicorn", "sqlalchemy", "onnxruntime", "PIL"}

HIDE = """
import importlib.util, sys
hidden = set(sys.argv[1].split())
class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in hidden:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Hidden())
find = importlib.util.find_spec
importlib.util.find_spec = lambda name: None if name in hidden else find(name)
"""

CLIENT = """
import boxcal
from boxcal import AsyncBoxcalClient, BoxcalClient
with BoxcalClient("http://127.0.0.1:9") as client:
    assert callable(client.predict)
assert boxcal.__version__.count(".") >= 2
"""
NAMES = """
import boxcal
for name in ("evaluate", "methods", "fit", "Bounds", "BoxCalibrator"):
    try:
        getattr(boxcal, name)
    except ImportError as error:
        assert str(error) == f"boxcal.{name} needs the package numba: pip install 'boxcal[calibrators]'"
    else:
        raise AssertionError(f"{name} is there")
"""
COMMAND = """
from boxcal.app.cli import main
sys.argv = ["boxcal", *{arguments!r}]
main()
"""
COMMANDS = """
from boxcal.app.cli import main
for arguments in {commands!r}:
    sys.argv = ["boxcal", *arguments]
    try:
        main()
    except SystemExit as ended:
        assert not ended.code, arguments
"""
CALIBRATORS = """
import numpy as np
import boxcal
logits = np.random.default_rng(0).normal(size=(200, 3))
for method in {methods!r}:
    result = boxcal.fit(method, logits, logits.argmax(1), budget_seconds=2.0)
    assert boxcal.evaluate(result.on_arrays(logits), logits.argmax(1)).error_rate < 0.1
assert boxcal.BoxCalibrator("ts", upper=0.7).fit(logits, logits.argmax(1)).predict_proba(logits).max() <= 0.7
try:
    result.calibrator
except ImportError as error:
    assert "torch" in str(error) and "on_arrays" in str(error)
else:
    raise AssertionError("torch is there")
"""


SERVICE = """
import numpy as np
from boxcal.app.server import serve
from boxcal.models.loading import load_backbone
assert load_backbone("digits")(np.zeros((2, 1, 8, 8), np.float32)).shape == (2, 10)
for spec in ("torchvision:vit_b_16", "pt2:model.pt2"):
    try:
        load_backbone(spec)
    except ValueError as error:
        assert "needs the package torch: pip install 'boxcal[serve]'" in str(error), error
    else:
        raise AssertionError("torch is there")
"""
POSTGRESQL = """
from boxcal.app.http.problems import BoxcalError
from boxcal.app.registry.database import Database
try:
    Database("postgresql+psycopg://127.0.0.1/boxcal")
except BoxcalError as error:
    assert str(error) == "PostgreSQL needs the package psycopg: pip install 'boxcal[postgres]'."
else:
    raise AssertionError("psycopg is there")
"""
SINGLE = [name for name, reads in reads_of_methods().items() if reads == "logits" and "+" not in name]
METHODS = [*SINGLE, "ts+pb-mlp", "pts+lb", "mix+sms"]
"""`auto`, every map, and one of each kind of combination."""


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def installs(extra: str) -> set[str]:
    """Name the distributions that `boxcal[extra]` brings, those they require included."""
    optional = PROJECT["optional-dependencies"]
    wanted = [Requirement(line) for line in [*PROJECT["dependencies"], *optional.get(extra, [])]]
    found: set[str] = set()
    while wanted:
        requirement = wanted.pop()
        name = normal(requirement.name)
        if name == "boxcal":
            wanted += [Requirement(line) for each in requirement.extras for line in optional[each]]
        elif name not in found:
            found.add(name)
            wanted += [
                each
                for each in map(Requirement, requires(name))
                if each.marker is None
                or any(each.marker.evaluate({"extra": asked}) for asked in requirement.extras | {""})
            ]
    return found


def requires(name: str) -> list[str]:
    """List what a distribution requires; nothing of one that is for another platform."""
    try:
        return importlib.metadata.requires(name) or []
    except importlib.metadata.PackageNotFoundError:
        return []


installed = cache(importlib.metadata.packages_distributions)


def run(extra: str, code: str, *, without: Collection[str] = ()) -> subprocess.CompletedProcess[str]:
    """Run code where only the modules of `boxcal[extra]` and the standard library can be imported."""
    allowed = installs(extra) - set(without) | {"boxcal"}
    if "onnxruntime" in allowed:  # both packages hold the module of this name
        allowed.add("onnxruntime-gpu")
    hidden = {
        module
        for module, distributions in installed().items()
        if not {normal(name) for name in distributions} & allowed
    }
    return subprocess.run(
        [sys.executable, "-c", HIDE + code, " ".join(hidden)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("extra", "code"),
    [
        ("", CLIENT),
        ("", NAMES),
        ("", COMMAND.format(arguments=["--help"])),
        ("", COMMAND.format(arguments=["predict", "--help"])),
        ("calibrators", CALIBRATORS.format(methods=METHODS)),
        ("onnx", SERVICE),
        ("onnx", POSTGRESQL),
        ("serve", "from boxcal.app.server import serve"),
    ],
)
def test_an_extra_is_enough(extra: str, code: str) -> None:
    done = run(extra, code)
    assert done.returncode == 0, done.stderr


def test_the_client_comes_without_the_server_and_without_torch() -> None:
    modules = installed()
    assert not [name for name in HEAVY if normal(modules[name][0]) in installs("")]
    assert not {"fastapi", "torch", "sqlalchemy", "onnxruntime"} & installs("calibrators")
    assert all(normal(modules[name][0]) in installs("serve") for name in HEAVY)


def test_the_service_of_onnx_models_comes_without_what_its_extras_bring() -> None:
    """Each is large, or is not used by the service."""
    besides = {"pyarrow", "psycopg", "scikit-learn", "torch", "watchfiles", "websockets", "pyyaml"}
    assert not besides & installs("onnx")
    assert {"uvloop", "httptools", "onnxruntime", "matplotlib", "scipy"} <= installs("onnx")
    assert {"pyarrow", "psycopg"} <= installs("serve")
    assert "pyarrow" in installs("tables") & installs("calibrators")
    assert "psycopg" in installs("postgres")
    assert len(installs("onnx")) == 54


@pytest.mark.parametrize("code", ["import boxcal; boxcal.fit", "import boxcal.app.server"])
def test_what_an_extra_does_not_bring_is_hidden(code: str) -> None:
    """Otherwise the tests above could not fail."""
    assert "ModuleNotFoundError" in run("", code).stderr


def test_a_command_without_its_extra_says_what_to_install(tmp_path: Path) -> None:
    (tmp_path / "v.npz").write_bytes(b"")
    for command, extra in ((["fit", str(tmp_path / "v.npz")], "calibrators"), (["serve"], "onnx")):
        done = run("", COMMAND.format(arguments=command))
        assert done.returncode == 2
        assert f"pip install 'boxcal[{extra}]'" in done.stderr
        assert "Traceback" not in done.stderr


def test_a_service_is_asked_with_no_more_than_the_client(tmp_path: Path) -> None:
    logits, labels = overconfident(60)
    file, page, table = tmp_path / "v.npz", tmp_path / "r.html", tmp_path / "labels.csv"
    np.savez(file, logits=logits, labels=labels)
    with processes.service(tmp_path) as url:
        with BoxcalClient(url) as client:
            predictions = client.calibrate(np.eye(10), feedback=True).predictions
        table.write_text("id,label\n" + "".join(f"{row.id},{n}\n" for n, row in enumerate(predictions)))
        fit = ["fit", str(file), "--method", "ts", "--html", str(page), "--url", url]
        send = ["feedback", str(table), "--url", url, "--json"]
        done = run("", COMMANDS.format(commands=[fit, send]))
        assert done.returncode == 0, done.stderr
        assert '"accepted": 10,' in done.stdout
        assert "judged on 60 samples" in done.stdout
        assert page.read_text().startswith("<!doctype html>")
        refused = run("", COMMAND.format(arguments=["evaluate", str(file), "--url", url]))
    assert (refused.returncode, refused.stdout) == (2, "")
    assert "pip install 'boxcal[calibrators]'" in refused.stderr


def test_the_extras_that_commands_name_bring_the_packages() -> None:
    distributions = installed()
    for package, extra in output.EXTRAS.items():
        for each in ("calibrators", "onnx") if extra == "methods" else (extra,):
            brought = {normal(name).removesuffix("-gpu") for name in distributions[package]}
            assert brought & installs(each), package


@pytest.mark.parametrize(("command", "extra"), [("fit", "calibrators"), ("inspect", "onnx")])
def test_the_first_package_that_is_missing_names_the_extra_with_all(
    command: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["boxcal", command, "a.npz"])
    said = output.failure_of(ModuleNotFoundError(name="PIL"))
    assert said == (f"this command needs the package PIL: pip install 'boxcal[{extra}]'", 2)


def test_a_table_without_its_extra_says_what_to_install(tmp_path: Path) -> None:
    table = tmp_path / "v.csv"
    table.write_text("a,b,label\n" + "0.5,0.5,a\n" * 30)
    for command in (["fit", str(table)], ["monitor", str(table)]):
        done = run("onnx", COMMAND.format(arguments=command))
        assert done.returncode == 2
        said = " ".join(done.stderr.split())
        assert (
            "need the package pyarrow: pip install 'boxcal[tables]'. Without it, send arrays as .npz." in said
        )
        assert "Traceback" not in said


def test_files_are_fitted_and_judged_without_torch_and_without_a_server(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    logits = 2 * random.normal(size=(300, 4))
    labels = (logits / 2 + random.gumbel(size=logits.shape)).argmax(axis=1)
    file, fitted = tmp_path / "v.npz", tmp_path / "c.safetensors"
    np.savez(file, logits=logits, labels=labels)
    new, output = tmp_path / "new.csv", tmp_path / "out.parquet"
    np.savetxt(new, logits, delimiter=",", header="0,1,2,3", comments="")
    predict = ["predict", str(new), "--calibrator", str(fitted), "--output", str(output), "--json"]
    slow_to_load = "matplotlib", "httpx"  # for a diagram, or a service, that is not asked for
    quick = {
        "0 ties": ["fit", str(file), "--output", str(fitted), "--method", "ts+pb"],
        "smooth ECE": ["evaluate", str(file), "--calibrator", str(fitted)],
    }
    others = {
        "cross-fitted": ["compare", str(file), "--method", "ts"],
        "300 predictions": ["monitor", str(file), "--calibrator", str(fitted)],
        '"rows": 300': predict,
    }
    for commands, without in ((quick, slow_to_load), (others, ())):
        done = run("calibrators", COMMANDS.format(commands=list(commands.values())), without=without)
        assert done.returncode == 0, done.stderr
        assert [shown for shown in commands if shown not in done.stdout] == []


def test_two_packages_of_one_module_are_refused_with_the_line_that_mends_it() -> None:
    assert installed_runtimes() == [name for name in RUNTIMES if name in installed()["onnxruntime"]] != []
    check_one_runtime(["onnxruntime-gpu"])
    check_one_runtime(["onnxruntime"])
    with pytest.raises(BackboneError, match="pip uninstall --yes onnxruntime onnxruntime-gpu, then"):
        check_one_runtime(["onnxruntime-gpu", "onnxruntime"])


def test_every_platform_has_the_extras_that_are_promised_there() -> None:
    found = resolve.wanted()
    assert len(found) == 14
    assert [extra for platform, extra in found if platform == "Windows"] == ["", "calibrators"]
    for platform in ("Linux x86-64", "Linux aarch64", "macOS 14 arm64"):
        assert [extra for one, extra in found if one == platform] == ["", "calibrators", "onnx", "serve"]
    assert resolve.PYTHONS == ("3.11", "3.12", "3.13")
    assert resolve.PLATFORMS["Linux aarch64"] == "aarch64-manylinux_2_28"


@pytest.mark.parametrize(("fails", "status"), [(False, 0), (True, 1)])
def test_what_does_not_resolve_is_said(
    fails: bool, status: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def resolved(extra: str, platform: str, python: str) -> tuple[int, str]:
        return (0, "no wheel") if fails and (extra, python) == ("onnx", "3.13") else (7, "")

    monkeypatch.setattr(resolve, "resolve", resolved)
    assert resolve.main() == status
    shown = capsys.readouterr().out.splitlines()
    assert shown[3].split() == ["Linux", "x86-64", "onnx", "7", "7", "no" if fails else "7"]
    assert ("boxcal[onnx] on macOS 14 arm64, Python 3.13: no wheel" in shown) is fails
