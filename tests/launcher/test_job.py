"""The launcher's own decisions: arguments, addresses, files, the service's life. The service is the real one."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest
from job import (
    Phases,
    build_index,
    build_world,
    check_files,
    environment,
    finish,
    index_folder,
    main,
    parse,
    start_service,
)
from job_service import RetrievalService, Url, child, choose_url

from verl.config import load_config
from verl.errors import ConfigError, DataError, ResourceError, RetrievalError

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    path = tmp_path / "passages.jsonl"
    rows = [
        {"id": "a", "contents": '"Naze River"\nThe source of Naze River is Lake Orbo.'},
        {"id": "b", "contents": '"Quil Museum"\nThe founder of Quil Museum is Ada Brent.'},
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def listener() -> socket.socket:
    taken = socket.socket()
    taken.bind(("127.0.0.1", 0))
    taken.listen()
    return taken


# ---------------------------------------------------------------------------------------------------------------
# Arguments


def test_training_arguments() -> None:
    request = parse(["train", "--config-name", "tiny_grpo", "trainer.seed=2", "--check", "+max_turns=1"])
    assert (request.recipe, request.check) == ("tiny_grpo", True)
    assert request.overrides == ["trainer.seed=2", "+max_turns=1"]
    assert request.sets("max_turns") and not request.sets("trainer.resume")


def test_evaluation_is_a_run_of_its_own_that_only_evaluates() -> None:
    request = parse(["eval", "model.path=some/hf", "save_val_dir=out", "trainer.default_local_dir=mine"])
    config = load_config(request.recipe, request.overrides)
    assert config.actor_rollout_ref.model.path == "some/hf"
    assert config.trainer.val_only and config.save_val and config.trainer.resume == "never"
    assert (config.trainer.default_local_dir, config.save_val_dir) == ("mine", "out")
    assert not config.job.evaluate_bounds


@pytest.mark.parametrize("arguments", [[], ["fly"], ["train", "--speed"]])
def test_unknown_arguments_show_the_usage(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parse(arguments)
    assert ended.value.code == 2
    assert "bash train_ppo.sh [--check]" in capsys.readouterr().err


def test_help_is_no_mistake(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parse(["train", "--help"])
    assert ended.value.code == 0
    assert "bash train_ppo.sh [--check]" in capsys.readouterr().out


def test_a_port_that_is_taken_while_the_service_starts_is_left_to_its_owner(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    overrides = [f"job.corpus_path={corpus}", f"job.index_path={tmp_path / 'index'}", f"job.cache_dir={tmp_path}"]
    config = load_config("tiny_ppo", overrides)
    build_index(config)
    with listener() as taken:
        port = taken.getsockname()[1]
        service = start_service(config, Url("127.0.0.1", port, "/retrieve", "http", explicit=False))
        try:
            assert service.url.port != port
            with urllib.request.urlopen(service.url.beside("/readyz"), timeout=5) as answer:
                assert answer.status == 200
        finally:
            service.stop()
        with pytest.raises(RetrievalError, match="is taken"):
            start_service(config, Url("127.0.0.1", port, "/retrieve", "http", explicit=True))


def test_mistakes_of_the_configuration_end_with_status_2_before_anything_is_built(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(["train", "trainer.sed=1", f"job.cache_dir={tmp_path}/cache"]) == 2
    assert "did you mean trainer.seed?" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_missing_files_are_named_by_key(tmp_path: Path) -> None:
    config = load_config("smollm2", [f"data.train_files={tmp_path}/t.jsonl", f"data.val_files={tmp_path}/v.jsonl"])
    with pytest.raises(DataError) as caught:
        check_files(config)
    text = str(caught.value)
    assert f"data.val_files: there is no file {tmp_path}/v.jsonl" in text
    assert f"data.train_files: there is no file {tmp_path}/t.jsonl" in text
    assert "job.corpus_path: there is no file data/passages.jsonl" in text


# ---------------------------------------------------------------------------------------------------------------
# World and index


def test_the_world_is_built_once_and_left_alone_when_it_is_the_same(tmp_path: Path) -> None:
    config = load_config("tiny_ppo", [f"job.cache_dir={tmp_path}"])
    build_world(config)
    folder = tmp_path / "world-0"
    names = {path.name for path in folder.iterdir()}
    assert names == {"corpus.jsonl", "train.jsonl", "dev.jsonl", "test.jsonl"}
    check_files(config)
    before = {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}
    (folder / "dev.jsonl").write_text("damaged")
    build_world(config)
    after = {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}
    assert {name for name in names if before[name] != after[name]} == {"dev.jsonl"}
    assert (folder / "dev.jsonl").stat().st_size > 1000
    assert [path.name for path in tmp_path.iterdir()] == ["world-0"]


def test_an_index_without_a_path_lies_in_the_cache_under_the_name_of_its_passages(corpus: Path, tmp_path: Path) -> None:
    config = load_config("smollm2", [f"job.corpus_path={corpus}", f"job.cache_dir={tmp_path}/cache"])
    assert index_folder(config) == tmp_path / "cache" / "indexes" / f"{tmp_path.name}-passages"


def test_a_malformed_passage_ends_with_the_words_of_the_builder(corpus: Path, tmp_path: Path) -> None:
    corpus.write_text(corpus.read_text() + "{nonsense\n")
    config = load_config("smollm2", [f"job.corpus_path={corpus}", f"job.cache_dir={tmp_path}/cache"])
    with pytest.raises(ResourceError, match=r"passages\.jsonl.*3"):
        build_index(config)


# ---------------------------------------------------------------------------------------------------------------
# Addresses


def test_a_taken_default_port_is_replaced_by_a_free_one() -> None:
    with listener() as taken:
        port = taken.getsockname()[1]
        url = choose_url(f"http://127.0.0.1:{port}/retrieve", explicit=False)
        url.reserve()
        assert url.port != port
        assert url.text == f"http://127.0.0.1:{url.port}/retrieve"


def test_a_taken_port_that_the_user_named_is_an_error_with_remedies() -> None:
    with listener() as taken:
        port = taken.getsockname()[1]
        url = choose_url(f"http://localhost:{port}/retrieve", explicit=True)
        with pytest.raises(ResourceError, match=rf"port {port} is taken.*job\.serve_retrieval=false"):
            url.reserve()


def test_a_remote_address_is_not_ours_to_serve() -> None:
    assert not choose_url("http://retriever.cluster:8002/retrieve", explicit=True).is_local
    assert choose_url("http://[::1]:8002/retrieve", explicit=True).beside("/readyz") == "http://[::1]:8002/readyz"


@pytest.mark.parametrize(
    "text", ["127.0.0.1:8002", "http://127.0.0.1:8002", "ftp://host/retrieve", "http://h:99999/retrieve"]
)
def test_an_address_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"write http://HOST:PORT/retrieve"):
        choose_url(text, explicit=True)


# ---------------------------------------------------------------------------------------------------------------
# The service


def service_for(corpus: Path, tmp_path: Path) -> RetrievalService:
    config = load_config("smollm2", [f"job.corpus_path={corpus}", f"job.cache_dir={tmp_path}/cache"])
    build_index(config)
    url = choose_url("http://127.0.0.1:1/retrieve", explicit=False)
    url.reserve()
    return RetrievalService(
        url, index_folder(config), corpus, 3, log=tmp_path / "log" / "service.log", env=environment()
    )


def test_the_service_starts_answers_and_stops(corpus: Path, tmp_path: Path) -> None:
    service = service_for(corpus, tmp_path)
    try:
        service.start(timeout_s=60.0)
        assert service.death() is None
        body = json.dumps({"queries": ["Who founded Quil Museum?"], "topk": 1, "return_scores": False}).encode()
        request = urllib.request.Request(service.url.text, body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=10) as answer:
            assert json.load(answer)["result"][0][0]["id"] == "b"
    finally:
        service.stop()
    assert service.death() is not None
    choose_url(service.url.text, explicit=True).reserve()  # the port is free again


def test_a_service_that_cannot_start_says_why(corpus: Path, tmp_path: Path) -> None:
    service = service_for(corpus, tmp_path)
    corpus.write_text(corpus.read_text().replace("Ada Brent", "Bea Brent!"))
    try:
        with pytest.raises(RetrievalError, match=r"(?s)did not start: status \d+, log .*service\.log.*passages\.jsonl"):
            service.start(timeout_s=60.0)
    finally:
        service.stop()


def test_a_child_ends_when_its_parent_is_killed(tmp_path: Path) -> None:
    """SIGKILL of the launcher leaves no process behind that holds a port."""
    code = (
        "import sys, time; sys.path.insert(0, 'scripts')\nfrom job_service import child\n"
        "p = child([sys.executable, '-c', 'import time; time.sleep(60)'])\nprint(p.pid, flush=True)\ntime.sleep(60)"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True, env=environment()
    )
    assert parent.stdout is not None
    grandchild = int(parent.stdout.readline())
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    parent.stdout.close()
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline and _alive(grandchild):
        time.sleep(0.05)
    assert not _alive(grandchild)


def _alive(pid: int) -> bool:
    """True while the process runs; one that waits to be reaped by the system does not."""
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False


def test_a_child_gets_no_standard_input() -> None:
    assert child([sys.executable, "-c", "import sys; sys.exit(len(sys.stdin.read()))"]).wait() == 0


# ---------------------------------------------------------------------------------------------------------------
# The end


def test_the_end_adds_the_phases_around_the_trainer_and_prints_the_path_last(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CHATR1_STARTED", str(int(time.time()) - 60))
    summary = tmp_path / "summary.json"
    summary.write_text(json.dumps({"wall_seconds": {"rollout": 10.0}, "cpu_minutes": 3.5, "after": {"f1": 0.5}}))
    phases = Phases()
    with phases.phase("index", "index"):
        pass
    with phases.phase("trainer", "trainer"):
        pass
    finish(summary, phases)
    record = json.loads(summary.read_text())
    assert record["after"] == {"f1": 0.5}
    assert record["wall_seconds"]["rollout"] == 10.0
    assert 59 <= record["wall_seconds"]["setup"] <= 70 and "trainer" not in record["wall_seconds"]
    assert record["job_wall_seconds"] >= 59
    lines = capsys.readouterr().out.strip().splitlines()
    assert lines[-1] == str(summary.resolve())
    assert "3.5 CPU minutes" in lines[-2] and "1.0 min" in lines[-2]
    assert os.listdir(tmp_path) == ["summary.json"]
