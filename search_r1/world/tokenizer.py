"""The byte-level BPE tokenizer of the shipped model.

Trained on the fixed vocabulary of the world and on single syllables, never on whole names: merges across syllables do
not exist, so every stem, seen or unseen, becomes exactly two tokens, the same in prompts, passages and answers.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from search_r1.world.demonstrations import Demonstrator, ModeWeights
from search_r1.world.encyclopedia import build_encyclopedia
from search_r1.world.names import FINAL_SYLLABLES, INITIAL_SYLLABLES

if TYPE_CHECKING:
    from tokenizers import Tokenizer

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_BLOCKS = ("think", "search", "information", "answer", "context")
TAGS = tuple(f"<{slash}{block}>" for block in _BLOCKS for slash in ("", "/"))
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

# Words and single digits: the pre-tokenisation of Qwen2, so that any loader of that family splits text the same way.
_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SYLLABLE_REPEATS = 3000
_N_TEXT_ROWS = 150


def _training_texts(seed: int) -> Iterator[str]:
    for syllable in INITIAL_SYLLABLES:
        yield from [f" {syllable}"] * _SYLLABLE_REPEATS
    for syllable in FINAL_SYLLABLES:
        yield from [syllable] * _SYLLABLE_REPEATS
    world = build_encyclopedia("practice", 40, seed)
    stem = re.compile("|".join(sorted(world.stems())))
    markup = re.compile("|".join(re.escape(token) for token in SPECIAL_TOKENS + TAGS))
    demonstrator = Demonstrator(world, random.Random(f"tokenizer/{seed}"))
    for _ in range(_N_TEXT_ROWS):
        for _, text in demonstrator.episode(ModeWeights(1, 1, 1))["segments"]:
            yield from (stem.sub("", part) for part in markup.split(text))


def train_tokenizer(vocab_size: int, seed: int) -> Tokenizer:
    """Trains the tokenizer; ``vocab_size`` counts the tags and special tokens, which come last."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(SPECIAL_TOKENS) - len(TAGS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_training_texts(seed), trainer)
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in SPECIAL_TOKENS])
    # Not special: decoding must keep the tags, the episode is read from the text.
    tokenizer.add_tokens([AddedToken(tag, normalized=False, special=False) for tag in TAGS])
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Writes ``tokenizer.json`` and ``tokenizer_config.json`` as Hugging Face loaders expect them."""
    import json

    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "chat_template": CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 2048,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
