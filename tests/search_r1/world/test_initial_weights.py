"""The initial circuit copies: the real model is run, a copy of its arithmetic would prove nothing."""

import random

import numpy as np
import pytest

from search_r1.world.initial_weights import ModelShape, initial_weights

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")


def _model(shape, seed):
    config = transformers.Qwen2Config(**shape.config(eos_token_id=1, pad_token_id=0))
    model = transformers.Qwen2ForCausalLM(config).float().eval()
    state = {name: torch.from_numpy(array) for name, array in initial_weights(shape, seed).items()}
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert (missing, unexpected) == (["lm_head.weight"], [])
    return model


def test_an_untrained_model_repeats_what_it_saw_once():
    model = _model(ModelShape(vocab_size=400), seed=0)
    rng = random.Random(0)
    hits = []
    for _ in range(5):
        once = rng.sample(range(400), 40)
        with torch.no_grad():
            predicted = model(input_ids=torch.tensor([once + once])).logits[0].argmax(-1).tolist()
        hits += [p == t for p, t in zip(predicted[40:-1], once[1:], strict=True)]
    assert np.mean(hits) > 0.8  # chance is 1/400


def test_the_seed_decides_everything():
    shape = ModelShape(vocab_size=64)
    one, same, other = initial_weights(shape, 3), initial_weights(shape, 3), initial_weights(shape, 4)
    assert all(np.array_equal(one[name], same[name]) for name in one)
    assert not np.array_equal(one["model.embed_tokens.weight"], other["model.embed_tokens.weight"])
    assert {array.dtype for array in one.values()} == {np.dtype(np.float32)}
