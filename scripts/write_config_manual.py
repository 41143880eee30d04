"""Write the tables of ``docs/configuration.md`` anew from the schemas: ``python scripts/write_config_manual.py``."""

from __future__ import annotations

import sys
from pathlib import Path

from search_r1.config import SearchConfig
from verl.config.manual import key_tables, pointless_table, rule_table
from verl.config.published import RUN_KEYS, SFT_KEYS
from verl.config.rules import RUN_RULES, SFT_RULES
from verl.config.schema import RunConfig
from verl.config.sft_schema import SftConfig

PAGE = Path(__file__).resolve().parents[1] / "docs" / "configuration.md"
MARK = "<!-- From here on written by scripts/write_config_manual.py -->"


def tables() -> str:
    """Return the generated part of the page."""
    return "\n".join(
        [
            "## Keys of a run\n",
            key_tables(RunConfig),
            "## Keys of the task (`search_r1`)\n",
            key_tables(SearchConfig),
            "## Keys of supervised training\n",
            key_tables(SftConfig),
            "## Rules between keys\n",
            rule_table([*RUN_RULES, *SFT_RULES[:-1]]),
            "## Published keys that decide nothing here\n",
            "They are accepted at a harmless value, so that published commands run, and refused at any other.\n",
            pointless_table(RUN_KEYS),
            "In supervised training:\n",
            pointless_table(SFT_KEYS),
        ]
    )


def page() -> str:
    """Return the whole page: what was written by hand, the mark, the tables."""
    by_hand, mark, _ = PAGE.read_text(encoding="utf-8").partition(MARK)
    if not mark:
        raise SystemExit(f"{PAGE} has lost the line {MARK}")
    return f"{by_hand}{MARK}\n\n{tables()}"


def main() -> int:
    """Write the page."""
    PAGE.write_text(page(), encoding="utf-8")
    print(PAGE)
    return 0


if __name__ == "__main__":
    sys.exit(main())
