"""Words and stems of the ``lucene`` analyzer. The expected values were read off Lucene 9.5's own analyzer."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from retrieval_server.analyzer import Analyzer
from retrieval_server.lucene_words import _word_pattern, stem_function, words


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("don't U.S.A a:b foo_bar __ _ x C++ AT&T", ["don't", "u.s.a", "a:b", "foo_bar", "x", "c", "at", "t"]),
        ("3.5 1,000 1;2 3a b3 12:30 1.2.3", ["3.5", "1,000", "1;2", "3a", "b3", "12", "30", "1.2.3"]),
        ("www.x.com/a?b=1 me@x.org e-mail", ["www.x.com", "a", "b", "1", "me", "x.org", "e", "mail"]),
        ("1'2 a..b a.1 1.a 'quoted' ''x'' a'1", ["1'2", "a", "b", "a", "1", "1", "a", "quoted", "x", "a", "1"]),
        ("_a a_ 1_2 a_.b x:y:z a·b", ["_a", "a_", "1_2", "a_", "b", "x:y:z", "a·b"]),
        ("日本語 テスト ひら 한국어 ไทย", ["日", "本", "語", "テスト", "ひ", "ら", "한국어", "ไทย"]),
        ("cafe\u0301 \u0130stanbul straße नमस्ते", ["cafe\u0301", "istanbul", "straße", "नमस्ते"]),
        ("½ ² Ⅳ ① a½b x² 21½", ["ⅳ", "a", "b", "x", "21"]),
        ("a\u200db a\u00adb \u200d a\u200bb", ["a\u200db", "a\u00adb", "a", "b"]),
        ("dog's DOG'S dog’s dogs' O’Neil it's", ["dog", "dog", "dog", "dogs", "o’neil", "it"]),
    ],
)
def test_words_are_lucenes(text: str, expected: list[str]) -> None:
    assert words(text) == expected


@given(st.text(st.characters(max_codepoint=127)) | st.text("aZ1_.:,;' "))
def test_the_quick_pattern_for_ascii_finds_what_the_general_one_does(text: str) -> None:
    general = [word for word in _word_pattern().findall(text.lower()) if word.strip("_")]
    assert words(text) == [word.removesuffix("'s") if word.endswith("'s") else word for word in general]


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("ponies", "poni"),
        ("generously", "gener"),
        ("technology", "technolog"),
        ("technologies", "technolog"),
        ("analogy", "analog"),
        ("biology", "biologi"),  # nothing but a consonant and vowels before -logy
        ("possibly", "possibl"),
        ("incredibly", "incred"),
        ("assemblies", "assembl"),
        ("reliably", "reliabl"),
        ("us", "us"),
        ("s", "s"),
        ("3s", "3s"),
        ("gas", "ga"),
    ],
)
def test_stems_are_lucenes(word: str, expected: str) -> None:
    assert stem_function()(word) == expected


def test_the_analyzer_drops_stop_words_after_the_possessive_and_keeps_single_characters() -> None:
    analyzer = Analyzer("english", "lucene")
    assert analyzer.terms("It's I who saw the U.S.A. and C's skies, e-mail 7") == [
        "i", "who", "saw", "u.s.a", "c", "ski", "e", "mail", "7",
    ]  # fmt: skip
    assert analyzer.fingerprint() != Analyzer("english", "english").fingerprint()
