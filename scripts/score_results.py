"""Score a result file again, without model or service; every kind of result file is read.

    python scripts/score_results.py FILE [--output FOLDER] [--model FOLDER] [key=value ...]

FILE: ``results_step_N.jsonl`` of an evaluation, its ``step_N.jsonl`` (with --model, whose tokenizer reads it), or a
published ``validation_results_stepN.json``. ``key=value`` are keys of a run's task section: reward_model.normaliser,
evaluation.bertscore_model, evaluation.judge, judge.url ... Writes results, figures and card into --output (default:
``<stem>_scored`` beside FILE), and prints the card. Exit status: 0, or 2 when the file cannot be scored.
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from search_r1.codec import Codec
from search_r1.config import SearchConfig, search_config
from search_r1.evaluation.bought import buy_scores
from search_r1.evaluation.card import Card
from search_r1.evaluation.facts import scoring_facts
from search_r1.evaluation.files import read_results, write_results
from search_r1.evaluation.summary import summarise
from search_r1.rewards.text import NORMALISERS
from verl.errors import ChatR1Error, ConfigError
from verl.identity import file_sha256
from verl.trainer.summary import source_commit, versions


def codec_of(model: str | None) -> Callable[[], Codec] | None:
    """Return what loads the tokenizer of a model folder once it is needed; None without a folder."""
    if model is None:
        return None

    @cache
    def load() -> Codec:
        from verl.workers.models import load_tokenizer

        return Codec(load_tokenizer(model))

    return load


def task_config(overrides: Sequence[str]) -> SearchConfig:
    """Return the task's section with ``key.path=value`` applied; raises ConfigError with every mistake."""
    values: dict[str, Any] = {}
    for text in overrides:
        path, sign, value = text.lstrip("+").partition("=")
        if not sign:
            raise ConfigError(f"{text!r} is not of the form key.path=value")
        node, (*parents, last) = values, path.split(".")
        for name in parents:
            node = node.setdefault(name, {})
        node[last] = yaml.safe_load(value)
    try:
        return search_config(values)
    except ValidationError as error:
        wrong = "\n".join(f"{'.'.join(map(str, item['loc']))}: {item['msg']}" for item in error.errors())
        raise ConfigError(wrong) from error


def score_file(file: Path, output: Path, config: SearchConfig, codec: Callable[[], Codec] | None) -> Card:
    """Score a file, write results and card, and return the card."""
    form = NORMALISERS[config.reward_model.normaliser]
    rows, paid = buy_scores(read_results(file, codec, form), config.evaluation, config.judge)
    facts = {
        "data": {"file": str(file), "sha256": file_sha256(file), "rows": len(rows)},
        "scoring": scoring_facts(config),
        "code": {"commit": source_commit(), "versions": versions()},
    }
    card = Card(f"Scores of {file.name}", facts, {**summarise(rows, form), **paid})
    write_results(output / "results.jsonl", rows)
    card.write(output / "card")
    return card


def main(arguments: Sequence[str] | None = None) -> int:
    """Return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--model", help="folder of the tokenizer that reads a file of trajectories")
    given = parser.parse_intermixed_args(arguments)
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    logging.getLogger("search_r1").setLevel(logging.INFO)
    output = given.output or given.file.with_name(f"{given.file.stem}_scored")
    try:
        card = score_file(given.file, output, task_config(given.overrides), codec_of(given.model))
    except (ChatR1Error, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(card.markdown())
    print(f"wrote {output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
