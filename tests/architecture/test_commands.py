"""Shipped configurations load, and every command that the pages show is one that exists."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from job import parse

from tests.architecture.source import ROOT
from verl.config import describe, load_config, load_sft_config

RECIPES = sorted(path.stem for path in (ROOT / "configs").glob("*.yaml") if not path.stem.startswith("sft"))
SUPERVISED = sorted(path.stem for path in (ROOT / "configs").glob("sft*.yaml"))
PAGES = [path for path in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))] if path.exists()]


@pytest.mark.parametrize("name", RECIPES)
def test_a_shipped_configuration_passes_its_check(name: str) -> None:
    text = describe(load_config(name))
    assert "# derived" in text


@pytest.mark.parametrize("name", SUPERVISED)
def test_a_shipped_supervised_configuration_loads(name: str) -> None:
    load_sft_config(name)


def commands(page: Path) -> list[str]:
    """Return the command lines of a page's shell blocks, continued lines joined, comments left out."""
    found = []
    for block in re.findall(r"^```(?:bash|sh|console|shell)\n(.*?)^```", page.read_text(encoding="utf-8"), re.M | re.S):
        for line in block.replace("\\\n", " ").splitlines():
            text = line.strip().removeprefix("$ ").strip()
            if text and not text.startswith("#"):
                found.append(text)
    return found


def test_there_are_commands_to_check() -> None:
    assert (ROOT / "README.md").exists()
    assert any("train_ppo.sh" in line for line in commands(ROOT / "README.md"))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_of_a_page_exist_and_parse(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("verl.config.rules.vllm_installed", lambda: True)  # a page may show what an extra brings
    for line in commands(page):
        words = [word for word in shlex.split(line, comments=True) if word not in ("&", "nohup", "time")]
        while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
            words.pop(0)
        if words:
            check_command(words, line)


def check_command(words: list[str], line: str) -> None:
    """Assert that the program exists and takes the arguments, as far as that can be said without running it."""
    program, rest = Path(words[0]).name, words[1:]
    if program == "sbatch":
        rest = [word for word in rest if not word.startswith("--gpus") and not word.startswith("--nodes")]
        program = "bash"
    if program == "make":
        targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M)
        assert set(rest) <= set(targets), line
    elif program == "bash":
        assert (ROOT / rest[0]).is_file(), line
        if rest[0] in ("train_ppo.sh", "eval.sh"):
            request = parse(["train" if rest[0] == "train_ppo.sh" else "eval", *rest[1:]])
            load_config(request.recipe, request.overrides)
    elif program.startswith("python") and rest[:1] == ["-m"]:
        check_module(rest[1], rest[2:], line)
    elif program.startswith("python") and rest and rest[0].endswith(".py"):
        assert (ROOT / rest[0]).is_file(), line


def check_module(module: str, arguments: list[str], line: str) -> None:
    """Assert that a module of ours exists and that its overrides are understood."""
    if module.split(".")[0] in ("verl", "search_r1", "retrieval_server"):
        path = ROOT / module.replace(".", "/")
        assert path.with_suffix(".py").is_file() or (path / "__main__.py").is_file(), line
    if module in {f"verl.trainer.main_{name}" for name in ("ppo", "ppo_format", "eval", "audit")}:
        request = parse(["train", *arguments])
        recipe = request.recipe if "--config-name" in line else "ppo_trainer"
        preset = ["reward_model.preset=auto"] if module.endswith("format") else []
        load_config(recipe, [*preset, *request.overrides])
    elif module == "verl.trainer.main_sft":
        overrides = [word for word in arguments if not word.startswith("-")]
        if "--config-name" not in arguments:
            load_sft_config(overrides=overrides)
