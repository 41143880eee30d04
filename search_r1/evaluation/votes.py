"""Several samples per question (temperature above 0): pass@k and majority voting."""

from __future__ import annotations

import math
from collections.abc import Sequence

from search_r1.evaluation.results import ResultRow
from search_r1.rewards.text import Normalise, best, exact_match, f1, normalise


def pass_at_k(correct: int, samples: int, k: int) -> float:
    """Return the unbiased estimate of the chance that one of k samples is right (Chen et al., 2021, equation 1)."""
    if samples - correct < k:
        return 1.0
    return 1.0 - math.comb(samples - correct, k) / math.comb(samples, k)


def majority(rows: Sequence[ResultRow], form: Normalise = normalise) -> str | None:
    """Return the answer that most samples give, compared in normalised form; of equal ones the earliest.

    Samples without an answer and failed ones do not vote; None when nobody votes.
    """
    votes: dict[str, list[str]] = {}
    for row in rows:
        if row.prediction is not None and not row.failed:
            votes.setdefault(form(row.prediction), []).append(row.prediction)
    return max(votes.values(), key=len)[0] if votes else None


def score_samples(rows: Sequence[ResultRow], form: Normalise = normalise) -> dict[str, float]:
    """Return the figures of one question's samples: pass@k for 1, 2, 4 ... and all, majority, best F1."""
    answers, count = rows[0].answers, len(rows)
    predictions = [None if row.failed else row.prediction for row in rows]
    correct = sum(best(exact_match, prediction, answers, form) == 1.0 for prediction in predictions)
    voted = majority(rows, form)
    powers = [2**power for power in range(count.bit_length()) if 2**power < count]
    return {
        **{f"em/pass_at_{k}": pass_at_k(correct, count, k) for k in (*powers, count)},
        f"em/majority_of_{count}": best(exact_match, voted, answers, form),
        f"f1/majority_of_{count}": best(f1, voted, answers, form),
        f"f1/best_of_{count}": max(best(f1, prediction, answers, form) for prediction in predictions),
    }
