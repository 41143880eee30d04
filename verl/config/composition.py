"""From ``configs/NAME.yaml`` and ``key=value`` arguments to plain values: the only place that knows Hydra.

``loading`` imports it when a file is loaded, so that the schema itself needs pydantic alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from verl.config.problems import MISSING, Problem
from verl.errors import ConfigError


def config_folder() -> Path:
    """Return the folder of the shipped recipes: ``configs/`` of a checkout, or the copy inside an installed package."""
    package = Path(__file__).resolve().parents[1]
    checkout = package.parent / "configs"
    return checkout if (checkout / "ppo_trainer.yaml").is_file() else package / "configs"


def shipped(path: str) -> str:
    """Return the absolute path of a file or folder that comes with the code (``${shipped:assets/tiny}``)."""
    package = Path(__file__).resolve().parents[1]
    checkout = package.parent / path
    # An installed package has its copy inside (verl/assets and verl/configs are links in the checkout).
    return str(checkout if checkout.exists() or not (package / path).exists() else package / path)


OmegaConf.register_new_resolver("shipped", shipped, replace=True)


def compose_values(
    config_name: str,
    overrides: Sequence[str],
    config_dir: str | Path | None,
    problems: list[Problem],
) -> dict[str, Any]:
    """Return the composed configuration as plain nested dictionaries; mistakes in overrides go to ``problems``."""
    folder = Path(config_dir) if config_dir is not None else config_folder()
    name = config_name
    if config_name.endswith((".yaml", ".yml")):
        path = Path(config_name)
        folder, name = (path.resolve().parent if path.is_file() else folder), path.stem
    available = sorted(file.stem for file in folder.glob("*.yaml"))
    if name not in available:
        raise ConfigError(
            f"there is no configuration {config_name!r} in {folder}; there are: {', '.join(available) or 'none'}"
        )
    arguments = [text for text in (_normalised(override, problems) for override in overrides) if text is not None]
    GlobalHydra.instance().clear()
    # The shipped folder stays on the search path, so that a file elsewhere can build on ppo_trainer.
    search_path = f"hydra.searchpath=[file://{config_folder()}]"
    try:
        with initialize_config_dir(str(folder.resolve()), version_base=None):
            composed = compose(name, overrides=[*arguments, search_path])
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(f"configuration {config_name!r} cannot be composed: {_first_line(error)}") from error
    finally:
        GlobalHydra.instance().clear()
    resolved: dict[str, Any] = _resolve(composed, problems)
    return resolved


def _normalised(override: str, problems: list[Problem]) -> str | None:
    """Return ``++key=value`` (set or add) for any of the three spellings, or None after noting what is wrong."""
    text = override.strip()
    if text.startswith("~"):
        problems.append(Problem(override, MISSING, "keys cannot be deleted", "set the key to a value, e.g. null"))
        return None
    text = text.lstrip("+")
    key, equals, _ = text.partition("=")
    if not equals or not key:
        problems.append(Problem(override, MISSING, "not of the form key.path=value", "write key.path=value"))
        return None
    try:
        OverridesParser.create().parse_override(f"++{text}")
    except HydraException as error:
        fix = f"quote the value for the shell and for the parser: '{key}=\"...\"'"
        problems.append(Problem(key, text.partition("=")[2], f"cannot be parsed ({_first_line(error)})", fix))
        return None
    return f"++{text}"


def _resolve(node: Any, problems: list[Problem], path: str = "") -> Any:
    """Resolve interpolations leaf by leaf, so that one broken reference does not hide the next."""
    if isinstance(node, DictConfig):
        found: dict[str, Any] = {}
        for key in node:
            child = f"{path}.{key!s}" if path else str(key)
            try:
                value = node[key]
            except OmegaConfBaseException as error:
                raw = OmegaConf.to_container(node, resolve=False)
                shown = raw.get(key, MISSING) if isinstance(raw, dict) else MISSING
                fix = "give the key a value" if shown == "???" else "refer to an existing key: ${section.key}"
                problems.append(Problem(child, shown, f"cannot be resolved ({_first_line(error)})", fix))
                continue
            found[str(key)] = _resolve(value, problems, child)
        return found
    if isinstance(node, ListConfig):
        return [_resolve(item, problems, f"{path}[{index}]") for index, item in enumerate(node)]
    return node


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
