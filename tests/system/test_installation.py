"""The wheel, alone and beside another project's `flexcache`, whichever of them came last."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest
from paths import ROOT

OURS, ANOTHER = "flexcache-kv", "flexcache"

ANOTHER_FILES = {
    "flexcache/__init__.py": """
from importlib.metadata import version

__version__ = version("flexcache")

from .flexcache import DiskCache

__all__ = ("DiskCache", "__version__")
""",
    "flexcache/flexcache.py": "class DiskCache: ...\n",
    "flexcache/py.typed": "",
    "flexcache-0.3.dist-info/METADATA": "Metadata-Version: 2.1\nName: flexcache\nVersion: 0.3\n",
    "flexcache-0.3.dist-info/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any",
    "flexcache-0.3.dist-info/RECORD": "",
}
"""What the project that pint needs has, by the names of its files."""

LOOK = """
import json

def looks(code):
    try:
        exec(code)
    except (AttributeError, ImportError):
        return False
    return True

print(json.dumps([
    [
        looks("from flexcache import ConfigError, KVStatus"),
        looks("import flexcache; flexcache.TierName"),
        looks("import flexcache.config"),
        looks("import flexcache.integration"),
    ],
    [looks("import flexcache as fc; fc.DiskCache"), looks("from flexcache import DiskCache")],
]))
"""


class Environment:
    """A virtual environment without packages, unless it is asked for those of the tests."""

    def __init__(self, directory: Path, wheels: Path) -> None:
        venv.create(directory, symlinks=True)
        self.programs = directory / "bin"
        self.wheels = wheels
        (self.site,) = directory.glob("lib/python3*/site-packages")
        # pip is not to see them: it would take FlexCache for installed.
        line = 'import os, sys; sys.path += filter(None, [os.environ.get("PACKAGES")])\n'
        (self.site / "packages.pth").write_text(line)

    def pip(self, *arguments: str) -> None:
        command = [sys.executable, "-m", "pip", "-q", "--python", self.programs / "python"]
        done = subprocess.run(
            [*command, *arguments], env=self._variables({}), capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr

    def install(self, name: str) -> None:
        (wheel,) = self.wheels.glob(f"{name.replace('-', '_')}-0*.whl")
        self.pip("install", "--no-index", "--no-deps", "--force-reinstall", str(wheel))

    def unpack(self, name: str, directory: Path) -> None:
        (wheel,) = self.wheels.glob(f"{name.replace('-', '_')}-0*.whl")
        zipfile.ZipFile(wheel).extractall(directory)

    def run(self, program: str, *arguments: str | Path, **variables: str) -> str:
        done = subprocess.run(
            [self.programs / program, *arguments],
            env=self._variables({"PACKAGES": sysconfig.get_path("purelib"), **variables}),
            cwd=self.programs,  # not the checkout
            capture_output=True, text=True, timeout=120,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert ".pth" not in done.stderr
        return done.stdout

    def looks(self, **variables: str) -> tuple[set[bool], set[bool]]:
        """Return whether FlexCache's parts are found, and whether the other project's are."""
        ours, another = json.loads(self.run("python", "-c", LOOK, **variables))
        return set(ours), set(another)

    def _variables(self, added: dict[str, str]) -> dict[str, str]:
        return {**{k: v for k, v in os.environ.items() if k != "PYTHONPATH"}, **added}


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build ours of what `deploy/Dockerfile` copies, and one with the other project's files."""
    directory = tmp_path_factory.mktemp("wheels")
    source = directory / "source"
    source.mkdir()
    dockerfile = (ROOT / "deploy" / "Dockerfile").read_text()
    for line in re.findall(r"^COPY (.+) /opt/flexcache", dockerfile, re.MULTILINE):
        for name in line.split():
            copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
            copy(ROOT / name, source / name)
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation"]
    subprocess.run([*command, "-w", directory, source], check=True)
    with zipfile.ZipFile(directory / "flexcache-0.3-py3-none-any.whl", "w") as archive:
        for name, text in ANOTHER_FILES.items():
            archive.writestr(name, text)
    return directory


@pytest.fixture
def environment(tmp_path: Path, wheels: Path) -> Environment:
    return Environment(tmp_path / "venv", wheels)


def test_pip_installs_and_removes_both_in_any_order(environment: Environment) -> None:
    empty = set(environment.site.iterdir())
    installed: set[str] = set()
    for name, is_wanted in [
        (ANOTHER, True), (OURS, True), (OURS, False),  # theirs first, and ours goes
        (OURS, True), (ANOTHER, True), (OURS, True),  # both upgraded
        (ANOTHER, False), (OURS, False),
    ]:  # fmt: skip
        if is_wanted:
            environment.install(name)
        else:
            environment.pip("uninstall", "-y", name)
        installed = installed | {name} if is_wanted else installed - {name}
        assert environment.looks() == ({OURS in installed}, {ANOTHER in installed}), (
            name, is_wanted, installed,
        )  # fmt: skip
    assert set(environment.site.iterdir()) == empty


def test_programs_and_the_python_api_run_beside_the_other_project(environment: Environment) -> None:
    for name in (OURS, ANOTHER):
        environment.unpack(name, environment.site)
    code = "from flexcache.cli import app; app()"
    findings = json.loads(environment.run("python", "-c", code, "doctor", "--json"))["findings"]
    assert not any("another project" in each["text"] for each in findings)
    example = environment.run("python", ROOT / "examples" / "python_api.py")
    assert "KVStatus.SUCCESS 64 tokens" in example


def test_the_other_project_may_be_in_another_folder(
    environment: Environment, tmp_path: Path
) -> None:
    environment.unpack(OURS, environment.site)
    environment.unpack(ANOTHER, tmp_path / "other")
    assert environment.looks(PYTHONPATH=str(tmp_path / "other")) == ({True}, {True})
    (environment.site / "other.pth").write_text(f"{tmp_path / 'other'}\n")  # after site-packages
    assert environment.looks() == ({True}, {True})


def test_a_checkout_in_the_search_path_goes_first(environment: Environment) -> None:
    for name in (OURS, ANOTHER):
        environment.unpack(name, environment.site)
    code = "import flexcache; print(flexcache.__file__, flexcache.KVStatus.SUCCESS)"
    said = environment.run("python", "-c", code, PYTHONPATH=str(ROOT))
    assert said == f"{ROOT / 'flexcache' / '__init__.py'} KVStatus.SUCCESS\n"


def test_without_start_up_files_all_but_the_public_names_is_found(
    environment: Environment, tmp_path: Path
) -> None:
    """As with `pip install --target`: the doctor says what is missing."""
    environment.unpack(OURS, tmp_path / "target")
    path = str(tmp_path / "target")
    assert environment.looks(PYTHONPATH=path) == ({True}, {False})
    environment.unpack(ANOTHER, tmp_path / "target")
    assert environment.looks(PYTHONPATH=path) == ({True, False}, {True})
    code = "from flexcache.cli import app; app()"
    said = environment.run("python", "-c", code, "doctor", "--json", PYTHONPATH=path)
    (finding,) = (each for each in json.loads(said)["findings"] if "KVManager" in each["text"])
    assert finding["level"] == "warning" and "flexcache.manager" in finding["remedy"]


@pytest.mark.parametrize("content", [None, "1 / 0", "import ("])
def test_the_interpreter_starts_whatever_becomes_of_the_hook(
    environment: Environment, content: str | None
) -> None:
    environment.unpack(OURS, environment.site)
    hook = environment.site / "flexcache_kv_startup.py"
    hook.unlink()
    if content is not None:
        hook.write_text(content)
    assert environment.looks() == ({True}, {False})


@pytest.mark.whole
@pytest.mark.parametrize("first", [OURS, "pint"])
def test_pint_and_vllm_work_in_one_environment(environment: Environment, first: str) -> None:
    """With the real pint, fetched by pip."""
    for name in (first, OURS if first == "pint" else "pint"):
        if name == OURS:
            environment.install(OURS)
            continue
        try:
            environment.pip("install", "pint")
        except AssertionError as failure:
            pytest.skip(f"pip cannot fetch pint: {failure}")
    code = """
import os, sys, pint
registry = pint.UnitRegistry(cache_folder=sys.argv[1])
assert (3 * registry.meter).to("cm").magnitude == 300
assert os.listdir(sys.argv[1])
from flexcache import KVManager
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
config = KVTransferConfig(
    kv_connector="FlexCacheConnectorV1", kv_role="kv_both",
    kv_connector_module_path="flexcache.integration.vllm",
)
print(KVConnectorFactory.get_connector_class(config).__module__)
"""
    said = environment.run("python", "-c", code, str(environment.wheels / f"cache-{first}"))
    assert "flexcache.integration.vllm" in said
