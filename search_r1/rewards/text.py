"""Comparing texts: SQuAD's normalisation, exact match and F1 (Rajpurkar et al., 2016), and the published variants."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Callable, Sequence

from search_r1.tags import escape_tags

Metric = Callable[[str, str], float]
"""(prediction, reference) -> score in [0, 1]."""

_ARTICLES = re.compile(r"\b(?:a|an|the)\b")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalise(text: str) -> str:
    """Lower-case, drop ASCII punctuation and the articles a, an, the, squeeze whitespace.

    Tags are escaped first, as they are in what the model reads, so a copied passage compares equal to its source.
    """
    text = escape_tags(text).lower().translate(_NO_PUNCTUATION)
    return " ".join(_ARTICLES.sub(" ", text).split())


def exact_match(prediction: str, reference: str) -> float:
    """1 when both are equal after normalisation."""
    return float(normalise(prediction) == normalise(reference))


def sub_exact_match(prediction: str, reference: str) -> float:
    """1 when the normalised reference occurs inside the normalised prediction."""
    return float(normalise(reference) in normalise(prediction))


def f1(prediction: str, reference: str) -> float:
    """Word F1 over multisets (SQuAD): a word counts as often as it stands in both. Two empty texts score 1.

    ``f1("cat cat", "cat")`` is 2/3.
    """
    predicted, expected = normalise(prediction).split(), normalise(reference).split()
    common = sum((Counter(predicted) & Counter(expected)).values())
    return _f1(common, predicted, expected)


def f1_set(prediction: str, reference: str) -> float:
    """Word F1 of the published ChatR1 reward: every shared word counts once, lengths count repetitions.

    An answer with repeated words scores below 1 against itself: ``f1_set("a b b a", "a b b a")`` drops the articles and
    gives 0.5 for ``b b``.
    """
    predicted, expected = normalise(prediction).split(), normalise(reference).split()
    return _f1(len(set(predicted) & set(expected)), predicted, expected)


def best(metric: Metric, prediction: str | None, references: Sequence[str]) -> float:
    """Return the best score over the references; 0 without a prediction or without references."""
    if prediction is None:
        return 0.0
    return max((metric(prediction, reference) for reference in references), default=0.0)


def _f1(common: int, predicted: Sequence[str], expected: Sequence[str]) -> float:
    if not predicted or not expected:
        return float(not predicted and not expected)
    if common == 0:
        return 0.0
    precision, recall = common / len(predicted), common / len(expected)
    return 2 * precision * recall / (precision + recall)
