"""Evaluate a model: ``main_ppo`` with ``trainer.val_only=true`` and the published result file (``save_val=true``).

Beside it in the run's folder: all episodes, the results as text, figures, and a card (docs/evaluation.md).

python -m verl.trainer.main_eval --config-name tiny_ppo actor_rollout_ref.model.path=runs/tiny-ppo/global_step_25/hf
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from verl.trainer import main_ppo

DEFAULTS = ("trainer.val_only=true", "trainer.val_before_train=true", "save_val=true")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run as ``verl.trainer.main_ppo.main``."""
    return main_ppo.main(arguments, DEFAULTS)


if __name__ == "__main__":
    sys.exit(main())
