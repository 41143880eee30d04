"""3,610 rows (the size of a known test split) at batch 256: 3,610 scored rows in file order, twice the same."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from search_r1.config import search_config
from search_r1.evaluation.files import read_results
from search_r1.published import read_predictions, score_rows
from search_r1.task import SearchTask
from search_r1.testing import CharTokenizer, DictionarySearch, ScriptedEngine
from verl.errors import EngineError
from verl.trainer.evaluate import Evaluator
from verl.types import Document, EpisodeContext, Prompt, StopReason, Trajectory, episode_seed

N, BATCH = 3610, 256
TURNS: Sequence[Sequence[str | Exception]] = (
    ("<think>t</think><search> q </search>", "<think>t</think><answer> one </answer>"),
    ("<think>t</think><answer> two </answer>",),
    ("<answer> one two three </answer>",),
    ("no tag<|end|>", "<search> </search>", "still none<|end|>"),
    (EngineError("gone"),),
)


class Rollouts:
    """Runs the task's real episodes; what the engine says depends on the seed of the episode alone."""

    def __init__(self, task: SearchTask, tokenizer: CharTokenizer) -> None:
        self._task, self._tokenizer = task, tokenizer
        self.sizes: list[int] = []

    def figures(self) -> Mapping[str, float]:
        return {}

    def generate(
        self, prompts: Sequence[Prompt], step: int, n: int, *, temperature: float, top_p: float, top_k: int,
        mode: str = "policy",
    ) -> list[Trajectory]:  # fmt: skip
        self.sizes.append(len(prompts))
        return asyncio.run(self._all(prompts, step, n, temperature, mode))

    async def _all(
        self, prompts: Sequence[Prompt], step: int, n: int, temperature: float, mode: str
    ) -> list[Trajectory]:
        episodes = []
        for prompt in prompts:
            for sample in range(n):
                seed = episode_seed(1, step, prompt.prompt_id, sample)
                engine = ScriptedEngine(self._tokenizer, TURNS[seed % len(TURNS)])
                episodes.append(
                    self._task.episode(prompt, engine, EpisodeContext(sample, seed, temperature, mode=mode))
                )
        return list(await asyncio.gather(*episodes))


def make(folder: Path, rows: Path, **val: Any) -> tuple[Evaluator, Rollouts]:
    data = SimpleNamespace(
        train_files=(str(rows),), val_files=(str(rows),), train_data_num=None, val_data_num=None, prompt_key="prompt",
        template="compact", history="all", history_answers=True, native_thinking="keep",
        max_prompt_length=1000, max_response_length=200,
        max_start_length=300, max_obs_length=200, val_batch_size=BATCH,
    )  # fmt: skip
    kwargs = {"temperature": 0.0, "top_p": 1.0, "top_k": -1, "n": 1, **val}
    rollout = SimpleNamespace(val_kwargs=SimpleNamespace(**kwargs))
    config = SimpleNamespace(
        data=data,
        task_config=search_config({"max_turns": 2, "reward_model": {"function": "f1"}}),
        actor_rollout_ref=SimpleNamespace(rollout=rollout),
        save_val=True,
        save_val_dir=None,
    )
    tokenizer = CharTokenizer()
    task = SearchTask(config, tokenizer, DictionarySearch({"q": [Document("g1", "T", "one")]}))
    rollouts = Rollouts(task, tokenizer)
    facts = {"decoding": {"seed": 1}, "code": {"commit": "abc"}, "config": {"data.val_batch_size": BATCH}}
    return Evaluator(task, task.prompts("val"), rollouts, config, folder, facts), rollouts


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("rows") / "val.jsonl"
    with path.open("w") as file:
        for number in range(N):
            question = "long " * 80 if number == 1000 else f"Question {number}?"  # one prompt that does not fit
            answers = [("one", "two", "one two")[number % 3]]
            record = {"qid": f"q{number}", "question": question, "history": [], "answers": answers}
            if number % 2:
                record |= {"rewrite": "q", "gold_passage_ids": [f"g{number % 4}"]}
            file.write(json.dumps(record) + "\n")
    return path


def test_every_row_in_file_order_twice_the_same(rows: Path, tmp_path: Path) -> None:
    files = {}
    for name in ("first", "second"):
        evaluator, rollouts = make(tmp_path / name, rows)
        evaluation = evaluator.run(0)
        assert rollouts.sizes == [BATCH] * 14 + [26]
        assert [t.prompt_id for t in evaluation.trajectories] == [f"q{n}" for n in range(N)]
        val = tmp_path / name / "eval" / "val"
        files[name] = {
            path.name: path.read_bytes()
            for path in [*val.glob("*"), tmp_path / name / "validation_results_step0.json"]
            if path.name != "step_0.jsonl"  # holds wall seconds
        }
    assert files["first"] == files["second"]
    assert set(files["first"]) == {
        "results_step_0.jsonl", "summary_step_0.json", "card_step_0.json", "card_step_0.md", "card_step_0.html",
        "validation_results_step0.json",
    }  # fmt: skip
    kept = read_results(tmp_path / "first" / "eval" / "val" / "results_step_0.jsonl")
    assert [one.qid for one in kept] == [f"q{n}" for n in range(N)] and kept[1000].refused
    published = tmp_path / "first" / "validation_results_step0.json"
    scored = score_rows(read_predictions(published), published)
    assert [row.question for row in scored] == [one.question for one in kept] and len(scored) == N
    figures = evaluation.figures
    failures = sum(t.stop is StopReason.ENGINE_FAILED for t in evaluation.trajectories)
    assert figures["n"] == N and figures["failed"] == failures / N > 0.1 and figures["refused"] == 1 / N
    assert figures["f1"] == pytest.approx(sum(row.f1_max for row in scored) / N)  # an independent reading of the rows
    assert figures["n_rewrite"] == figures["n_gold"] == N // 2
    card = json.loads((tmp_path / "first" / "eval" / "val" / "card_step_0.json").read_text())
    assert card["figures"] == dict(figures)
    assert card["facts"]["decoding"] == {"mode": "policy", "step": 0, "temperature": 0.0, "top_p": 1.0, "top_k": -1,
                                         "n": 1, "seed": 1}  # fmt: skip
    assert (
        card["facts"]["data"]["episodes"] == N
        and card["facts"]["data"]["rows"] == "all rows"
        and card["config"] == {"data.val_batch_size": BATCH}
    )
    assert card["facts"]["prompts"]["template"] == "compact v1" and card["facts"]["scoring"]["normaliser"] == "squad"
    assert evaluator.figures(0) == dict(figures) and evaluator.figures(1) is None


def test_samples_of_a_question_stand_together(rows: Path, tmp_path: Path) -> None:
    evaluator, rollouts = make(tmp_path, rows, temperature=0.8, n=2)
    evaluator._prompts = evaluator._prompts[:300]
    evaluation = evaluator.run(0)
    assert rollouts.sizes == [256, 44] and evaluation.figures["n"] == 300 and evaluation.figures["episodes"] == 600
    assert [t.trajectory_id for t in evaluation.trajectories[:3]] == ["q0#0", "q0#1", "q1#0"]
    assert evaluation.figures["em/pass_at_1"] == pytest.approx(evaluation.figures["em"])
    assert evaluation.figures["em/pass_at_2"] > evaluation.figures["em/pass_at_1"]
