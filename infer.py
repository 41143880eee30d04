"""Ask a model: one question, or a chat that keeps its history. Shows thoughts, queries, passages and the answer.

    python infer.py                                          chat with the newest trained model, else the shipped one
    python infer.py --question "Who founded it?" --history talk.json
    python infer.py --model runs/tiny-ppo/global_step_25/hf --retriever-url http://127.0.0.1:8002/retrieve

Prompt form and limits come from the run that the model belongs to (``config.json`` of its folder), else from the recipe
given by ``--config-name``, else from the embedded recipe for the shipped model and the published settings for others.
Without ``--retriever-url`` the service of that recipe is used when it answers; otherwise one is started on its index
for as long as this program runs.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import math
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from search_r1.chat import Conversation, Decoding, Transcript
from search_r1.codec import Codec
from search_r1.config import EpisodeSettings, RetrieverConfig
from search_r1.episode import EpisodeTools
from search_r1.prompts import PromptBuilder
from search_r1.search_client import SearchClient
from search_r1.whole_text import HALF_A_PAIR, is_whole
from verl.errors import ChatR1Error, DataError, ModelError, RetrievalError

ROOT = Path(__file__).resolve().parent
SHIPPED_MODEL = ROOT / "assets" / "tiny"
_DEFAULT_URL = "http://127.0.0.1:8002/retrieve"


@dataclass(frozen=True)
class Recipe:
    """How a model was trained to be asked."""

    template: str = "chatr1"
    native_thinking: str = "keep"
    history: str | int = "all"
    history_answers: bool = True
    max_turns: int = 2
    do_search: bool = True
    max_start_length: int = 2048
    max_prompt_length: int = 3500
    max_response_length: int = 500
    max_obs_length: int = 500
    topk: int = 3
    url: str = _DEFAULT_URL
    index_path: str | None = None
    corpus_path: str | None = None
    dtype: str = "float32"


_KEYS = {
    "template": "data.template",
    "native_thinking": "data.native_thinking",
    "history": "data.history",
    "history_answers": "data.history_answers",
    "max_turns": "max_turns",
    "do_search": "do_search",
    "max_start_length": "data.max_start_length",
    "max_prompt_length": "data.max_prompt_length",
    "max_response_length": "data.max_response_length",
    "max_obs_length": "data.max_obs_length",
    "topk": "retriever.topk",
    "url": "retriever.url",
    "index_path": "job.index_path",
    "corpus_path": "job.corpus_path",
    "dtype": "actor_rollout_ref.rollout.dtype",
}
"""Field of ``Recipe`` -> key of a flat run config."""


def recipe_of(model: Path, config_name: str | None) -> Recipe:
    """Return the recipe of a model; see the module's docstring for where it is looked for."""
    if config_name is None:
        for folder in model.resolve().parents[:3]:
            file = folder / "config.json"
            if file.is_file() and "data.template" in (flat := json.loads(file.read_text(encoding="utf-8"))):
                return _from_flat(flat)
        if model.resolve() != SHIPPED_MODEL.resolve():
            return Recipe()
        config_name = "tiny_ppo"
    from verl.config import flatten, load_config

    return _from_flat(flatten(load_config(config_name)))


def _from_flat(flat: dict[str, Any]) -> Recipe:
    return Recipe(**{name: flat[key] for name, key in _KEYS.items() if key in flat})


def newest_model() -> Path:
    """Return the newest complete export under ``runs/``, else the shipped model."""
    exports = [path.parent for path in Path("runs").glob("*/global_step_*/hf/config.json")]
    complete = [path for path in exports if (path.parent / "COMPLETE").is_file()]
    return max(complete, key=lambda path: (path / "config.json").stat().st_mtime, default=SHIPPED_MODEL)


def check_model(model: Path) -> None:
    """Raise ModelError for a folder that is not there, before a service is started; ``owner/name`` is a hub's."""
    if not model.is_dir() and (model.exists() or len(model.parts) != 2 or model.is_absolute()):
        raise ModelError(f"--model {model}: there is no such folder; name one with a model's config.json in it")


def read_history(path: Path) -> list[str]:
    """Read earlier turns: a JSON list (question, answer, ...), or lines that begin with ``User:`` and ``Assistant:``.

    Raises DataError naming the file and what is wrong.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise DataError(f"--history {path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise DataError(f"--history {path}: not UTF-8 (byte {error.start}); save it as UTF-8") from None
    history = _history_json(text, path) if text.lstrip().startswith("[") else _history_lines(text, path)
    if len(history) % 2:
        raise DataError(f"--history {path}: must end with an answer; found {len(history)} entries")
    return history


def _history_json(text: str, path: Path) -> list[str]:
    try:
        history = json.loads(text)
    except ValueError as error:
        raise DataError(f"--history {path}: not JSON: {error}") from None
    if not all(isinstance(item, str) for item in history):
        raise DataError(f"--history {path}: must be a list of strings: question, answer, question, answer ...")
    if not all(is_whole(item) for item in history):
        raise DataError(f"--history {path}: {HALF_A_PAIR}; write whole characters")
    return list(history)


def _history_lines(text: str, path: Path) -> list[str]:
    history: list[str] = []
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip():
            continue
        speaker, found, words = line.partition(":")
        expected = ("User", "Assistant")[len(history) % 2]
        if not found or speaker.strip() != expected:
            raise DataError(f"--history {path}:{number}: expected a line '{expected}: ...', found {line[:40]!r}")
        history.append(words.strip())
    return history


# ---------------------------------------------------------------------------------------------------------------
# The retrieval service


@contextlib.contextmanager
def retrieval(recipe: Recipe, url: str | None) -> Iterator[str]:
    """Give the address of a service: the named one, the recipe's when it answers, else one of our own."""
    if url is not None or not recipe.do_search:
        yield url or recipe.url
        return
    if asyncio.run(_answers(recipe.url)):
        yield recipe.url
        return
    missing = [str(path) for path in (recipe.index_path, recipe.corpus_path) if path is None or not Path(path).exists()]
    if missing:
        raise RetrievalError(
            f"no retrieval service answers at {recipe.url}, and there is no index here to start one on "
            f"(missing: {', '.join(missing)}); run `bash train_ppo.sh` once, or name a service with --retriever-url"
        )
    sys.path.append(str(ROOT / "scripts"))
    from job_service import RetrievalService, choose_url

    address = choose_url(recipe.url, explicit=False)
    address.reserve()
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    log = Path("runs") / "infer-retrieval.log"
    index, corpus = Path(str(recipe.index_path)), Path(str(recipe.corpus_path))
    service = RetrievalService(address, index, corpus, recipe.topk, log=log, env=environment)
    try:
        service.start(timeout_s=600.0)
        yield address.text
    finally:
        service.stop()


async def _answers(url: str) -> bool:
    client = SearchClient(RetrieverConfig(url=url, timeout_s=2.0, retries=0, start_timeout_s=2.0))
    try:
        await client.start()
    except RetrievalError:
        return False
    finally:
        await client.close()
    return True


# ---------------------------------------------------------------------------------------------------------------
# Asking


async def talk(options: argparse.Namespace, recipe: Recipe, url: str, history: Sequence[str]) -> None:
    """Load the model and answer the question, or read questions until the input ends."""
    from transformers.utils import logging as transformers_logging

    from verl.workers.rollout.hf import HfEngine

    transformers_logging.disable_progress_bar()
    settings = EpisodeSettings(
        max_turns=recipe.max_turns,
        do_search=recipe.do_search,
        max_start_length=recipe.max_start_length,
        max_prompt_length=recipe.max_prompt_length,
        max_response_length=recipe.max_response_length,
        max_obs_length=recipe.max_obs_length,
        topk=options.topk or recipe.topk,
    )
    client = SearchClient(RetrieverConfig(url=url, topk=settings.topk, api_key_env=options.api_key_env))
    if settings.do_search:
        await client.start()
    engine = HfEngine(str(options.model), dtype=recipe.dtype, max_num_seqs=1, max_model_len=settings.context_limit)
    codec = Codec(engine.tokenizer, recipe.native_thinking)
    builder = PromptBuilder(codec, recipe.template, recipe.history, settings.max_start_length, recipe.history_answers)
    decoding = Decoding(options.temperature, options.top_p, options.seed)
    conversation = Conversation(builder, EpisodeTools(codec, settings, client), decoding, history)
    transcript = Transcript(codec, _write, colour=sys.stdout.isatty() and "NO_COLOR" not in os.environ)

    async def answer(question: str) -> None:
        with engine.session(0, on_token=transcript.token) as session:
            transcript.end(await conversation.ask(question, session, transcript.event))

    try:
        if options.question is not None:
            await answer(options.question)
            return
        _write(f"Model {options.model}. Ask; an empty line or Ctrl-D ends the chat.\n")
        while question := await asyncio.to_thread(_read_line):
            try:
                await answer(question)
            except DataError as error:  # the conversation goes on without this question
                _write(f"error: {error}\n")
    finally:
        await client.close()
        engine.close()


def _read_line() -> str:
    try:
        return input("\nYou: ").strip()
    except EOFError:
        return ""


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _number(kind: type[int] | type[float], accepts: Callable[[Any], bool], rule: str) -> Callable[[str], Any]:
    """Return an argument's type: a number of this kind that is accepted; anything else is answered with the rule."""

    def read(text: str) -> Any:
        try:
            value = kind(text)
        except ValueError:
            value = None
        if value is None or not accepts(value):
            raise argparse.ArgumentTypeError(f"{text!r} {rule}")
        return value

    return read


def _question(text: str) -> str:
    if not text.strip():
        raise argparse.ArgumentTypeError("is empty; leave it out to begin a chat")
    return text


def _address(text: str) -> str:
    try:
        return RetrieverConfig(url=text).url
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no address; expected http://HOST:PORT/retrieve") from None


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--question", type=_question, help="ask this and end; without it a chat begins")
    parser.add_argument("--history", type=Path, help="file with earlier turns: JSON list, or User:/Assistant: lines")
    parser.add_argument("--model", type=Path, help="model folder (safetensors and tokenizer)")
    parser.add_argument("--retriever-url", type=_address, help="address of a /retrieve route")
    parser.add_argument("--api-key-env", help="environment variable that holds the service's bearer token")
    parser.add_argument("--config-name", help="recipe of configs/ to take prompt form and limits from")
    parser.add_argument("--template", help="prompt form (name or .txt file), instead of the recipe's")
    passages = _number(int, lambda n: n >= 1, "must be a whole number of at least 1")
    parser.add_argument("--topk", type=passages, help="passages per search, instead of the recipe's")
    turns = _number(int, lambda n: n >= 0, "must be a whole number of at least 0")
    parser.add_argument("--max-turns", type=turns, help="searches allowed, instead of the recipe's")
    heat = _number(float, lambda x: x >= 0 and math.isfinite(x), "must be a number of at least 0")
    parser.add_argument("--temperature", type=heat, default=0.0, help="0 is greedy (default)")
    share = _number(float, lambda x: 0 < x <= 1, "must be above 0 and at most 1")
    parser.add_argument("--top-p", type=share, default=1.0)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Return the exit status: 0, or 2 for a mistake that the message explains."""
    options = _options(arguments)
    try:
        options.model = options.model or newest_model()
        check_model(options.model)
        recipe = recipe_of(options.model, options.config_name)
        overrides = {"template": options.template, "max_turns": options.max_turns}
        recipe = Recipe(**{**vars(recipe), **{name: value for name, value in overrides.items() if value is not None}})
        history = read_history(options.history) if options.history is not None else []
        with retrieval(recipe, options.retriever_url) as url:
            asyncio.run(talk(options, recipe, url, history))
    except ChatR1Error as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
