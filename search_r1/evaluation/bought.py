"""Scores that cost time or money: BERTScore with a local encoder, and a language model's judgement."""

from __future__ import annotations

import asyncio
import json
import logging
import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from search_r1.config import EvaluationConfig, JudgeConfig
from search_r1.evaluation.results import ResultRow
from search_r1.judge.endpoint import JudgeError
from search_r1.judge.judge import Judge
from verl.errors import ConfigError, ModelError

logger = logging.getLogger(__name__)


def buy_scores(
    rows: Sequence[ResultRow], config: EvaluationConfig, judge: JudgeConfig
) -> tuple[list[ResultRow], dict[str, float]]:
    """Return the rows with the scores that the configuration asks for, and figures of what they cost."""
    scored, figures = list(rows), dict[str, float]()
    if config.bertscore_model is not None:
        values = bert_scores(scored, Path(config.bertscore_model), config.bertscore_layer)
        scored = _with(scored, "bertscore", values)
    if config.judge:
        judged, figures = asyncio.run(_judge(scored, judge))
        scored = _with(scored, "judge", judged)
    return scored, figures


def _with(rows: Sequence[ResultRow], name: str, values: Sequence[float | None]) -> list[ResultRow]:
    return [replace(row, scores={**row.scores, name: value}) for row, value in zip(rows, values, strict=True)]


# ---------------------------------------------------------------------------------------------------------------
# BERTScore


def bert_scores(rows: Sequence[ResultRow], model: Path, layer: int | None = None) -> list[float | None]:
    """Return BERTScore F1 (Zhang et al., 2020) of each answer with its best reference, by the package bert-score.

    Unscaled, without idf. ``layer``: hidden layer that is compared, None for the last. A missing answer and a failed
    row score 0 without being encoded. Raises ConfigError without the package, ModelError for a folder that is no
    encoder.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the package's own dependencies
            from bert_score import BERTScorer
    except ImportError as error:
        raise ConfigError(
            f"evaluation.bertscore_model needs the package bert-score ({error}); pip install 'chatr1[bertscore]'"
        ) from error
    texts = [None if row.failed or not (row.prediction or "").strip() else row.prediction for row in rows]
    asked = [index for index, text in enumerate(texts) if text is not None]
    scores: list[float | None] = [0.0] * len(rows)
    if not asked:
        return scores
    scorer = BERTScorer(model_type=str(model), num_layers=_layer(model, layer))
    # The tokenizer of some encoders names no limit; a longer text would then index positions that do not exist.
    scorer._tokenizer.model_max_length = _longest(scorer)
    references = [list(rows[index].answers) for index in asked]
    _, _, found = scorer.score([texts[index] for index in asked], references)
    for index, value in zip(asked, found.tolist(), strict=True):
        scores[index] = float(value)
    return scores


def _layer(model: Path, layer: int | None) -> int:
    try:
        layers = int(json.loads((model / "config.json").read_text(encoding="utf-8"))["num_hidden_layers"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelError(
            f"evaluation.bertscore_model={model}: no folder of an encoder ({error!r}); name one with config.json"
        ) from error
    if layer is not None and not 1 <= layer <= layers:
        raise ConfigError(f"evaluation.bertscore_layer={layer}: {model} has the layers 1 to {layers}")
    return layer or layers


def _longest(scorer: object) -> int:
    tokenizer, model = scorer._tokenizer, scorer._model  # type: ignore[attr-defined]
    return min(int(tokenizer.model_max_length), int(getattr(model.config, "max_position_embeddings", 512)))


# ---------------------------------------------------------------------------------------------------------------
# Judge


async def _judge(rows: Sequence[ResultRow], config: JudgeConfig) -> tuple[list[float | None], dict[str, float]]:
    """Return the grade of every row, None where the judge gave none, and what was asked and paid."""
    judge = Judge(config)

    async def grade(row: ResultRow) -> float | None:
        try:
            prediction = None if row.failed else row.prediction
            return await judge.score(row.history or (), row.question, row.answers, prediction)
        except JudgeError as error:
            errors.append(str(error))
            return None

    errors: list[str] = []
    try:
        grades = list(await asyncio.gather(*(grade(row) for row in rows)))
    finally:
        await judge.close()
    totals = judge.totals()
    if errors:
        logger.warning(
            "the judge graded %d of %d answers; first failure: %s", len(rows) - len(errors), len(rows), errors[0]
        )
    logger.info(
        "judge: %d asked, %d from the cache, %d failed, %d + %d tokens, cost %.4f",
        *(int(totals[name]) for name in ("asked", "cached", "failures", "prompt_tokens", "reply_tokens")),
        totals["cost"],
    )
    kept = ("asked", "cached", "failures", "prompt_tokens", "reply_tokens", "cost")
    return grades, {f"judge_usage/{name}": totals[name] for name in kept}
