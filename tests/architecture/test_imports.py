"""Who may import whom. The table here is that of docs/architecture.md; the code has to agree with it."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.architecture.source import PACKAGES, ROOT, modules, within

LAYER_0 = (
    "verl.types",
    "verl.errors",
    "verl.registry",
    "verl.metrics",
    "verl.tracking",
    "verl.timing",
    "verl.identity",
)
LAYERS: tuple[tuple[str, ...], ...] = (
    LAYER_0,
    ("verl.config", "verl.algorithms", "verl.data"),
    ("verl.workers",),
    ("verl.cluster",),
    ("verl.trainer",),
)
HEAVY = ("torch", "ray", "vllm", "faiss", "transformers")
# Where a library may be imported at all; what is not listed is free.
HOMES = {
    "ray": ("verl.cluster",),
    "vllm": ("verl.workers.rollout",),
    "torch": (
        "verl.algorithms",
        "verl.data",
        "verl.workers",
        "verl.cluster",
        "verl.trainer",
        "retrieval_server.backends",
    ),
    "transformers": ("verl.workers", "verl.trainer", "search_r1.world", "retrieval_server.backends"),
    "faiss": ("retrieval_server.backends",),
    "hydra": ("verl.config",),
    "omegaconf": ("verl.config",),
}


def layer(name: str) -> int | None:
    """Return the layer of a module of ``verl``; the bare package has none."""
    for number, members in enumerate(LAYERS):
        if any(within(name, member) for member in members):
            return number
    return None


def test_every_module_of_verl_has_a_layer() -> None:
    strays = [m.name for m in modules() if within(m.name, "verl") and m.name != "verl" and layer(m.name) is None]
    assert strays == []


def test_layers_of_verl_import_downwards_only() -> None:
    wrong = [
        f"{module.name} (layer {own}) imports {target} (layer {other})"
        for module in modules()
        if (own := layer(module.name)) is not None
        for target in module.imports
        if (other := layer(target)) is not None and other > own
    ]
    assert wrong == []


def test_packages_keep_to_themselves() -> None:
    allowed = {
        "verl": lambda target: within(target, "verl"),
        "search_r1": lambda target: within(target, "search_r1") or any(within(target, name) for name in LAYER_0),
        "retrieval_server": lambda target: within(target, "retrieval_server"),
    }
    wrong = [
        f"{module.name} imports {target}"
        for module in modules()
        for target in module.imports
        if any(within(target, package) for package in PACKAGES) and target != "verl"
        if not allowed[module.name.split(".")[0]](target)
    ]
    assert wrong == []


@pytest.mark.parametrize("library", HOMES)
def test_a_library_is_imported_at_its_home_only(library: str) -> None:
    wrong = [
        f"{module.name} imports {target}"
        for module in modules()
        for target in module.imports
        if within(target, library) and not any(within(module.name, home) for home in HOMES[library])
    ]
    assert wrong == []


def test_the_task_and_layer_0_import_without_heavy_libraries() -> None:
    names = [m.name for m in modules() if within(m.name, "search_r1") or layer(m.name) == 0]
    # search_r1.world makes the tokenizer of the shipped model, which is a tool of its own.
    names = [name for name in names if not within(name, "search_r1.world") and not name.endswith("__main__")]
    code = (
        f"import importlib, sys\nfor name in {names!r}: importlib.import_module(name)\n"
        f"loaded = sorted(set({HEAVY!r}) & set(sys.modules))\nassert not loaded, loaded"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_loading_a_configuration_needs_no_heavy_library() -> None:
    code = (
        "import sys\nfrom verl.config import load_config\nload_config('tiny_ppo')\n"
        f"loaded = sorted(set({HEAVY!r}) & set(sys.modules))\nassert not loaded, loaded"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_wrong_import_would_be_seen() -> None:
    """The reader understands every form of import that could break the table."""
    import ast
    from pathlib import Path

    from tests.architecture.source import Module

    text = (
        "import ray.util\nfrom torch import nn\nfrom . import episode\ndef f():\n    from ..trainer.loop import Loop\n"
    )
    module = Module("verl.workers.policy", Path("verl/workers/policy.py"), ast.parse(text))
    assert module.imports == [
        "ray.util", "torch", "torch.nn", "verl.workers", "verl.workers.episode",
        "verl.trainer.loop", "verl.trainer.loop.Loop",
    ]  # fmt: skip
