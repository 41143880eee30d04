"""BERTScore by its package, against the definition computed from the encoder's own hidden states."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from result_rows import row

from search_r1.config import EvaluationConfig, JudgeConfig
from search_r1.evaluation.bought import bert_scores, buy_scores
from verl.errors import ConfigError, ModelError

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "paris", "rome", "in", "the", "city", "of", "lights", "1793"]


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random BERT of three layers with a vocabulary of a dozen words and 16 positions."""
    import torch
    from transformers import BertConfig, BertModel, BertTokenizerFast

    folder = tmp_path_factory.mktemp("encoder")
    (folder / "vocab.txt").write_text("\n".join(WORDS))
    tokenizer = BertTokenizerFast(str(folder / "vocab.txt"))
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 32}
    BertModel(BertConfig(vocab_size=len(tokenizer), max_position_embeddings=16, **sizes)).save_pretrained(folder)
    return folder


def by_definition(folder: Path, answer: str, reference: str, layer: int) -> float:
    """F1 of the greedy cosine matching (Zhang et al., 2020, without idf).

    As in the package, [CLS] and [SEP] may be matched but are not averaged over.
    """
    import torch
    from transformers import AutoModel, AutoTokenizer

    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModel.from_pretrained(folder).eval()

    def embed(text: str) -> torch.Tensor:
        ids = tokenizer(text, return_tensors="pt", truncation=True, max_length=16)
        with torch.no_grad():
            states = model(**ids, output_hidden_states=True).hidden_states[layer][0]
        return torch.nn.functional.normalize(states, dim=-1)

    similarity = embed(answer) @ embed(reference).T
    precision, recall = similarity.max(dim=1).values[1:-1].mean(), similarity.max(dim=0).values[1:-1].mean()
    return float(2 * precision * recall / (precision + recall))


@pytest.mark.filterwarnings("default")
def test_scores_are_those_of_the_definition_best_reference_first(encoder: Path) -> None:
    pytest.importorskip("bert_score")
    references = ("rome", "the city of lights")
    long = "paris in " * 20  # beyond the encoder's positions: cut, not an index error
    rows = [row("a", prediction="paris", answers=references), row("b", prediction=long, answers=references)]
    rows += [row("c", prediction="rome", failed=True), row("d", prediction=None), row("e", prediction=" ")]
    for layer in (None, 2):
        scores = bert_scores(rows, encoder, layer)
        for one, score in zip(rows[:2], scores, strict=False):
            expected = max(by_definition(encoder, one.prediction or "", r, layer or 3) for r in references)
            assert score == pytest.approx(expected, abs=1e-5)
        assert scores[2:] == [0.0, 0.0, 0.0]
    scored, paid = buy_scores(rows, EvaluationConfig(bertscore_model=str(encoder)), JudgeConfig())
    assert [one.scores["bertscore"] for one in scored] == bert_scores(rows, encoder) and paid == {}


@pytest.mark.filterwarnings("default")
def test_what_cannot_be_used_is_named(encoder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "bert_score", None)
    with pytest.raises(ConfigError, match=r"needs the package bert-score .*chatr1\[bertscore\]"):
        bert_scores([row()], encoder)
    monkeypatch.undo()
    pytest.importorskip("bert_score")
    with pytest.raises(ModelError, match=r"evaluation\.bertscore_model=.*no folder of an encoder"):
        bert_scores([row()], tmp_path)
    with pytest.raises(ConfigError, match=r"evaluation\.bertscore_layer=4: .* has the layers 1 to 3"):
        bert_scores([row()], encoder, 4)
