"""The vLLM engine on tiny models: exact log-probs after every publish, seeds, stops, refused and broken publishes.

An engine takes up to a minute to start, so the tests share one per kind of model and each begins with a publish.
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm_models import Served, from_vllm_itself, load, make_vllm_folder, needs_vllm, trainer_logprobs

from verl.errors import EngineError
from verl.types import Sampling
from verl.workers.rollout.hf import HfEngine

pytestmark = [needs_vllm, from_vllm_itself]

CONTEXTS = [[5 + i, 6, 7, *range(20, 20 + 9 * i)] for i in range(6)]


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    base = tmp_path_factory.mktemp("vllm")
    folder = make_vllm_folder(base / "model", seed=0, tie_word_embeddings=request.param)
    served = Served(folder, base / "weights")
    yield served
    served.close()


@pytest.fixture
def model(served: Served) -> Any:
    """The served model, published anew as version 1."""
    loaded = load(served.folder)
    served.publish(loaded, 1)
    return loaded


def changed(model: Any, seed: int) -> Any:
    """Return a copy with every weight moved, as an update would, only further."""
    moved = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in moved.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    return moved


def worst_gap(served: Served, model: Any, temperature: float = 1.0) -> float:
    requests = [(context, Sampling(12, temperature, seed=i)) for i, context in enumerate(CONTEXTS)]
    gaps = []
    for (context, _), completion in zip(requests, served.generate(requests), strict=True):
        expected = trainer_logprobs(model, context, completion.token_ids, temperature)
        gaps += [abs(a - b) for a, b in zip(completion.logprobs, expected, strict=True)]
    return max(gaps)


def test_log_probs_are_the_trainers_after_every_publish(served: Served, model: Any) -> None:
    assert worst_gap(served, model) < 1e-4
    assert worst_gap(served, model) < 1e-4  # from the prefix cache
    for version in range(2, 6):
        model = changed(model, version)
        served.publish(model, version)
        assert worst_gap(served, model) < 1e-4
        assert served.generate([([5], Sampling(1))])[0].policy_version == version


def test_a_publish_that_does_not_arrive_shows_in_the_log_probs(served: Served, model: Any) -> None:
    """The oracle of the test above can fail: other weights are far off."""
    assert worst_gap(served, changed(model, 7)) > 0.01


def test_log_probs_are_those_of_the_sampling_temperature(served: Served, model: Any) -> None:
    assert worst_gap(served, model, temperature=0.6) < 1e-4


def test_seeds_decide_alone_whatever_else_is_in_the_batch(served: Served, model: Any) -> None:
    requests = [(context, Sampling(16, seed=i)) for i, context in enumerate(CONTEXTS)]
    together = served.generate(requests)
    assert served.generate(requests) == together
    assert served.generate(requests[2:3])[0].token_ids == together[2].token_ids
    other = served.generate([(CONTEXTS[2], Sampling(16, seed=99))])[0]
    assert other.token_ids != together[2].token_ids


def test_turns_that_share_a_seed_do_not_share_their_draws(served: Served, model: Any) -> None:
    flat = copy.deepcopy(model)
    with torch.no_grad():  # every token equally likely: what is sampled depends on the draws alone
        flat.get_output_embeddings().weight.zero_()
    served.publish(flat, 2)
    first, second, again = served.generate([([5] * n, Sampling(12, seed=3)) for n in (4, 5, 4)])
    assert first.token_ids == again.token_ids != second.token_ids


def test_a_seeded_prompt_longer_than_a_step_is_read_whole(served: Served, model: Any) -> None:
    context = [1 + i % 200 for i in range(200)]  # the engine was told 64 tokens a step
    (completion,) = served.generate([(context, Sampling(8, seed=1))])
    assert completion.logprobs == pytest.approx(trainer_logprobs(model, context, completion.token_ids), abs=1e-4)


def test_greedy_answers_and_their_ends_are_those_of_the_hf_engine(served: Served, model: Any) -> None:
    reference = HfEngine(str(served.folder), max_num_seqs=8, max_model_len=256)
    free = [(context, Sampling(40, temperature=0.0)) for context in CONTEXTS]
    texts = [served.engine.tokenizer.decode(c.token_ids, skip_special_tokens=False) for c in served.generate(free)]
    letters = [next(character for character in text[6:] if character.isascii()) for text in texts]
    cut = [(context, Sampling(40, 0.0, stop=(letter,))) for context, letter in zip(CONTEXTS, letters, strict=True)]
    for requests in (free, cut):
        for (context, sampling), found in zip(requests, served.generate(requests), strict=True):
            expected = served.run(reference.generate(context, sampling))
            assert (found.token_ids, found.finish) == (expected.token_ids, expected.finish)
            assert found.logprobs == pytest.approx(expected.logprobs, abs=1e-4)
    assert {completion.finish for completion in served.generate(cut)} >= {"stop"}
    reference.close()


def test_the_end_of_sequence_token_ends_a_turn_and_stays(served: Served, model: Any) -> None:
    eager = copy.deepcopy(model)
    with torch.no_grad():  # a head that knows no difference between tokens: the lowest id, EOS, is the greedy choice
        eager.get_output_embeddings().weight.zero_()
    served.publish(eager, 2)
    (completion,) = served.generate([([5, 6], Sampling(9, temperature=0.0))])
    assert (completion.token_ids, completion.finish) == ((0,), "eos")


def test_the_next_turn_reads_only_what_is_new(served: Served, model: Any) -> None:
    context = list(range(20, 120))
    (first,) = served.generate([(context, Sampling(8, seed=1))])
    before = served.engine.totals()
    longer = [*context, *first.token_ids, 30, 31]
    (second,) = served.generate([(longer, Sampling(8, seed=1))])
    after = served.engine.totals()
    assert after["reused_tokens"] - before["reused_tokens"] == 96  # whole blocks of 32
    assert after["prefilled_tokens"] - before["prefilled_tokens"] == len(longer) - 96
    assert after["generated_tokens"] - before["generated_tokens"] == len(second.token_ids)


def test_a_context_without_room_is_refused_by_number(served: Served, model: Any) -> None:
    with pytest.raises(EngineError, match="cannot generate 5 tokens after 256 tokens of context"):
        served.generate([([5] * 256, Sampling(5))])
    assert len(served.generate([([5] * 254, Sampling(5, seed=1))])[0].token_ids) <= 2


def test_a_publish_that_does_not_fit_is_refused_and_changes_nothing(served: Served, model: Any) -> None:
    request = ([5, 6, 7], Sampling(10, seed=2))
    before = served.generate([request])
    wrong = served.channel.publish(
        ((name, tensor[:-1] if name.endswith("norm.weight") else tensor) for name, tensor in model.named_parameters()),
        version=2,
    )
    with pytest.raises(EngineError, match=r"model.norm.weight: sent float32\(63,\), expected float32\(64,\)"):
        served.run(served.engine.take_over(wrong))
    assert served.generate([request]) == before


def test_a_publish_that_breaks_off_stops_generation_until_a_whole_one(served: Served, model: Any) -> None:
    other = changed(model, 3)
    manifest = served.manifest(other, 2)
    damaged = Path(manifest.files[-1])
    content = bytearray(damaged.read_bytes())
    content[-1] ^= 1
    damaged.write_bytes(content)
    with pytest.raises(EngineError, match="the checksum of"):
        served.run(served.engine.take_over(manifest))
    with pytest.raises(EngineError, match=r"cannot generate: publishing weights version 2 failed after \d+ weights"):
        served.generate([([5], Sampling(3))])
    assert served.engine.weights.version == 1
    served.publish(other, 3)
    assert worst_gap(served, other) < 1e-4
    assert served.engine.weights.version == 3


def test_weights_are_not_replaced_while_generations_run(served: Served, model: Any) -> None:
    async def meanwhile() -> None:
        running = asyncio.ensure_future(served.engine.generate([5, 6], Sampling(200, seed=1)))
        await asyncio.sleep(0.02)
        with pytest.raises(EngineError, match="while generations run"):
            await served.engine.take_over(manifest)
        await running

    manifest = served.manifest(model, 2)
    served.run(meanwhile())


def test_damaged_weights_fail_the_request_and_a_later_publish_repairs(served: Served, model: Any) -> None:
    damaged = copy.deepcopy(model)
    with torch.no_grad():
        damaged.model.norm.weight.fill_(torch.nan)
    served.publish(damaged, 2)
    with pytest.raises(EngineError, match="not finite"):
        served.generate([([5], Sampling(3))])
    served.publish(model, 3)
    assert worst_gap(served, model) < 1e-4
