"""From ``configs/NAME.yaml`` and ``key=value`` arguments to a validated, frozen configuration.

Hydra composes, published-but-pointless keys are checked and dropped, pydantic validates, cross-field rules run. All
mistakes of all these stages are reported together: a key that failed its own check is replaced by its default, so
that the rules about the other keys can still be tried.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import BaseModel, ValidationError

from verl.config.base import leaves
from verl.config.problems import (
    MISSING,
    Problem,
    all_paths,
    dig,
    nested_leaves,
    problems_of,
    remove,
    report,
    truth_values,
)
from verl.config.published import ANY, RUN_KEYS, SFT_KEYS, Pointless
from verl.config.rules import RUN_RULES, SFT_RULES, run_rules
from verl.config.schema import RunConfig
from verl.config.sft_schema import SftConfig
from verl.errors import ConfigError
from verl.registry import import_object

logger = logging.getLogger(__name__)

Model = TypeVar("Model", bound=BaseModel)


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


def load_config(
    config_name: str = "ppo_trainer",
    overrides: Sequence[str] = (),
    config_dir: str | Path | None = None,
) -> RunConfig:
    """Compose and validate a training or evaluation run.

    ``config_name`` is a file of ``config_dir`` (default: the shipped ``configs/``) without ``.yaml``, or a path to a
    YAML file. ``overrides`` are ``key.path=value``; a leading ``+`` or ``++`` changes nothing. Raises ConfigError
    whose message lists every mistake with key path, value, rule and remedy.
    """
    problems: list[Problem] = []
    values = compose_values(config_name, overrides, config_dir, problems)
    drop_pointless(values, RUN_KEYS, problems)
    schema = _task_schema(values, problems)
    core_names = set(RunConfig.model_fields) - {"task_config"}
    task_names = set(schema.model_fields) if schema is not None else set()
    core = {name: value for name, value in values.items() if name in core_names}
    task = {name: value for name, value in values.items() if name in task_names}
    if schema is not None:
        known_paths = all_paths(RunConfig) + all_paths(schema)
        strangers = {name: value for name, value in values.items() if name not in core_names | task_names}
        problems += [Problem.unknown(path, value, known_paths) for path, value in nested_leaves(strangers)]
    config = _validate(RunConfig, core, problems)
    if schema is not None:
        config = config.model_copy(update={"task_config": _validate(schema, task, problems)})
        run_rules(RUN_RULES, config, problems)
        _check_estimator(config, problems)
    if problems:
        raise ConfigError(report(problems, f"configuration {config_name!r}"))
    return config


def load_sft_config(
    config_name: str = "sft_trainer",
    overrides: Sequence[str] = (),
    config_dir: str | Path | None = None,
) -> SftConfig:
    """Compose and validate a supervised run; arguments and errors as in ``load_config``."""
    problems: list[Problem] = []
    values = compose_values(config_name, overrides, config_dir, problems)
    drop_pointless(values, SFT_KEYS, problems)
    config = _validate(SftConfig, values, problems)
    run_rules(SFT_RULES, config, problems)
    if problems:
        raise ConfigError(report(problems, f"configuration {config_name!r}"))
    return config


def flatten(config: BaseModel) -> dict[str, Any]:
    """Return key path -> value of every key, those of the task at the top level included."""
    flat = dict(leaves(config))
    task = getattr(config, "task_config", None)
    if isinstance(task, BaseModel):
        flat.update(leaves(task))
    return flat


# ---------------------------------------------------------------------------------------------------------------
# Composition


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


# ---------------------------------------------------------------------------------------------------------------
# Validation


def drop_pointless(values: dict[str, Any], table: Mapping[str, Pointless], problems: list[Problem]) -> None:
    """Remove the keys of ``table`` from ``values``; a value that would be ignored to the user's harm is a problem."""
    for path, rule in table.items():
        value = dig(values, path)
        if value is MISSING:
            continue
        remove(values, path)
        if rule.same_as is not None:
            wanted = dig(values, rule.same_as)
            if value != wanted:
                fix = f"leave it out; {rule.same_as}={value} sets both"
                problems.append(Problem(path, value, f"must equal {rule.same_as} ({wanted}): {rule.reason}", fix))
        elif ANY not in rule.allowed and not any(_same(value, harmless) for harmless in rule.allowed):
            shown = " or ".join(_yaml(harmless) for harmless in rule.allowed)
            problems.append(Problem(path, value, f"has no effect here: {rule.reason}", f"leave it out or set {shown}"))


def _same(value: Any, harmless: Any) -> bool:
    return bool(value == harmless) and isinstance(value, bool) == isinstance(harmless, bool)


def _yaml(value: Any) -> str:
    return (
        {None: "null", True: "true", False: "false"}.get(value, str(value))
        if isinstance(value, bool | None)
        else str(value)
    )


def _task_schema(values: Mapping[str, Any], problems: list[Problem]) -> type[BaseModel] | None:
    """Import the task and return the schema of its keys; None after noting that there is none."""
    path = values.get("task", RunConfig.model_fields["task"].default)
    if not isinstance(path, str):
        problems.append(Problem("task", path, "must be an import path", "write module:Class"))
        return None
    try:
        task = import_object(path, "task")
        if not callable(getattr(task, "config_schema", None)) or not callable(getattr(task, "from_config", None)):
            raise ConfigError("is no task: it has no config_schema() and from_config()")
    except ConfigError as error:
        problems.append(Problem("task", path, str(error), "name an importable class, e.g. search_r1.task:SearchTask"))
        return None
    schema = task.config_schema()
    assert isinstance(schema, type) and issubclass(schema, BaseModel), f"{path}.config_schema() is no pydantic model"
    return schema


def _check_estimator(config: RunConfig, problems: list[Problem]) -> None:
    """Import an estimator of one's own now; it is needed only after the rollouts of the first step."""
    path = config.algorithm.adv_estimator
    if ":" not in path:
        return  # the rule "known estimator" knows the names
    try:
        if not callable(import_object(path, "advantage estimator")):
            raise ConfigError("is not a function")
    except ConfigError as error:
        problems.append(Problem("algorithm.adv_estimator", path, str(error), "set gae, grpo or module:function"))


def _validate(model: type[Model], values: dict[str, Any], problems: list[Problem]) -> Model:
    """Validate; note every mistake, and return the model with the mistaken keys at their defaults."""
    remaining = values
    for problem in list(truth_values(remaining, model)):
        problems.append(problem)
        remove(remaining, problem.key)
    for _ in range(8):
        try:
            return model.model_validate(remaining)
        except ValidationError as error:
            found = problems_of(error, model, remaining)
            problems += [problem for problem in found if problem.key not in {known.key for known in problems}]
            for problem in found:
                remove(remaining, problem.key)
    # A validator over several keys keeps failing: its message is noted, the defaults stand in.
    return model()
