"""``SearchTask``: the task as the trainer sees it (``verl.types.Task``)."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from search_r1.codec import Codec
from search_r1.config import EpisodeSettings, SearchConfig
from search_r1.datasets.load import READERS, load_rows
from search_r1.datasets.rows import Row
from search_r1.episode import EpisodeTools, Search, run_episode
from search_r1.evaluation.bought import buy_scores
from search_r1.evaluation.card import Card
from search_r1.evaluation.compare import compare
from search_r1.evaluation.facts import data_facts, retrieval_facts, scoring_facts
from search_r1.evaluation.files import write_results
from search_r1.evaluation.results import ResultRow
from search_r1.evaluation.summary import summarise
from search_r1.evaluation.tables import methods_table
from search_r1.gold_passages import with_gold_documents
from search_r1.judge.endpoint import JudgeError
from search_r1.judge.judge import Judge
from search_r1.observation import shell_tokens
from search_r1.pipelines import MODES, PIPELINES, applicable
from search_r1.prompts import PromptBuilder
from search_r1.rewards.formulas import describe, score
from search_r1.rewards.parts import answer_metric
from search_r1.rewards.text import ANSWER_METRICS, NORMALISERS, best
from search_r1.rewards.view import EpisodeView, shown_text
from search_r1.search_client import SearchClient
from search_r1.template_check import check_template
from search_r1.templates import template_version
from verl.errors import ConfigError, DataError
from verl.types import EpisodeContext, Finding, Generate, Prompt, Reward, Tokenizer, Trajectory

logger = logging.getLogger(__name__)

SPLITS: Mapping[str, tuple[str, str]] = {
    "train": ("train_files", "train_data_num"),
    "val": ("val_files", "val_data_num"),
}
"""Split -> keys under ``data``: its files, the size of its subset."""


class SearchTask:
    """Conversational question answering with search."""

    def __init__(self, config: Any, tokenizer: Tokenizer, search: Search | None = None) -> None:
        """``search`` replaces the client of the retrieval service (tests, offline use)."""
        self._data = config.data
        self._config: SearchConfig = config.task_config
        self._tokenizer = tokenizer
        self._codec = Codec(tokenizer, self._data.native_thinking)
        self._settings = EpisodeSettings.from_config(config)
        self._form = NORMALISERS[self._config.reward_model.normaliser]
        needed = shell_tokens(self._codec)
        if self._config.do_search and self._settings.max_obs_length < needed:
            raise ConfigError(
                f"data.max_obs_length={self._settings.max_obs_length}: an observation without any passage already "
                f"needs {needed} tokens; raise it to several hundred"
            )
        self._client = None if search is not None else SearchClient(self._config.retriever)
        self._judge = Judge(self._config.judge) if self._config.reward_model.judge_score > 0 else None
        self._tools = EpisodeTools(self._codec, self._settings, self._client or _given(search))
        self._prompts = PromptBuilder(
            self._codec,
            self._data.template,
            self._data.history,
            self._settings.max_start_length,
            self._data.history_answers,
        )

    @classmethod
    def config_schema(cls) -> type[SearchConfig]:
        """Return the model of the task's own top-level keys."""
        return SearchConfig

    @classmethod
    def from_config(cls, config: Any, tokenizer: Tokenizer) -> SearchTask:
        """Build the task from the validated run config."""
        return cls(config, tokenizer)

    # -- prompts ------------------------------------------------------------------------------------------------

    def prompts(self, split: str) -> list[Prompt]:
        """Load ``train`` or ``val`` in file order.

        A row that cannot be fitted is refused: left out of training and counted in the log; kept in validation with
        an empty prompt, so that it is scored zero under its name and no row is lost. Raises DataError naming file and
        line, ConfigError when template and columns do not go together.
        """
        if split not in SPLITS:
            raise ConfigError(f"unknown split {split!r}; known: {', '.join(SPLITS)}")
        files_key, limit_key = SPLITS[split]
        rows = load_rows(_paths(self._data, files_key), self._data.prompt_key, getattr(self._data, limit_key))
        for source in sorted({row.data_source for row in rows}):
            logger.info("reward for %s rows: %s", split, describe(source, self._config.reward_model))
        if split == "val" and "oracle_passage" in self._config.evaluation.pipelines:
            passages = self._config.evaluation.passages
            rows = with_gold_documents(rows, None if passages is None else Path(passages))
        prompts, refusals, shortened = [], Counter[str](), 0
        for row in rows:
            fitted = self._prompts.build(row)
            shortened += fitted.dropped_turns > 0 and fitted.refusal is None
            if fitted.refusal is not None:
                refusals[fitted.refusal.value] += 1
                if split == "train":
                    continue
                row = replace(row, extra={**row.extra, "refused": fitted.refusal.value})
            prompts.append(Prompt(row.qid, fitted.token_ids, row.to_json()))
        self._report(split, len(rows), refusals, shortened)
        return prompts

    def _report(self, split: str, n_rows: int, refusals: Counter[str], shortened: int) -> None:
        template = self._data.template
        logger.info(
            "%s: %d rows, template %s %s, %d shortened",
            split,
            n_rows,
            template,
            template_version(template),
            shortened,
        )
        if refusals:
            reasons = ", ".join(f"{count} {reason}" for reason, count in sorted(refusals.items()))
            advice = f"data.max_start_length={self._settings.max_start_length} may be too small"
            if refusals.total() == n_rows:
                raise DataError(f"{split}: every row was refused ({reasons}); {advice}")
            logger.warning("%s: refused %d of %d rows (%s); %s", split, refusals.total(), n_rows, reasons, advice)

    # -- episodes -----------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Wait for the retrieval service and check that it serves the corpus the data names, if it names one."""
        if self._client is not None and self._config.do_search:
            await self._client.start(self._declared_corpus())

    async def close(self) -> None:
        """Close the client's connections."""
        if self._client is not None:
            await self._client.close()
        if self._judge is not None:
            await self._judge.close()

    def totals(self) -> dict[str, float]:
        """Return what the retrieval client (``search_client.Counts``) and the judge (``judge_...``) did so far."""
        judge = {} if self._judge is None else self._judge.totals()
        search = {} if self._client is None else self._client.counts.totals()
        return search | {f"judge_{name}": value for name, value in judge.items()}

    async def episode(self, prompt: Prompt, generate: Generate, context: EpisodeContext) -> Trajectory:
        """Run one episode in ``context.mode`` and score it."""
        trajectory = await run_episode(prompt, generate, context, self._tools, PIPELINES[context.mode])
        return trajectory.with_reward(await self._reward(EpisodeView.of(trajectory, self._codec)))

    async def _reward(self, view: EpisodeView) -> Reward:
        """Score an episode; without the judge's reply, where that is paid, there is no reward and it says why."""
        judged = None
        if self._judge is not None and not view.failed:
            try:
                row = view.row
                judged = await self._judge.score(row.history or (), row.question, row.answers, view.prediction)
            except JudgeError as error:
                return replace(score(view, self._config.reward_model), failure=str(error))
        return score(view, self._config.reward_model, judged)

    def _declared_corpus(self) -> str | None:
        """Return the corpus hash that the first rows of the data files name; raises DataError when they disagree."""
        found: dict[str, Path] = {}
        for files_key, _ in SPLITS.values():
            for path in _paths(self._data, files_key):
                if path.suffix not in READERS or not path.is_file():
                    continue  # named by ``prompts``, which only loads the split it is asked for
                _, row = next(READERS[path.suffix](path, self._data.prompt_key), ("", None))
                if row is not None and row.corpus_sha256 is not None:
                    found[row.corpus_sha256] = path
        if len(found) > 1:
            named = "; ".join(f"{path}: {sha[:16]}" for sha, path in found.items())
            raise DataError(f"the data files name different corpora ({named}); one service serves one corpus")
        return next(iter(found), None)

    def check_template(self) -> list[Finding]:
        """Return what the chat template does to the episodes' form (``main_audit``)."""
        return check_template(self._codec, self._tokenizer)

    # -- scores -------------------------------------------------------------------------------------------------

    def validation_reward(self, trajectory: Trajectory) -> float:
        """Return the plain answer score, 0 for a failed episode."""
        if trajectory.stop.failed:
            return 0.0
        row = Row.from_json(trajectory.row)
        metric = answer_metric(row.data_source, self._config.reward_model)
        return best(ANSWER_METRICS[metric], trajectory.prediction, row.answers, self._form)

    def results(self, trajectories: Sequence[Trajectory]) -> list[ResultRow]:
        """Return the episodes as text, all that is needed to score them again."""
        return [ResultRow.of(t, EpisodeView.of(t, self._codec), self._form) for t in trajectories]

    def evaluate(self, trajectories: Sequence[Trajectory]) -> Mapping[str, float]:
        """Return the figures of a finished split (``search_r1.evaluation.summary``), those that cost nothing."""
        return summarise(self.results(trajectories), self._form)

    def report(
        self, trajectories: Sequence[Trajectory], facts: Mapping[str, Mapping[str, Any]], folder: Path, step: int
    ) -> Mapping[str, float]:
        """Write ``results_step_<N>.jsonl`` and the card; return all figures, those of ``evaluation.*`` included."""
        rows, paid = buy_scores(self.results(trajectories), self._config.evaluation, self._config.judge)
        write_results(folder / f"results_step_{step}.jsonl", rows)
        figures = {**summarise(rows, self._form), **paid}
        config, title = facts.get("config"), f"Evaluation at step {step}: {facts['decoding']['mode']}"
        sections = {**self._facts(len(rows)), **{name: facts[name] for name in facts if name != "config"}}
        Card(title, sections, figures, config).write(folder / f"card_step_{step}")
        return figures

    def _facts(self, n_episodes: int) -> dict[str, dict[str, Any]]:
        template = self._data.template
        return {
            "data": data_facts(_paths(self._data, "val_files"), self._data.val_data_num, n_episodes),
            "retrieval": retrieval_facts(self._config, None if self._client is None else self._client.service_info),
            "prompts": {
                "template": f"{template} {template_version(template)}",
                "history": self._data.history,
                "history_answers": self._data.history_answers,
                "max_start_length": self._settings.max_start_length,
                "max_turns": self._settings.max_turns if self._settings.do_search else 0,
                "max_response_length": self._settings.max_response_length,
                "max_obs_length": self._settings.max_obs_length,
                "context_limit": self._settings.context_limit,
            },
            "scoring": scoring_facts(self._config),
        }

    def pipelines(self) -> Mapping[str, str]:
        """Return name -> episode mode of the fixed pipelines that bound or challenge the policy."""
        return {name: MODES[name] for name in self._config.evaluation.pipelines}

    def applicable(self, prompt: Prompt, mode: str) -> bool:
        """Say whether a question has what a pipeline needs (a gold rewrite, the text of its gold passages)."""
        return applicable(Row.from_json(prompt.row), mode)

    def table(self, methods: Mapping[str, Sequence[Trajectory]]) -> str:
        """Return the table of methods as in the papers, as Markdown."""
        return methods_table({name: self.results(side) for name, side in methods.items()}, self._form)

    def compare(self, before: Sequence[Trajectory], after: Sequence[Trajectory]) -> Mapping[str, Mapping[str, float]]:
        """Return figure -> mean, low, high of the paired difference after - before (95 % bootstrap interval)."""
        found = compare(self.results(before), self.results(after), self._form)
        return {name: asdict(comparison.gain) for name, comparison in found.items()}

    def validation_rows(self, trajectories: Sequence[Trajectory]) -> list[dict[str, Any]]:
        """Return the published fields: the decoded text behind the prompt and the answer read from it."""
        rows = []
        for trajectory in trajectories:
            view = EpisodeView.of(trajectory, self._codec)
            row = view.row
            golden = row.extra.get("golden_answers", row.answers)
            rows.append(
                {
                    "data_source": row.data_source,
                    "question": row.question,
                    "golden_answers": list(golden),
                    "predicted_answer": trajectory.prediction,
                    "raw_predicted_answer": shown_text(view),
                }
            )
        return rows


def _paths(data: Any, key: str) -> list[Path]:
    value = getattr(data, key)
    return [Path(value)] if isinstance(value, str | Path) else [Path(item) for item in value]


def _given(search: Search | None) -> Search:
    assert search is not None
    return search
