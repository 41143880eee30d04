import pytest

from search_r1.world.demonstrations import chat
from search_r1.world.names import SPLIT_SHARES, stems_of
from search_r1.world.tokenizer import TAGS, save_tokenizer, train_tokenizer


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(1024, 0)


def test_every_stem_is_two_tokens_seen_or_unseen(tokenizer):
    for split in SPLIT_SHARES:
        texts = [f" {stem}" for stem in stems_of(split)]
        assert {len(encoding.ids) for encoding in tokenizer.encode_batch(texts)} == {2}


def test_a_name_is_spelled_the_same_wherever_it_stands(tokenizer):
    name = tokenizer.encode(" Fort Torvan").tokens
    assert name == ["ĠFort", "ĠTor", "van"]
    for text in (
        "(Title: Fort Torvan) x",
        "<answer> Fort Torvan </answer>",
        "of Fort Torvan?",
        "Assistant: Fort Torvan\n",
    ):
        tokens = tokenizer.encode(text).tokens
        start = tokens.index("ĠFort")
        assert tokens[start : start + 3] == name


def test_tags_are_single_tokens_and_survive_decoding(tokenizer):
    text = "".join(TAGS)
    ids = tokenizer.encode(text).ids
    assert len(ids) == len(TAGS) == 10
    assert tokenizer.decode(ids, skip_special_tokens=True) == text


@pytest.mark.parametrize("text", ["Fort Torva has age 316.\n\nDoc 1(Title: x)", "  odd\tspaces ", "naïve 東京 🙂"])
def test_any_text_survives_the_round_trip(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_the_saved_folder_loads_in_transformers_with_its_chat_template(tokenizer, tmp_path):
    transformers = pytest.importorskip("transformers")
    save_tokenizer(tokenizer, tmp_path)
    loaded = transformers.AutoTokenizer.from_pretrained(tmp_path)
    text = "Who is it?</search> Fort Torvan 1850"
    assert loaded(text, add_special_tokens=False)["input_ids"] == tokenizer.encode(text).ids
    assert (loaded.eos_token, loaded.pad_token) == ("<|im_end|>", "<|endoftext|>")
    messages = [{"role": "user", "content": "Hello"}]
    assert loaded.apply_chat_template(messages, tokenize=False, add_generation_prompt=True) == chat("Hello")
