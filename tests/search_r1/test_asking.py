"""Conversation, transcript and infer.py's own parts."""

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

import infer
from search_r1.chat import Conversation, Decoding, Transcript, as_question
from search_r1.codec import Codec
from search_r1.config import EpisodeSettings, search_config
from search_r1.episode import EpisodeTools
from search_r1.prompts import PromptBuilder
from search_r1.task import SearchTask
from search_r1.testing import CharTokenizer, DictionarySearch, ScriptedEngine
from verl.errors import DataError
from verl.types import Document, EpisodeContext, Generate

SETTINGS = EpisodeSettings(2, True, 400, 1000, 200, 300, 3)
PASSAGES = {"Louvre": [Document("d1", "Louvre", "A museum in Paris.")]}
TURNS = ["<think> It is the Louvre. </think><search> Louvre </search>", "<think>b</think><answer> Paris </answer>"]


class Room:
    """A conversation with its fakes and what was written."""

    def __init__(self, turns: list[str], history: tuple[str, ...] = (), colour: bool = False) -> None:
        self.tokenizer = CharTokenizer()
        codec = Codec(self.tokenizer)
        self.engine = ScriptedEngine(self.tokenizer, turns)
        self.written: list[str] = []
        self.transcript = Transcript(codec, self.written.append, colour)
        tools = EpisodeTools(codec, SETTINGS, DictionarySearch(PASSAGES, failing=["down"]))
        builder = PromptBuilder(codec, "compact", "all", SETTINGS.max_start_length)
        self.conversation = Conversation(builder, tools, Decoding(), history)

    def ask(self, question: str, engine: Generate | None = None) -> str:
        self.written.clear()
        run = self.conversation.ask(question, engine or self.engine, self.transcript.event)
        self.transcript.end(asyncio.run(run))
        return "".join(self.written)


SHOWN = """\
  thinking   It is the Louvre. 
  searching  Louvre 
  passage 1  Louvre: A museum in Paris.
  thinking   b
  answer     Paris 
"""


def test_transcript_without_streaming() -> None:
    assert Room(TURNS).ask("Where is it?") == SHOWN


def test_transcript_is_the_same_when_tokens_are_streamed() -> None:
    room = Room(TURNS)

    class Streaming:
        async def generate(self, token_ids, sampling):  # type: ignore[no-untyped-def]
            completion = await room.engine.generate(token_ids, sampling)
            # one character at a time, so that every tag arrives in pieces
            for token in CharTokenizer(merged=()).encode(room.tokenizer.decode(completion.token_ids)):
                room.transcript.token(token)
            return completion

    assert room.ask("Where is it?", Streaming()) == SHOWN


def test_colours_end_with_their_block() -> None:
    text = Room(TURNS, colour=True).ask("Where is it?")
    assert "\033[1;32m  answer     Paris \033[0m\n" in text and "\033[36m  searching  Louvre \033[0m\n" in text


def test_text_that_only_looks_like_a_tag_is_shown() -> None:
    assert "1 < 2 <b>" in Room(["<think>1 < 2 <b></think><answer>x</answer>"]).ask("Is it?")


def test_history_is_kept_and_shown_to_the_model() -> None:
    room = Room([*TURNS, "<answer>1793</answer>", "z" * 300, "z", "z"], history=("Hi?", "Hello."))
    room.ask("Where is the Louvre")
    room.ask("When?")
    prompt = room.tokenizer.decode(room.engine.contexts[2])
    assert prompt == (
        "<context>\nUser: Hi?\nAssistant: Hello.\nUser: Where is the Louvre?\nAssistant: Paris\n</context>\nUser: When?"
    )
    assert "(no answer: response_length)" in room.ask("Why?")
    assert room.conversation.history[-2:] == ["Why?", "unanswerable"]
    with pytest.raises(DataError, match="too long"):
        room.ask("why " * 200)
    with pytest.raises(DataError, match="no UTF-8"):
        room.ask("caf\udce9?")
    assert room.conversation.history[-2:] == ["Why?", "unanswerable"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--max-turns", "-1"], "--max-turns: '-1' must be a whole number of at least 0"),
        (["--topk", "0"], "--topk: '0' must be a whole number of at least 1"),
        (["--topk", "three"], "--topk: 'three' must be"),
        (["--retriever-url", "foo"], "--retriever-url: 'foo' is no address"),
        (["--top-p", "0"], "--top-p: '0' must be above 0 and at most 1"),
        (["--top-p", "2"], "--top-p: '2' must be"),
        (["--temperature", "nan"], "--temperature: 'nan' must be"),
        (["--temperature", "inf"], "--temperature: 'inf' must be"),
        (["--question", " "], "--question: is empty"),
    ],
)
def test_arguments_out_of_range_are_refused(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        infer.main(arguments)
    assert caught.value.code == 2
    assert f"error: argument {message}" in capsys.readouterr().err


def test_a_question_that_cannot_be_read_does_not_end_the_chat(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    questions = iter(["why " * 4000, "caf\udce9?", ""])
    monkeypatch.setattr(infer, "_read_line", lambda: next(questions))
    monkeypatch.setattr("search_r1.search_client.SearchClient.start", lambda self: asyncio.sleep(0))
    recipe = infer.recipe_of(infer.SHIPPED_MODEL, None)
    options = infer._options(["--model", str(infer.SHIPPED_MODEL)])
    asyncio.run(infer.talk(options, recipe, "http://127.0.0.1:9/retrieve", []))
    written = capsys.readouterr().out
    assert "error: the question is too long" in written and "error: the question holds bytes" in written


def test_a_question_asked_is_the_episode_of_an_evaluation(tmp_path: Path) -> None:
    """Context for context and limit for limit, hints and cut turns included; seeds differ, and greedy needs none."""
    history = ["Who built it?", "Ann Lee."]
    path = tmp_path / "val.jsonl"
    path.write_text(json.dumps({"qid": "q", "question": "Where is it?", "history": history, "answers": ["x"]}) + "\n")
    data = SimpleNamespace(
        val_files=str(path),
        val_data_num=None,
        prompt_key="prompt",
        template="compact",
        native_thinking="keep",
        history="all",
        history_answers=True,
        max_start_length=SETTINGS.max_start_length,
        max_prompt_length=SETTINGS.max_prompt_length,
        max_response_length=SETTINGS.max_response_length,
        max_obs_length=SETTINGS.max_obs_length,
    )
    config = SimpleNamespace(data=data, task_config=search_config({"max_turns": SETTINGS.max_turns}))
    turns = ["z" * 300, *TURNS]
    room = Room(turns, tuple(history))
    room.ask("Where is it?")
    task = SearchTask(config, room.tokenizer, DictionarySearch(PASSAGES))
    engine = ScriptedEngine(room.tokenizer, turns)
    asyncio.run(task.episode(task.prompts("val")[0], engine, EpisodeContext(sample_index=0, seed=9, temperature=0.0)))
    assert len(engine.contexts) == 3 and room.engine.contexts == engine.contexts
    asked, evaluated = ([replace(s, seed=None) for s in e.samplings] for e in (room.engine, engine))
    assert asked == evaluated


def test_failed_search_is_said() -> None:
    assert "no answer: search_failed, no answer for 'down'" in Room(["<search>down</search>"]).ask("Where?")


def test_question_mark() -> None:
    assert [as_question(text) for text in (" where ", "Where?", "Tell me.")] == ["where?", "Where?", "Tell me."]


def test_history_files(tmp_path: Path) -> None:
    path = tmp_path / "talk"
    path.write_text('["Who?", "Ann."]')
    assert infer.read_history(path) == ["Who?", "Ann."]
    path.write_text("User: Who?\n\nAssistant: Ann: the writer.\n")
    assert infer.read_history(path) == ["Who?", "Ann: the writer."]
    for text, message in (
        ("User: Who?\n", "must end with an answer"),
        ("User: Who?\nUser: When?\n", r"talk:2: expected a line 'Assistant: \.\.\.', found 'User: When\?'"),
        ("[1, 2]", "list of strings"),
        ("[oops", "not JSON"),
        (r'["Who?", "\ud800"]', "half of a surrogate pair"),
    ):
        path.write_text(text)
        with pytest.raises(DataError, match=message):
            infer.read_history(path)
    path.write_bytes(b'\xef\xbb\xbf["Who?", "Ann."]')
    assert infer.read_history(path) == ["Who?", "Ann."]
    path.write_bytes(b"User: Wh\xff?\n")
    with pytest.raises(DataError, match=r"talk: not UTF-8 \(byte 8\)"):
        infer.read_history(path)
    with pytest.raises(DataError, match="No such file"):
        infer.read_history(tmp_path / "none")


def test_recipe_comes_from_the_run_of_the_model(tmp_path: Path) -> None:
    model = tmp_path / "run" / "global_step_5" / "hf"
    model.mkdir(parents=True)
    (model / "config.json").write_text('{"model_type": "qwen2"}')
    assert infer.recipe_of(model, None) == infer.Recipe()
    flat = {"data.template": "compact", "max_turns": 1, "retriever.url": "http://x/retrieve", "data.max_obs_length": 99}
    (tmp_path / "run" / "config.json").write_text(json.dumps(flat))
    recipe = infer.recipe_of(model, None)
    assert (recipe.template, recipe.max_turns, recipe.url, recipe.max_obs_length) == (
        "compact",
        1,
        "http://x/retrieve",
        99,
    )
    assert infer.recipe_of(model, "tiny_ppo").template == "compact"
    # Without a run or a recipe, the limits are those of the published training recipe.
    published = infer.recipe_of(model, "chatr1_3b_topiocqa")
    assert replace(published, template="chatr1", dtype="float32") == infer.Recipe()


def test_newest_complete_export_is_the_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert infer.newest_model() == infer.SHIPPED_MODEL
    for step in (1, 2):
        folder = tmp_path / "runs" / "a" / f"global_step_{step}"
        (folder / "hf").mkdir(parents=True)
        (folder / "hf" / "config.json").write_text("{}")
    (tmp_path / "runs" / "a" / "global_step_1" / "COMPLETE").write_text("")
    assert infer.newest_model() == Path("runs/a/global_step_1/hf")


def test_unreachable_service_is_a_named_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    history = tmp_path / "talk"
    history.write_text("nobody: hm\n")
    assert infer.main(["--model", str(tmp_path), "--history", str(history)]) == 2
    assert "talk:1: expected a line 'User: ...'" in capsys.readouterr().err
    assert infer.main(["--model", str(tmp_path / "none"), "--question", "Who?"]) == 2
    assert f"--model {tmp_path / 'none'}: there is no such folder" in capsys.readouterr().err
    recipe = infer.Recipe(url="http://127.0.0.1:9/retrieve")
    with pytest.raises(infer.RetrievalError, match="--retriever-url"), infer.retrieval(recipe, None):
        pass
