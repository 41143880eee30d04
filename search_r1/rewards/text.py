"""Comparing texts: normalisers, exact match and F1 (SQuAD: Rajpurkar et al., 2016), and the published variants."""

from __future__ import annotations

import re
import string
import unicodedata
from collections import Counter
from collections.abc import Callable, Sequence

from search_r1.tags import escape_tags
from verl.registry import Registry

Normalise = Callable[[str], str]
"""Text -> its words, separated by single spaces."""

_ARTICLES = re.compile(r"\b(?:a|an|the)\b")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalise(text: str) -> str:
    """SQuAD's form: lower-case, drop ASCII punctuation and the articles a, an, the, squeeze whitespace.

    Beyond ASCII only case and white space follow Unicode: ``É`` becomes ``é``, a typographic quote stays, composed and
    decomposed letters differ, and text without spaces is one word. ``normalise_multilingual`` is for such text. Tags
    are escaped first, as they are in what the model reads, so a copied passage compares equal to its source.
    """
    text = escape_tags(text).lower().translate(_NO_PUNCTUATION)
    return " ".join(_ARTICLES.sub(" ", text).split())


def normalise_multilingual(text: str) -> str:
    """The form for every script: NFKC, case-folded, without punctuation of any script and the articles a, an, the.

    A character of a script that is written without spaces (Chinese, Japanese, Thai, Lao, Khmer, Burmese) is a word,
    its vowel signs and tone marks included: the mixed segmentation of MLQA (Lewis et al., 2020), and the character F1
    customary for Japanese and Thai. ``normalise_multilingual("東京の 3 rue de l’Église")`` is
    ``東 京 の 3 rue de léglise``.
    """
    text = unicodedata.normalize("NFKC", escape_tags(text)).casefold()
    text = "".join(c for c in text if c not in string.punctuation and not unicodedata.category(c).startswith("P"))
    return " ".join(_spaced(_ARTICLES.sub(" ", text)).split())


_UNSPACED = (
    (0x0E00, 0x0EFF),  # Thai, Lao
    (0x1000, 0x109F),  # Burmese
    (0x1780, 0x17FF),  # Khmer
    (0x3005, 0x3007),  # ideographic iteration mark and zero
    (0x3040, 0x312F),  # Hiragana, Katakana, Bopomofo
    (0x31F0, 0x31FF),  # Katakana extensions
    (0x3400, 0x4DBF),  # Han
    (0x4E00, 0x9FFF),
    (0xF900, 0xFAFF),
    (0x20000, 0x3FFFF),
)
"""Blocks of the scripts whose words are not separated by spaces."""


def _spaced(text: str) -> str:
    """Put spaces around every letter of an unspaced script; combining marks stay with their letter."""
    pieces: list[str] = []
    inside = False  # the last piece is a letter of an unspaced script
    for character in text:
        if unicodedata.category(character).startswith("M") and pieces and not pieces[-1].isspace():
            pieces[-1] += character
            continue
        unspaced = any(low <= ord(character) <= high for low, high in _UNSPACED)
        if unspaced or inside:
            pieces.append(" ")
        pieces.append(character)
        inside = unspaced
    return "".join(pieces)


NORMALISERS: Registry[Normalise] = Registry("normaliser", {"squad": normalise, "multilingual": normalise_multilingual})

# ---------------------------------------------------------------------------------------------------------------
# Metrics

Metric = Callable[[str, str, Normalise], float]
"""(prediction, reference, normaliser) -> score in [0, 1]."""


def exact_match(prediction: str, reference: str, form: Normalise = normalise) -> float:
    """1 when both are equal after normalisation."""
    return float(form(prediction) == form(reference))


def sub_exact_match(prediction: str, reference: str, form: Normalise = normalise) -> float:
    """1 when the normalised reference occurs inside the normalised prediction."""
    return float(form(reference) in form(prediction))


def f1(prediction: str, reference: str, form: Normalise = normalise) -> float:
    """Word F1 over multisets (SQuAD): a word counts as often as it stands in both. Two empty texts score 1.

    ``f1("cat cat", "cat")`` is 2/3.
    """
    predicted, expected = form(prediction).split(), form(reference).split()
    common = sum((Counter(predicted) & Counter(expected)).values())
    return _f1(common, predicted, expected)


def f1_set(prediction: str, reference: str, form: Normalise = normalise) -> float:
    """Word F1 of the published ChatR1 reward: every shared word counts once, lengths count repetitions.

    An answer with repeated words scores below 1 against itself: ``f1_set("a b b a", "a b b a")`` drops the articles and
    gives 0.5 for ``b b``.
    """
    predicted, expected = form(prediction).split(), form(reference).split()
    return _f1(len(set(predicted) & set(expected)), predicted, expected)


ANSWER_METRICS: Registry[Metric] = Registry(
    "answer metric", {"em": exact_match, "sub_em": sub_exact_match, "f1": f1, "f1_chatr1": f1_set}
)


def best(metric: Metric, prediction: str | None, references: Sequence[str], form: Normalise = normalise) -> float:
    """Return the best score over the references; 0 without a prediction or without references."""
    if prediction is None:
        return 0.0
    return max((metric(prediction, reference, form) for reference in references), default=0.0)


def _f1(common: int, predicted: Sequence[str], expected: Sequence[str]) -> float:
    if not predicted or not expected:
        return float(not predicted and not expected)
    if common == 0:
        return 0.0
    precision, recall = common / len(predicted), common / len(expected)
    return 2 * precision * recall / (precision + recall)
