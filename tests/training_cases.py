"""What tests of the training side share: a tiny random Qwen2 folder, seeded samples, a run config."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen2Config

from verl.config import RunConfig, load_config
from verl.data.samples import assemble
from verl.types import Origin, Reward, Sample, Segment, StopReason, Trajectory

END, PAD = "<|im_end|>", "<|pad|>"
CHAT = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte, and three special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {text: index for index, text in enumerate([PAD, "<|im_start|>", END, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=END, pad_token=PAD, additional_special_tokens=["<|im_start|>"]
    )
    fast.chat_template = CHAT
    return fast


def tiny_config(**overrides: Any) -> Qwen2Config:
    """Two layers of width 32 with grouped heads."""
    values: dict[str, Any] = {
        "vocab_size": 260,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
        "max_position_embeddings": 512,
        "bos_token_id": None,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
    return Qwen2Config(**(values | overrides))


def make_model(folder: Path, seed: int = 0, weights: bool = True, **overrides: Any) -> Path:
    """Write a model folder with tokenizer; initial weights are larger than usual so that outputs differ clearly."""
    folder.mkdir(parents=True, exist_ok=True)
    config = tiny_config(initializer_range=0.1, **overrides)
    byte_tokenizer().save_pretrained(folder)
    config.save_pretrained(folder)
    if weights:
        torch.manual_seed(seed)
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def make_trajectory(index: int, seed: int, group: int = 4) -> Trajectory:
    """A two-turn episode of random ids and lengths; the reward depends on the index."""
    draw = random.Random(f"{seed}/{index}")

    def ids(low: int, high: int) -> tuple[int, ...]:
        return tuple(draw.randrange(3, 259) for _ in range(draw.randint(low, high)))

    def model() -> Segment:
        tokens = ids(3, 9)
        return Segment(Origin.MODEL, tokens, tuple(-5.5 + draw.random() for _ in tokens), 0)

    segments = (
        Segment(Origin.PROMPT, ids(4, 20)),
        model(),
        Segment(Origin.ENV, ids(5, 30)),
        model(),
        *((Segment(Origin.ENV, ids(2, 6)),) if index % 3 == 0 else ()),
    )
    return Trajectory(
        trajectory_id=f"p{index // group}#{index % group}",
        prompt_id=f"p{index // group}",
        segments=segments,
        stop=StopReason.ANSWERED,
        reward=Reward(draw.choice((0.0, 0.25, 1.0))),
    )


def make_samples(count: int, seed: int = 0) -> list[Sample]:
    """Samples with every column filled with plausible numbers."""
    filled = []
    for sample in assemble([make_trajectory(index, seed) for index in range(count)]).samples:
        draw = random.Random(f"{seed}/{sample.sample_id}")

        def column(scale: float, sample: Sample = sample, draw: random.Random = draw) -> tuple[float, ...]:
            return tuple(draw.uniform(-scale, scale) if trained else 0.0 for trained in sample.loss_mask)

        old = tuple(value + shift for value, shift in zip(sample.rollout_logprobs, column(0.3), strict=True))
        reference = tuple(value + shift for value, shift in zip(old, column(0.3), strict=True))
        filled.append(
            replace(
                sample,
                old_logprobs=old,
                ref_logprobs=reference,
                values=column(0.5),
                advantages=column(2.0),
                returns=column(1.0),
            )
        )
    return filled


def run_config(folder: Path, *overrides: str) -> RunConfig:
    """A valid run on the tiny model in float32, everything local."""
    return load_config(
        overrides=[
            f"actor_rollout_ref.model.path={folder}",
            f"critic.model.path={folder}",
            "actor_rollout_ref.model.dtype=float32",
            "critic.model.dtype=float32",
            "actor_rollout_ref.rollout.dtype=float32",
            "data.train_batch_size=12",
            "actor_rollout_ref.actor.ppo_mini_batch_size=12",
            "actor_rollout_ref.actor.ppo_micro_batch_size=4",
            "critic.ppo_mini_batch_size=12",
            "critic.ppo_micro_batch_size=4",
            "actor_rollout_ref.actor.optim.lr=1e-2",
            "critic.optim.lr=1e-2",
            "trainer.n_gpus_per_node=1",
            "trainer.total_training_steps=10",
            "cluster.kind=local",
            *overrides,
        ]
    )
