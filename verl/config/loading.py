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

from pydantic import BaseModel, ValidationError

from verl.config.algorithm_schema import ESTIMATORS, POLICY_LOSSES
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
    from verl.config.composition import compose_values

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
        _check_own_functions(config, problems)
    if problems:
        raise ConfigError(report(problems, f"configuration {config_name!r}"))
    return config


def load_sft_config(
    config_name: str = "sft_trainer",
    overrides: Sequence[str] = (),
    config_dir: str | Path | None = None,
) -> SftConfig:
    """Compose and validate a supervised run; arguments and errors as in ``load_config``."""
    from verl.config.composition import compose_values

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


def _check_own_functions(config: RunConfig, problems: list[Problem]) -> None:
    """Import what the user brings by path now; it is needed only after the rollouts of the first step."""
    actor = config.actor_rollout_ref.actor
    for key, path, kind, known in (
        ("algorithm.adv_estimator", config.algorithm.adv_estimator, "advantage estimator", ESTIMATORS),
        ("actor_rollout_ref.actor.policy_loss", actor.policy_loss, "policy loss", POLICY_LOSSES),
    ):
        if ":" not in path:
            continue  # the rules know the names
        try:
            if not callable(import_object(path, kind)):
                raise ConfigError("is not a function")
        except ConfigError as error:
            problems.append(Problem(key, path, str(error), f"set one of {', '.join(known)}, or module:function"))


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
