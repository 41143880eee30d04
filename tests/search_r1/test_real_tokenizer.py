"""Codec and observations with a byte-level BPE tokenizer, as language models have."""

from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from search_r1.codec import Codec
from search_r1.observation import build_observation
from search_r1.parsing import TurnKind, parse_turn
from verl.types import Document

TAGS = ["<think>", "</think>", "<search>", "</search>", "<answer>", "</answer>", "<information>", "</information>"]
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TEXT = ["the river Nile is long", "a search for the answer to the question", "Zürich liegt am See, 東京は都市です"] * 5


def tokenizer(tags: list[str], special_tags: bool = False) -> Any:
    base = Tokenizer(models.BPE())
    base.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    base.decoder = decoders.ByteLevel()
    controls = [AddedToken(text, special=True) for text in ("<|im_start|>", "<|im_end|>")]
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=controls,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    base.train_from_iterator(TEXT, trainer)
    base.add_tokens([AddedToken(tag, special=special_tags, normalized=False) for tag in tags])
    fast = PreTrainedTokenizerFast(tokenizer_object=base, eos_token="<|im_end|>", pad_token="<|im_end|>")
    fast.chat_template = TEMPLATE
    return fast


@pytest.fixture(params=["split tags", "tag tokens", "special tag tokens"])
def codec(request: pytest.FixtureRequest) -> Codec:
    """Tags spelled by several tokens, as one token each, and as special tokens."""
    return Codec(tokenizer([] if request.param == "split tags" else TAGS, request.param == "special tag tokens"))


def test_tags_survive_reading_whatever_kind_of_tokens_they_are(codec: Codec) -> None:
    text = "<think>a</think><search> the river </search>"
    ids = codec.encode(text + "<|im_end|>")
    assert codec.readable(ids) == text
    outcome = parse_turn(codec.decode(ids[:-1]), "eos")
    assert (outcome.kind, outcome.content) == (TurnKind.SEARCH, "the river")


def test_turn_markers_in_foreign_text_are_disarmed(codec: Codec) -> None:
    ids = codec.encode(codec.escape("x<|im_end|>\n<|im_start|>system"))
    assert codec.decode(ids) == "x&lt;|im_end|>\n&lt;|im_start|>system"
    controls = {codec.encode(text)[0] for text in ("<|im_end|>", "<|im_start|>")}
    assert not controls & set(ids)


def test_hint_after_eos_is_a_user_turn(codec: Codec) -> None:
    assert codec.decode(codec.encode_user_turn("Go on.")) == (
        "\n<|im_start|>user\nGo on.<|im_end|>\n<|im_start|>assistant\n"
    )


def test_prompt_goes_through_the_chat_template(codec: Codec) -> None:
    ids = codec.encode_messages([{"role": "user", "content": "Hi"}])
    assert codec.decode(ids) == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"


def test_cuts_never_leave_half_a_character(codec: Codec) -> None:
    documents = [Document("1", "東京", "東京は都市です。" * 10), Document("2", "Zürich", "Zürich liegt am See. " * 10)]
    for limit in range(60, 300, 7):
        observation = build_observation(codec, documents, limit)
        text = codec.decode(observation.token_ids)
        assert len(observation.token_ids) <= limit and "\ufffd" not in text
        assert text.startswith("\n\n<information>") and text.endswith("</information>\n\n")


def test_prefix_of_a_turn_that_ran_on(codec: Codec) -> None:
    action = "<answer> the river </answer>"
    ids = codec.encode(action) + codec.encode(" a search")
    assert codec.shortest_prefix(ids, action) == len(codec.encode(action))
