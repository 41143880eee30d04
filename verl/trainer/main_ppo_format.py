"""``main_ppo`` with the shaped reward as its default (``reward_model.preset=auto``): one program, two presets.

``auto`` takes search_r1's formula for the exact-match sources and chatr1's for the F1 sources, and is printed at start.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from verl.trainer import main_ppo

DEFAULTS = ("reward_model.preset=auto",)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run as ``verl.trainer.main_ppo.main``."""
    return main_ppo.main(arguments, DEFAULTS)


if __name__ == "__main__":
    sys.exit(main())
