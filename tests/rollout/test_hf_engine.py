"""The hf engine against the plain forward pass of the same model, and its behaviour under load and failure."""

from __future__ import annotations

import asyncio
import random
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from rollout_models import EOS, build_tokenizer, id_of, make_folder
from transformers import AutoModelForCausalLM, Gemma2Config, GraniteConfig

from verl.errors import EngineError, ModelError
from verl.types import Completion, Sampling
from verl.workers.rollout.hf import HfEngine

MakeEngine = Callable[..., HfEngine]


def contexts(n: int, seed: int = 0, low: int = 3, high: int = 40) -> list[list[int]]:
    source = random.Random(seed)
    return [[source.randrange(1, 250) for _ in range(source.randrange(low, high))] for _ in range(n)]


def generate(engine: HfEngine, requests: Sequence[tuple[list[int], Sampling]]) -> list[Completion]:
    async def together() -> list[Completion]:
        return await asyncio.gather(*(engine.generate(ids, sampling) for ids, sampling in requests))

    return asyncio.run(together())


def reference_logprobs(folder: Path, context: Sequence[int], tokens: Sequence[int], temperature: float) -> torch.Tensor:
    """Log-softmax over the whole vocabulary at every generated position, by one full forward pass: [S, V]."""
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32)
    with torch.no_grad():
        logits = model(torch.tensor([[*context, *tokens]])).logits[0, len(context) - 1 : -1]
    return torch.log_softmax(logits.double() / temperature, -1)


def test_sampled_logprobs_are_those_of_the_full_forward_pass(make_engine: MakeEngine, model_folder: Path) -> None:
    engine = make_engine()
    requests = [(ids, Sampling(24, temperature=0.7, seed=i)) for i, ids in enumerate(contexts(12))]
    for (ids, _), completion in zip(requests, generate(engine, requests), strict=True):
        expected = reference_logprobs(model_folder, ids, completion.token_ids, 0.7)
        chosen = expected.gather(-1, torch.tensor(completion.token_ids).unsqueeze(-1)).squeeze(-1)
        assert torch.tensor(completion.logprobs) == pytest.approx(chosen, abs=2e-5)


def test_greedy_takes_the_peak_of_the_full_forward_pass(make_engine: MakeEngine, model_folder: Path) -> None:
    requests = [(ids, Sampling(16, temperature=0.0)) for ids in contexts(4)]
    for (ids, _), completion in zip(requests, generate(make_engine(), requests), strict=True):
        expected = reference_logprobs(model_folder, ids, completion.token_ids, 1.0)
        assert list(completion.token_ids) == expected.argmax(-1).tolist()
        assert torch.tensor(completion.logprobs) == pytest.approx(expected.amax(-1), abs=2e-5)


def test_a_request_does_not_depend_on_its_neighbours(make_engine: MakeEngine) -> None:
    engine = make_engine(max_num_seqs=8)
    requests = [(ids, Sampling(20, seed=i)) for i, ids in enumerate(contexts(20, seed=4))]
    together = generate(engine, requests)
    for request, expected in zip(requests, together, strict=True):
        (alone,) = generate(engine, [request])
        assert alone.token_ids == expected.token_ids
        assert alone.logprobs == pytest.approx(expected.logprobs, abs=2e-5)


def test_equal_contexts_are_read_once_and_sampled_apart(make_engine: MakeEngine) -> None:
    engine, (ids,) = make_engine(), contexts(1, low=30)
    requests = [(ids, Sampling(12, seed=i)) for i in range(8)]
    group = generate(engine, requests)
    assert engine.stats.prefilled_tokens == len(ids)
    assert engine.stats.reused_tokens == 7 * len(ids)
    assert len({completion.token_ids for completion in group}) == 8
    for request, expected in zip(requests, group, strict=True):
        assert generate(engine, [request])[0].token_ids == expected.token_ids


def test_later_turns_read_only_what_was_appended(make_engine: MakeEngine, model_folder: Path) -> None:
    engine = make_engine()

    async def episode(ids: list[int], order: int) -> list[tuple[list[int], Completion]]:
        turns, context = [], list(ids)
        with engine.session(order) as session:
            for turn in range(3):
                completion = await session.generate(context, Sampling(10, seed=100 * order + turn))
                turns.append((list(context), completion))
                context += [*completion.token_ids, *range(1, 6 + order)]
        return turns

    async def together() -> list[list[tuple[list[int], Completion]]]:
        return await asyncio.gather(*(episode(ids, i) for i, ids in enumerate(contexts(5, seed=8))))

    episodes = asyncio.run(together())
    for turns in episodes:
        for context, completion in turns:
            expected = reference_logprobs(model_folder, context, completion.token_ids, 1.0)
            chosen = expected.gather(-1, torch.tensor(completion.token_ids).unsqueeze(-1)).squeeze(-1)
            assert torch.tensor(completion.logprobs) == pytest.approx(chosen, abs=2e-5)
    read = sum(len(turns[-1][0]) for turns in episodes)
    # Everything is read once, except the last token of each turn, which is in no cache until the next turn reads it.
    generated = sum(len(completion.token_ids) - 1 for turns in episodes for _, completion in turns[:-1])
    assert engine.stats.prefilled_tokens == read - generated


def test_a_context_that_is_not_a_continuation_is_read_anew(make_engine: MakeEngine, model_folder: Path) -> None:
    engine, (first, second) = make_engine(), contexts(2, low=20)

    async def two_turns() -> Completion:
        with engine.session(0) as session:
            await session.generate(first, Sampling(5, seed=1))
            return await session.generate(second, Sampling(5, seed=2))

    completion = asyncio.run(two_turns())
    assert completion.token_ids == generate(engine, [(second, Sampling(5, seed=2))])[0].token_ids


class Scripted:
    """Stands in for the model: row i's next token is the script's, whatever the context."""

    def __init__(self, engine: HfEngine, script: Sequence[int]) -> None:
        self._script, self._size = list(script), engine.model.vocabulary
        engine.model.prefill = lambda first, suffixes, starts: self._logits(len(suffixes), 0)  # type: ignore[method-assign]
        engine.model.decode = lambda tokens, positions, longest: self._next(len(tokens))  # type: ignore[method-assign]
        self._position = 0

    def _next(self, rows: int) -> torch.Tensor:
        self._position += 1
        return self._logits(rows, self._position)

    def _logits(self, rows: int, position: int) -> torch.Tensor:
        logits = torch.full((rows, self._size), -50.0)
        logits[:, self._script[position]] = 50.0
        return logits


@pytest.mark.parametrize(
    ("pieces", "finish", "kept"),
    [
        (["a", "</sea", "rch>", "b"], "stop", 3),
        (["a", "</sea", "rch>and", "b"], "stop", 3),
        (["é</search>", "b"], "stop", 1),
        (["<", "/", "a", "n", "s", "w", "e", "r", ">", "b"], "stop", 9),
        (["</answer", ">", "b"], "stop", 2),
        (["<search>", ">", "rch>", "<|end|>", "b"], "eos", 4),
        (["a", "b", "c", "d", "e", "f", "g", "h", "i", "j", "k", "l"], "length", 10),
    ],
)
def test_generation_ends_at_the_token_that_completes_a_stop_string(
    make_engine: MakeEngine, pieces: list[str], finish: str, kept: int
) -> None:
    engine = make_engine()
    script = [EOS if piece == "<|end|>" else id_of(engine.tokenizer, piece) for piece in pieces]
    Scripted(engine, script)
    sampling = Sampling(10, stop=("</search>", "</answer>"))
    (completion,) = generate(engine, [([5, 6], sampling)])
    assert completion.finish == finish
    assert list(completion.token_ids) == script[:kept]
    assert len(completion.logprobs) == kept


def test_a_stop_string_outside_ascii_is_found_across_byte_tokens(make_engine: MakeEngine) -> None:
    engine = make_engine()
    script = engine.tokenizer.encode("x終y", add_special_tokens=False)
    assert len(script) == 5  # three byte tokens for the middle character
    Scripted(engine, script)
    (completion,) = generate(engine, [([5], Sampling(10, stop=("終",)))])
    assert list(completion.token_ids) == script[:4]


def test_output_is_capped_by_the_models_length(make_engine: MakeEngine) -> None:
    engine = make_engine(max_model_len=20)
    (completion,) = generate(engine, [([5] * 17, Sampling(10, seed=1))])
    assert len(completion.token_ids) == 3
    assert completion.finish == "length"
    with pytest.raises(EngineError, match="limit is 20"):
        generate(engine, [([5] * 20, Sampling(10))])
    with pytest.raises(EngineError, match="must be positive"):
        generate(engine, [([], Sampling(10))])


@pytest.mark.parametrize("delays", [0, 1, 2])
def test_deterministic_batches_depend_on_the_order_of_sessions_only(make_engine: MakeEngine, delays: int) -> None:
    """Searches of random length between the turns change nothing, bit for bit."""

    def run(seed: int) -> tuple[list[list[Completion]], list[list[int]]]:
        engine = make_engine(deterministic=True)
        batches: list[list[int]] = []
        add = engine._batch.add

        def recorded(requests: list[Any]) -> Any:
            batches.append([request.session.order for request in requests])
            return add(requests)

        engine._batch.add = recorded  # type: ignore[method-assign]
        sleeps = random.Random(seed)

        async def episode(ids: list[int], order: int, session: Any) -> list[Completion]:
            completions, context = [], list(ids)
            with session:
                for turn in range(1 + order % 3):
                    await asyncio.sleep(sleeps.random() * 0.02)
                    completions.append(await session.generate(context, Sampling(8, seed=order * 10 + turn)))
                    context += [*completions[-1].token_ids, 7, 8, 9]
            return completions

        async def together() -> list[list[Completion]]:
            sessions = [engine.session(i) for i in range(6)]
            work = [episode(ids, i, sessions[i]) for i, ids in enumerate(contexts(6, seed=2))]
            sleeps.shuffle(work)
            done = await asyncio.gather(*work)
            return sorted(done, key=lambda completions: [c.token_ids for c in completions])

        return asyncio.run(together()), batches

    first, second = run(0), run(delays + 1)
    assert first[0] == second[0]  # tokens and log-probs, exactly
    assert first[1] == second[1] == [[0, 1, 2, 3, 4, 5], [1, 2, 4, 5], [2, 5]]


def test_a_cancelled_request_leaves_the_batch_and_the_others_go_on(make_engine: MakeEngine) -> None:
    engine = make_engine()
    expected = generate(engine, [(ids, Sampling(60, seed=i)) for i, ids in enumerate(contexts(3))])

    async def cancel_one() -> list[Completion]:
        tasks = [
            asyncio.create_task(engine.generate(ids, Sampling(400 if i == 0 else 60, seed=i)))
            for i, ids in enumerate(contexts(3))
        ]
        await asyncio.sleep(0.02)
        tasks[0].cancel()
        return await asyncio.gather(*tasks[1:])

    assert [c.token_ids for c in asyncio.run(cancel_one())] == [c.token_ids for c in expected[1:]]


def test_tokens_are_streamed_as_they_are_sampled(make_engine: MakeEngine) -> None:
    engine, seen = make_engine(), []

    async def stream() -> Completion:
        with engine.session(0, on_token=seen.append) as session:
            return await session.generate([5, 6, 7], Sampling(9, seed=3))

    assert seen == list(asyncio.run(stream()).token_ids)


# -- weights ----------------------------------------------------------------------------------------------------


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def test_loaded_weights_replace_the_old_ones_and_stamp_the_version(
    make_engine: MakeEngine, tmp_path: Path, model_folder: Path
) -> None:
    other = make_folder(tmp_path / "other", seed=1)
    engine, request = make_engine(await_weights=True), ([5, 6, 7], Sampling(8, temperature=0.0))
    with pytest.raises(EngineError, match="no weights were published"):
        generate(engine, [request])
    engine.load_weights(iter(weights_of(model_folder).items()), version=0)
    (before,) = generate(engine, [request])
    engine.load_weights(iter(weights_of(other).items()), version=3)
    (after,) = generate(engine, [request])
    assert (before.policy_version, after.policy_version) == (0, 3)
    assert before.token_ids != after.token_ids
    assert after.token_ids == generate(make_engine(folder=other), [request])[0].token_ids


def test_nothing_computed_with_the_old_weights_survives_a_load(make_engine: MakeEngine, tmp_path: Path) -> None:
    other = make_folder(tmp_path / "other", seed=1)
    engine, greedy = make_engine(), Sampling(8, temperature=0.0)

    async def two_turns() -> tuple[list[int], Completion]:
        with engine.session(0) as session:
            first = await session.generate([5, 6, 7], greedy)
            engine.load_weights(iter(weights_of(other).items()), version=1)
            context = [5, 6, 7, *first.token_ids, 8, 9]
            return context, await session.generate(context, greedy)

    context, second = asyncio.run(two_turns())
    (expected,) = generate(make_engine(folder=other), [(context, greedy)])
    assert second.token_ids == expected.token_ids
    assert second.logprobs == pytest.approx(expected.logprobs, abs=2e-5)


def test_a_load_that_breaks_off_makes_the_engine_unusable_until_a_full_one(
    make_engine: MakeEngine, model_folder: Path
) -> None:
    engine, weights = make_engine(), weights_of(model_folder)

    def broken() -> Any:
        yield next(iter(weights.items()))
        raise OSError("connection lost")

    with pytest.raises(OSError, match="connection lost"):
        engine.load_weights(broken(), version=5)
    with pytest.raises(EngineError, match=r"version 5 failed after 1 weights were written: connection lost"):
        generate(engine, [([5], Sampling(3))])
    engine.load_weights(iter(weights.items()), version=6)
    assert generate(engine, [([5], Sampling(3))])[0].policy_version == 6


def test_a_load_refused_before_the_first_write_leaves_the_engine_as_it_was(
    make_engine: MakeEngine,
) -> None:
    engine, request = make_engine(), ([5, 6], Sampling(6, seed=2))
    before = generate(engine, [request])

    def refused() -> Any:
        raise EngineError("wrong shape")
        yield

    with pytest.raises(EngineError, match="wrong shape"):
        engine.load_weights(refused(), version=5)
    assert generate(engine, [request]) == before


def test_damaged_weights_fail_the_request_and_a_later_load_repairs_the_engine(
    make_engine: MakeEngine, model_folder: Path
) -> None:
    engine, weights = make_engine(), weights_of(model_folder)
    damaged = weights | {"model.norm.weight": torch.full_like(weights["model.norm.weight"], torch.nan)}
    engine.load_weights(iter(damaged.items()), version=1)
    with pytest.raises(EngineError, match="not finite"):
        generate(engine, [([5], Sampling(3))])
    engine.load_weights(iter(weights.items()), version=2)
    assert len(generate(engine, [([5], Sampling(3, seed=1))])[0].token_ids) == 3


# -- models -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "overrides",
    [
        {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
        {"tie_word_embeddings": False, "num_key_value_heads": 4},
        {"head_dim": 16, "num_key_value_heads": 1},
    ],
)
def test_other_attention_shapes_agree_with_the_full_forward_pass(
    make_engine: MakeEngine, tmp_path: Path, overrides: dict[str, Any]
) -> None:
    folder = make_folder(tmp_path / "model", seed=2, **overrides)
    engine = make_engine(folder=folder)
    requests = [(ids, Sampling(20, seed=i)) for i, ids in enumerate(contexts(6))]
    for (ids, _), completion in zip(requests, generate(engine, requests), strict=True):
        expected = reference_logprobs(folder, ids, completion.token_ids, 1.0)
        chosen = expected.gather(-1, torch.tensor(completion.token_ids).unsqueeze(-1)).squeeze(-1)
        assert torch.tensor(completion.logprobs) == pytest.approx(chosen, abs=2e-5)


def test_a_half_precision_engine_stays_near_the_full_forward_pass(make_engine: MakeEngine, model_folder: Path) -> None:
    (ids,) = contexts(1)
    (completion,) = generate(make_engine(dtype="bfloat16"), [(ids, Sampling(20, seed=1))])
    expected = reference_logprobs(model_folder, ids, completion.token_ids, 1.0)
    chosen = expected.gather(-1, torch.tensor(completion.token_ids).unsqueeze(-1)).squeeze(-1)
    assert float((torch.tensor(completion.logprobs) - chosen).abs().mean()) < 0.1


def test_architectures_that_decode_otherwise_are_refused_at_load(tmp_path: Path) -> None:
    """Scaled logits and soft-capped attention scores: sampling would be from another distribution than trained on."""
    shape = {
        "vocab_size": len(build_tokenizer()),
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 64,
        "head_dim": 8,
    }
    configs = {"scaled": GraniteConfig(**shape, logits_scaling=4.0), "capped": Gemma2Config(**shape)}
    for name, config in configs.items():
        AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(tmp_path / name)
        build_tokenizer().save_pretrained(tmp_path / name)
    with pytest.raises(ModelError, match=r"Granite.*differs from the model's forward pass"):
        HfEngine(str(tmp_path / "scaled"))
    with pytest.raises(ModelError, match="softcap"):
        HfEngine(str(tmp_path / "capped"))


def test_a_folder_without_tokenizer_or_with_pickled_weights_is_refused(tmp_path: Path, model_folder: Path) -> None:
    bare = tmp_path / "bare"
    shutil.copytree(model_folder, bare, ignore=shutil.ignore_patterns("tokenizer*"))
    with pytest.raises(ModelError, match="no usable tokenizer"):
        HfEngine(str(bare))
    pickled = tmp_path / "pickled"
    shutil.copytree(model_folder, pickled, ignore=shutil.ignore_patterns("*.safetensors"))
    (pickled / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(ModelError, match="safetensors"):
        HfEngine(str(pickled))
