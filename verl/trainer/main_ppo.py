"""Train or evaluate: PPO with a critic (gae) or GRPO, on Ray or in one process.

    python -m verl.trainer.main_ppo --config-name tiny_ppo trainer.seed=2 retriever.url=http://127.0.0.1:8002/retrieve
    python -m verl.trainer.main_ppo --check ...      prints the resolved configuration and derived numbers, and stops

This module is the composition root: it chooses the cluster, spawns the workers, imports the task and builds the loop.
The last line on standard output is the path of the run's ``summary.json``. Exit status: 0 done, 2 a mistake that the
message explains, 3 stopped by a watch (``health``), 128 + n stopped by signal n after saving.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from verl.config import RunConfig, describe, load_config
from verl.errors import ChatR1Error, ConfigError
from verl.trainer.checkpoint import is_disk_full
from verl.trainer.plan.report import check_lines

logger = logging.getLogger(__name__)


def main(arguments: Sequence[str] | None = None, defaults: Sequence[str] = ()) -> int:
    """Run with ``[--check] [--config-name NAME] key=value ...``; returns the exit status.

    ``defaults`` are overrides that any of the user's own may override again.
    """
    return run_program(arguments, _train, defaults)


def _train(config: RunConfig, recipe: str) -> int:
    # Imported here, so that --check and configuration mistakes need no torch.
    from verl.trainer.session import run_session

    sys.stdout.write(f"{run_session(config, recipe)}\n")
    return 0


def run_program(
    arguments: Sequence[str] | None, program: Callable[[RunConfig, str], int], defaults: Sequence[str] = ()
) -> int:
    """Load the configuration that the arguments name and call ``program(config, recipe name)``; return the exit status.

    With ``--check`` the configuration is shown instead.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    set_up_logging()
    try:
        check, name, overrides = split_arguments(given)
        config = load_config(name, [*defaults, *overrides])
        if check:
            sys.stdout.write("\n".join([describe(config), *check_lines(config), ""]))
            return 0
        return program(config, Path(name).stem)
    except ChatR1Error as error:
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
        return error.status
    except OSError as error:
        if not is_disk_full(error):
            raise
        sys.stderr.write(f"disk full: {error}; free space and start the same command again, it resumes\n")
        return 2


def split_arguments(given: Sequence[str]) -> tuple[bool, str, list[str]]:
    """Return (check, config name, overrides); raises ConfigError for an unknown option."""
    check, name, overrides = False, "ppo_trainer", []
    remaining = list(given)
    while remaining:
        argument = remaining.pop(0)
        if argument == "--check":
            check = True
        elif argument == "--config-name" and remaining:
            name = remaining.pop(0)
        elif argument.startswith("--config-name="):
            name = argument.partition("=")[2]
        elif argument.startswith("-"):
            raise ConfigError(f"unknown option {argument!r}; known: --check, --config-name NAME, and key.path=value")
        else:
            overrides.append(argument)
    return check, name, overrides


def set_up_logging() -> None:
    """Send our messages to standard error, one line each; libraries only when something is wrong."""
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    for ours in ("verl", "search_r1"):
        logging.getLogger(ours).setLevel(logging.INFO)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


if __name__ == "__main__":
    sys.exit(main())
