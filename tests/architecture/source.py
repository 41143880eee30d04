"""Reading the source as data: modules of our packages and what each imports, functions' bodies included."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("verl", "search_r1", "retrieval_server")


@dataclass(frozen=True)
class Module:
    """One source file."""

    name: str
    path: Path
    tree: ast.Module

    @property
    def imports(self) -> list[str]:
        """Full names of everything imported anywhere in the file; ``from a import b`` gives ``a`` and ``a.b``."""
        found: list[str] = []
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                found += [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                base = self._absolute(node)
                found += [base, *(f"{base}.{alias.name}" for alias in node.names)]
        return found

    def _absolute(self, node: ast.ImportFrom) -> str:
        if node.level == 0:
            return node.module or ""
        package = self.name.split(".")
        if self.path.name != "__init__.py":
            package = package[:-1]
        base = package[: len(package) - node.level + 1]
        return ".".join([*base, *([node.module] if node.module else [])])


@cache
def modules() -> tuple[Module, ...]:
    """Return every module of our packages."""
    found = []
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            parts = list(path.relative_to(ROOT).with_suffix("").parts)
            if parts[-1] == "__init__":
                parts.pop()
            found.append(Module(".".join(parts), path, ast.parse(path.read_text(encoding="utf-8"))))
    return tuple(found)


def within(name: str, package: str) -> bool:
    """True when the dotted ``name`` is ``package`` or lies in it."""
    return name == package or name.startswith(f"{package}.")
