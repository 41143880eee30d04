"""SearchTask end to end with scripted fakes: prompts, episodes, pipelines, evaluation, published rows."""

import asyncio
import json
import logging
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import pytest
from chat_server import chat_server, says

from search_r1.config import PipelineName, search_config
from search_r1.evaluation.intervals import bootstrap_interval, paired_gain
from search_r1.pipelines import FORCED_TURN, MODES, PIPELINES, READ_TURN, REWRITE_TURN
from search_r1.task import SearchTask
from search_r1.testing import CharTokenizer, DictionarySearch, ScriptedEngine
from verl.errors import ConfigError, DataError, EngineError
from verl.types import Document, EpisodeContext, Origin, Prompt, Reward, StopReason, Trajectory
from verl.types import Task as TaskProtocol

ROWS: list[dict[str, Any]] = [
    {
        "qid": "c1_1",
        "turn_id": 1,
        "question": "Where is the Louvre?",
        "history": [],
        "answers": ["Paris"],
        "rewrite": "Where is the Louvre?",
        "gold_passage_ids": ["d1"],
        "topic_shift": False,
    },
    {
        "qid": "c1_2",
        "turn_id": 2,
        "question": "When was it opened?",
        "history": ["Where is the Louvre?", "Paris"],
        "answers": ["1793", "in 1793"],
        "rewrite": "When was the Louvre opened?",
        "gold_passage_ids": ["d2"],
        "topic_shift": True,
    },
]
PASSAGES = {
    "Where is the Louvre?": [Document("d1", "Louvre", "A museum in Paris.")],
    "When was the Louvre opened?": [Document("d2", "Louvre", "It was opened in 1793.")],
    "When was it opened?": [Document("d3", "Bridge", "It was opened in 1900.")],
}
TURN_1 = "<think>a</think><search> When was the Louvre opened? </search>"
TURN_2 = "<think>b</think><answer> in 1793 </answer>"


def config(path: Path, task: dict[str, Any] | None = None, **data: Any) -> Any:
    values = {
        "train_files": (str(path),),
        "val_files": str(path),
        "train_data_num": None,
        "val_data_num": None,
        "prompt_key": "prompt",
        "template": "compact",
        "native_thinking": "keep",
        "history": "all",
        "history_answers": True,
        "max_prompt_length": 1000,
        "max_response_length": 200,
        "max_start_length": 400,
        "max_obs_length": 300,
    }
    task_values = {"max_turns": 2, **(task or {})}
    return SimpleNamespace(data=SimpleNamespace(**{**values, **data}), task_config=search_config(task_values))


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    path = tmp_path / "val.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return path


class Bench:
    """A task with its fakes."""

    def __init__(self, path: Path, task: dict[str, Any] | None = None, **data: Any) -> None:
        self.tokenizer = CharTokenizer()
        self.search = DictionarySearch(PASSAGES, failing=["down"])
        self.task = SearchTask(config(path, task, **data), self.tokenizer, self.search)

    def run(self, prompt: Prompt, turns: list[str | Exception], mode: str = "policy") -> Trajectory:
        engine = ScriptedEngine(self.tokenizer, turns)
        context = EpisodeContext(sample_index=0, seed=1, temperature=0.0, mode=mode)
        return asyncio.run(self.task.episode(prompt, engine, context))

    def text(self, trajectory: Trajectory, origin: Origin) -> list[str]:
        return [self.tokenizer.decode(s.token_ids) for s in trajectory.segments if s.origin is origin]


def test_it_is_a_task(rows: Path) -> None:
    task: TaskProtocol = SearchTask.from_config(config(rows), CharTokenizer())
    assert task.config_schema().__name__ == "SearchConfig"


def test_prompts_in_file_order_with_their_rows(rows: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        prompts = Bench(rows, {"reward_model": {"preset": "auto", "rewrite_score": 0.2}}).task.prompts("val")
    assert [prompt.prompt_id for prompt in prompts] == ["c1_1", "c1_2"]
    text = "<context>\nUser: Where is the Louvre?\nAssistant: Paris\n</context>\nUser: When was it opened?"
    assert CharTokenizer().decode(prompts[1].token_ids) == text
    json.dumps(prompts[1].row)
    assert "conversation: chatr1 formula over f1 (rewrite_score 0.2;" in caplog.text
    with pytest.raises(ConfigError, match="unknown split 'test'"):
        Bench(rows).task.prompts("test")


def test_refused_rows_leave_training_but_not_validation(rows: Path, caplog: pytest.LogCaptureFixture) -> None:  # T25
    short = len("<context>\n</context>\nUser: When was it opened?") - 1
    long_row = {**ROWS[0], "qid": "long", "question": "Where is the Louvre, " + "really " * 20 + "?"}
    rows.write_text("".join(json.dumps(row) + "\n" for row in (ROWS[0], long_row, ROWS[1])))
    bench = Bench(rows, max_start_length=60)
    assert [p.prompt_id for p in bench.task.prompts("train")] == ["c1_1", "c1_2"]
    assert "refused 1 of 3 rows (1 prompt_too_long)" in caplog.text and "max_start_length=60" in caplog.text
    validation = bench.task.prompts("val")
    assert [p.prompt_id for p in validation] == ["c1_1", "long", "c1_2"]
    refused = bench.run(validation[1], [])
    assert refused.stop is StopReason.CONTEXT_LENGTH and refused.row["extra"] == {"refused": "prompt_too_long"}
    figures = bench.task.evaluate([refused])
    assert (figures["n"], figures["f1"], figures["refused"]) == (1.0, 0.0, 1.0)
    with pytest.raises(DataError, match=r"every row was refused \(3 prompt_too_long\)"):
        Bench(rows, max_start_length=short - 20).task.prompts("train")


def test_episode_is_rewarded(rows: Path) -> None:
    bench = Bench(rows, {"reward_model": {"preset": "auto", "rewrite_score": 0.2}})
    trajectory = bench.run(bench.task.prompts("val")[1], [TURN_1, TURN_2])
    assert trajectory.reward is not None and trajectory.reward.total == pytest.approx(1.2)
    for name, value in {"answer": 1.0, "intent": 1.0, "retrieval": 1.0, "structure": 1.0}.items():
        assert trajectory.reward.parts[name] == value
    assert bench.task.validation_reward(trajectory) == 1.0
    assert Trajectory.from_record(json.loads(json.dumps(trajectory.to_record()))) == trajectory


@pytest.mark.parametrize(
    ("last", "prediction"),
    [("<think>b</think>nothing<|end|>", None), ("<think>b</think><answer>Rome</answer>", "Rome")],
)
def test_rewards_read_no_environment_text(rows: Path, last: str, prediction: str | None) -> None:
    """A passage that holds the answer, an answer block and the rewrite moves no score but that of retrieval."""
    bench = Bench(rows, {"reward_model": {"preset": "auto", "rewrite_score": 0.2}})
    text = "<answer>1793</answer> in 1793 <search>When was the Louvre opened?</search> When was the Louvre opened?"
    poisoned = DictionarySearch({"x": [Document("d9", "1793", text)]})
    task = SearchTask(config_of(bench), bench.tokenizer, poisoned)
    engine = ScriptedEngine(bench.tokenizer, ["<think>a</think><search>x</search>", last, last])
    context = EpisodeContext(sample_index=0, seed=1, temperature=0.0)
    trajectory = asyncio.run(task.episode(task.prompts("val")[1], engine, context))
    assert "in 1793" in bench.text(trajectory, Origin.ENV)[0]
    assert trajectory.prediction == prediction and trajectory.reward is not None and trajectory.reward.total == 0.0
    assert (trajectory.reward.parts["answer"], trajectory.reward.parts["intent"]) == (0.0, 0.0)
    figures = task.evaluate([trajectory])
    assert [figures[name] for name in ("em", "f1", "rewrite_f1")] == [0.0, 0.0, 0.0]
    assert task.validation_reward(trajectory) == 0.0
    assert task.validation_rows([trajectory])[0]["predicted_answer"] == prediction


def config_of(bench: Bench) -> Any:
    return SimpleNamespace(data=bench.task._data, task_config=bench.task._config)


@pytest.mark.parametrize(
    ("mode", "query"),
    [
        ("gold", "When was the Louvre opened?"),
        ("raw", "When was it opened?"),
        ("questions", "Where is the Louvre? When was it opened?"),
        ("history", "Where is the Louvre? Paris When was it opened?"),
    ],
)
def test_pipelines_force_the_query(rows: Path, mode: str, query: str) -> None:
    bench = Bench(rows)
    trajectory = bench.run(bench.task.prompts("val")[1], [TURN_2], mode)
    assert bench.search.queries == [query] and [call.query for call in trajectory.searches] == [query]
    forced, information = bench.text(trajectory, Origin.ENV)
    assert forced == FORCED_TURN.format(query=query) and information.startswith("\n\n<information>")
    assert bench.text(trajectory, Origin.MODEL) == [TURN_2] and trajectory.n_turns == 1
    assert trajectory.stop is StopReason.ANSWERED and trajectory.prediction == "in 1793"
    assert bench.task.evaluate([trajectory])["format_valid"] == 1.0


def test_closed_book_is_given_nothing(rows: Path) -> None:
    bench = Bench(rows)
    trajectory = bench.run(bench.task.prompts("val")[1], [TURN_2], "closed_book")
    assert bench.search.queries == [] and trajectory.searches == ()
    assert bench.text(trajectory, Origin.ENV)[1] == "\n\n<information></information>\n\n"


def test_own_rewrite_completes_the_search_that_the_environment_opened(rows: Path) -> None:
    bench = Bench(rows)
    trajectory = bench.run(bench.task.prompts("val")[1], [" When was the Louvre opened? </search>", TURN_2], "rewrite")
    assert bench.search.queries == ["When was the Louvre opened?"] and trajectory.turns == ("search", "answer")
    assert bench.text(trajectory, Origin.ENV)[0] == REWRITE_TURN
    assert bench.text(trajectory, Origin.MODEL) == [" When was the Louvre opened? </search>", TURN_2]
    figures = bench.task.evaluate([trajectory])
    assert figures["recall_at_3"] == figures["rewrite_f1"] == figures["format_valid"] == figures["em"] == 1.0
    for text, stop, turn in (
        (" When? <answer> 1793 </answer>", StopReason.ANSWERED, "answer"),
        (" </search>", StopReason.TURN_LIMIT, "empty_query"),
        (" " + "w" * 300, StopReason.RESPONSE_LENGTH, "length"),
    ):
        other = Bench(rows).run(bench.task.prompts("val")[1], [text], "rewrite")
        assert (other.stop, other.turns, other.searches) == (stop, (turn,), ())


def test_what_an_engine_samples_beyond_its_own_rewrite_is_dropped(rows: Path) -> None:
    bench = Bench(rows)
    engine = ScriptedEngine(bench.tokenizer, [" Where? </search> and on", TURN_2], runs_on=True)
    context = EpisodeContext(sample_index=0, seed=1, temperature=0.0, mode="rewrite")
    trajectory = asyncio.run(bench.task.episode(bench.task.prompts("val")[1], engine, context))
    assert bench.text(trajectory, Origin.MODEL)[0] == " Where? </search>" and bench.search.queries == ["Where?"]


@pytest.mark.parametrize(
    ("text", "prediction", "stop"),
    [
        (" in 1793 </answer>", "in 1793", StopReason.ANSWERED),
        (" in 1793<|end|>", "in 1793", StopReason.ANSWERED),
        ("in 1793 </think> and more<|end|>", "in 1793", StopReason.ANSWERED),
        ("<|end|>", None, StopReason.ANSWERED),
        ("in " + "1" * 300, "in " + "1" * 197, StopReason.RESPONSE_LENGTH),
    ],
)
def test_an_opened_reader_answers_without_knowing_the_tags(
    rows: Path, text: str, prediction: str | None, stop: StopReason
) -> None:
    bench = Bench(rows, {"evaluation": {"reader": "opened"}})
    trajectory = bench.run(bench.task.prompts("val")[1], [text], "raw")
    assert (trajectory.prediction, trajectory.stop) == (prediction, stop)
    assert bench.text(trajectory, Origin.ENV)[1].endswith("</information>\n\n" + READ_TURN)


def test_oracle_is_handed_the_gold_passages(rows: Path, tmp_path: Path) -> None:
    corpus = tmp_path / "passages.jsonl"
    corpus.write_text(
        json.dumps({"id": "d1", "contents": '"Louvre"\nA museum in Paris.'})
        + "\n\n"
        + json.dumps({"id": "d2", "title": "Louvre", "text": "It was opened in 1793."})
    )
    bench = Bench(rows, {"evaluation": {"pipelines": "all", "passages": str(corpus)}})
    prompt = bench.task.prompts("val")[1]
    trajectory = bench.run(prompt, [TURN_2], "oracle")
    assert (
        bench.search.queries == []
        and "Doc 1(Title: Louvre) It was opened in 1793." in bench.text(trajectory, Origin.ENV)[1]
    )
    assert bench.task.evaluate([trajectory])["recall_at_3"] == 1.0 and trajectory.prediction == "in 1793"
    corpus.write_text("{}")
    with pytest.raises(DataError, match=r"passages\.jsonl:1: no passage with id and contents"):
        Bench(rows, {"evaluation": {"pipelines": ["oracle_passage"], "passages": str(corpus)}}).task.prompts("val")
    corpus.write_bytes(b"\x1f\x8b\x08 packed")
    with pytest.raises(DataError, match=r"evaluation\.passages=.*no UTF-8 text .*; unpack the corpus"):
        Bench(rows, {"evaluation": {"pipelines": "all", "passages": str(corpus)}}).task.prompts("val")
    with pytest.raises(DataError, match=r"evaluation\.passages=.*nowhere: cannot be read"):
        Bench(rows, {"evaluation": {"pipelines": "all", "passages": "nowhere"}}).task.prompts("val")


def test_a_pipeline_runs_over_the_questions_that_have_what_it_needs(rows: Path) -> None:
    bare = {"qid": "x", "question": "Why?", "answers": ["y"], "history": []}
    text = {**bare, "qid": "z", "gold_text": '"T"\nBecause.', "rewrite": "Why is it?"}
    rows.write_text("".join(json.dumps(row) + "\n" for row in (bare, text)))
    task = Bench(rows, {"evaluation": {"pipelines": "all"}}).task
    prompts = task.prompts("val")
    able = {mode: [prompt.prompt_id for prompt in prompts if task.applicable(prompt, mode)] for mode in PIPELINES}
    assert able.pop("gold") == able.pop("oracle") == ["z"]
    assert all(qids == ["x", "z"] for qids in able.values())


def test_a_pipeline_does_not_search_again(rows: Path) -> None:
    bench = Bench(rows)
    trajectory = bench.run(bench.task.prompts("val")[1], [TURN_1], "raw")
    assert trajectory.stop is StopReason.TURN_LIMIT and bench.search.queries == ["When was it opened?"]


def test_unknown_mode_lists_the_known_ones(rows: Path) -> None:
    bench = Bench(rows)
    with pytest.raises(ConfigError, match=r"unknown pipeline 'golden' \(did you mean 'gold'\?\)"):
        bench.run(bench.task.prompts("val")[0], [], "golden")
    assert set(PIPELINES) == {"policy", *MODES.values()} and set(MODES) == set(get_args(PipelineName))


def test_evaluation_figures(rows: Path) -> None:
    bench = Bench(rows)
    first, second = bench.task.prompts("val")
    right = bench.run(second, [TURN_1, TURN_2])
    wrong = bench.run(first, ["<search> When was it opened? </search>", "<answer> Rome, Paris </answer>"])
    third = replace(first, prompt_id="c1_3", row={**first.row, "qid": "c1_3"})
    failed = bench.run(third, [EngineError("gone")])
    figures = bench.task.evaluate([right, wrong, failed])
    assert figures["n"] == 3 and figures["failed"] == pytest.approx(1 / 3)
    assert figures["em"] == pytest.approx(1 / 3)
    assert figures["f1"] == pytest.approx((1 + 2 / 3) / 3)  # "rome paris" against "paris": 2/3
    # "when was it opened" against "where is louvre": no word in common; the failed one counts as 0
    assert figures["rewrite_f1"] == pytest.approx(1 / 3)
    assert figures["recall_at_3"] == pytest.approx(1 / 3)
    assert figures["searches"] == pytest.approx(2 / 3)
    assert figures["format_valid"] == pytest.approx(1 / 3)
    assert figures["f1/turn_2"] == 1.0 and figures["f1/turn_1"] == pytest.approx(1 / 3)
    assert figures["f1/topic_shift"] == 1.0 and figures["f1/hit"] == 1.0
    assert figures["stop/answered"] == pytest.approx(2 / 3) and figures["stop/engine_failed"] == pytest.approx(1 / 3)
    assert figures["f1/low"] <= figures["f1"] <= figures["f1/high"]
    assert bench.task.evaluate([right, wrong, failed]) == figures
    saved = [Trajectory.from_record(json.loads(json.dumps(t.to_record()))) for t in (right, wrong, failed)]
    assert bench.task.evaluate(saved) == figures  # T31
    assert [bench.task.validation_reward(t) for t in (right, wrong, failed)] == [1.0, pytest.approx(2 / 3), 0.0]


def test_training_and_evaluation_score_an_answer_alike(rows: Path) -> None:
    """Repeated words and a reference that is not the first: one F1, the best reference, on both sides."""
    rows.write_text(json.dumps({**ROWS[0], "answers": ["Rome", "go go gone"]}) + "\n")
    bench = Bench(rows)
    trajectory = bench.run(bench.task.prompts("val")[0], ["<answer>go go gone</answer>"])
    assert trajectory.reward is not None
    scores = (
        trajectory.reward.total,
        bench.task.validation_reward(trajectory),
        bench.task.evaluate([trajectory])["f1"],
    )
    assert scores == (1.0, 1.0, 1.0)


def test_a_data_source_without_a_metric_is_refused_before_any_episode(rows: Path) -> None:
    rows.write_text(json.dumps({**ROWS[0], "data_source": "topiocqua"}) + "\n")
    for split in ("train", "val"):
        with pytest.raises(DataError, match=r"data_source 'topiocqua' has no answer metric.*did you mean 'topiocqa'"):
            Bench(rows).task.prompts(split)


def test_a_failed_episode_scores_zero_whatever_it_had_reached(rows: Path) -> None:
    bench = Bench(rows)
    right = bench.run(bench.task.prompts("val")[1], [TURN_1, TURN_2])
    failed = replace(right, stop=StopReason.ABORTED)
    figures = bench.task.evaluate([failed])
    assert bench.task.validation_reward(failed) == 0.0
    assert [figures[name] for name in ("em", "f1", "rewrite_f1", "recall_at_3", "format_valid")] == [0.0] * 5


def test_gain_is_paired_by_row(rows: Path) -> None:
    bench = Bench(rows)
    first, second = bench.task.prompts("val")
    wrong = [bench.run(prompt, ["<answer>Rome</answer>"]) for prompt in (first, second)]
    right = [wrong[0], bench.run(second, [TURN_1, TURN_2])]
    gains = bench.task.compare(wrong, right)
    assert set(gains) == {"em", "f1", "rewrite_f1", "recall_at_3"}
    assert all(gain["mean"] == 0.5 for gain in gains.values())
    # two rows, one of them better: a resample holds it 0, 1 or 2 times
    assert (gains["f1"]["low"], gains["f1"]["high"]) == (0.0, 1.0)
    assert bench.task.compare(wrong, right[::-1]) == gains  # paired by question, not by position
    with pytest.raises(DataError, match="no question is in both"):
        bench.task.compare(wrong[:1], right[1:])
    everything = Bench(rows, {"evaluation": {"pipelines": "all"}}).task
    assert set(everything.pipelines().values()) == set(PIPELINES) - {"policy"}


def test_observation_budget_below_its_shell_is_refused_at_start(rows: Path) -> None:
    with pytest.raises(ConfigError, match=r"data\.max_obs_length=10: .*needs 31 tokens"):
        Bench(rows, max_obs_length=10)


def test_supervision_that_is_missing_is_left_out(rows: Path) -> None:  # T30
    rows.write_text(json.dumps({"qid": "a", "question": "Why?", "answers": ["x"]}) + "\n")
    bench = Bench(rows)
    figures = bench.task.evaluate([bench.run(bench.task.prompts("val")[0], ["<answer>x</answer>"])])
    assert "rewrite_f1" not in figures and "recall_at_3" not in figures and figures["n_gold"] == 0.0


def test_published_rows(rows: Path) -> None:
    bench = Bench(rows)
    first, second = bench.task.prompts("val")
    published = bench.task.validation_rows([bench.run(second, [TURN_1, TURN_2]), bench.run(first, ["z" * 300] * 3)])
    info = "\n\n<information>Doc 1(Title: Louvre) It was opened in 1793.</information>\n\n"
    assert published[0] == {
        "data_source": "conversation",
        "question": "When was it opened?",
        "golden_answers": ["1793", "in 1793"],
        "predicted_answer": "in 1793",
        "raw_predicted_answer": TURN_1 + info + TURN_2,
    }
    assert published[1]["predicted_answer"] is None
    assert re.fullmatch(r"(z{200}.*){3}", published[1]["raw_predicted_answer"], re.DOTALL)


def test_data_files_that_name_different_corpora(rows: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.jsonl"
    other.write_text(json.dumps({**ROWS[0], "corpus_sha256": "a" * 64}) + "\n")
    task = SearchTask.from_config(config(rows, train_files=(str(rows), str(other))), CharTokenizer())
    assert task._declared_corpus() == "a" * 64
    third = tmp_path / "third.jsonl"
    third.write_text(json.dumps({**ROWS[0], "corpus_sha256": "b" * 64}) + "\n")
    task = SearchTask.from_config(config(other, train_files=(str(third),)), CharTokenizer())
    with pytest.raises(DataError, match="name different corpora"):
        task._declared_corpus()


def test_bootstrap() -> None:
    assert bootstrap_interval([0.5] * 20) == (0.5, 0.5)
    low, high = bootstrap_interval([0.0, 1.0] * 200)
    # the standard error of 400 coin flips is 0.025, so the interval is about 0.451 to 0.549
    assert low == pytest.approx(0.451, abs=0.008) and high == pytest.approx(0.549, abs=0.008)
    before = [0.0, 1.0] * 50
    gain = paired_gain(before, [value + 0.1 for value in before])
    assert (gain.mean, gain.low, gain.high) == (pytest.approx(0.1), pytest.approx(0.1), pytest.approx(0.1))
    with pytest.raises(ValueError, match="same rows"):
        paired_gain([1.0], [1.0, 2.0])


def test_the_judge_is_paid_and_its_failure_takes_the_reward_away(rows: Path) -> None:
    answers = iter([says("Score: 5"), (400, b"no", {})])
    with chat_server(lambda request, number: next(answers)) as server:
        judge = {"url": server.url, "model": "m", "cache_path": None}
        reward = {"preset": "chatr1", "function": "f1", "judge_score": 0.5}
        bench = Bench(rows, {"reward_model": reward, "judge": judge})
        prompt = bench.task.prompts("val")[1]
        context = EpisodeContext(sample_index=0, seed=1, temperature=0.0)

        async def twice() -> list[Reward | None]:
            engines = (ScriptedEngine(bench.tokenizer, [TURN_1, TURN_2]) for _ in range(2))
            try:
                return [(await bench.task.episode(prompt, engine, context)).reward for engine in engines]
            finally:
                await bench.task.close()

        judged, unjudged = asyncio.run(twice())
        assert judged is not None and judged.total == pytest.approx(1.0 + 0.5) and judged.failure is None
        assert unjudged is not None and unjudged.parts["judge"] is None and "HTTP 400 no" in str(unjudged.failure)
        totals = bench.task.totals()
        assert (totals["judge_asked"], totals["judge_failures"]) == (2, 1)
