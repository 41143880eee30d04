"""Which folder a run takes, when it goes on, and what is cut back before it does."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from verl.config import load_config
from verl.errors import CheckpointError, ConfigError, ResourceError
from verl.tracking import MetricsFile, write_atomically
from verl.trainer.checkpoint import CheckpointStore, TrainerState
from verl.trainer.run_folder import RunFolder, check_free_space, check_writable, config_hash, open_run, remove_later
from verl.trainer.session import run_session

CONFIG = {"trainer.seed": 1, "trainer.total_training_steps": 4, "data.train_files": ("a.jsonl",)}


def begin(base: Path, resume: str = "auto", **changes: object) -> RunFolder:
    run = open_run(base, resume, CONFIG | changes, keep=2)
    run.lock.close()  # the process ends
    return run


def save(folder: Path, step: int) -> None:
    CheckpointStore(folder, keep=9).save(
        TrainerState(step, "run1", "cfg", {}, "data", {}), lambda path: (path / "shard").write_text("x")
    )


def finish(folder: Path) -> None:
    (folder / "summary.json").write_text("{}")


def test_a_first_run_takes_the_base_folder_and_begins(tmp_path: Path) -> None:
    run = begin(tmp_path / "run")
    assert (run.path, run.step, run.restored) == (tmp_path / "run", 0, None)


def test_an_unfinished_run_goes_on_from_its_newest_complete_checkpoint_with_its_id(tmp_path: Path) -> None:
    first = begin(tmp_path / "run")
    save(first.path, 1)
    save(first.path, 2)
    (first.path / "global_step_3").mkdir()  # killed while saving
    second = begin(tmp_path / "run")
    assert (second.path, second.step, second.run_id) == (first.path, 2, first.run_id)
    assert not (first.path / "global_step_3").exists()


def test_an_unfinished_run_without_checkpoint_begins_again_in_place(tmp_path: Path) -> None:
    first = begin(tmp_path / "run")
    MetricsFile(first.path / "metrics.jsonl").append(1, {})
    second = begin(tmp_path / "run", **{"trainer.seed": 7})  # nothing is lost, so nothing is frozen
    assert (second.path, second.step) == (first.path, 0)
    assert MetricsFile(first.path / "metrics.jsonl").rows() == []


def test_beside_finished_runs_a_new_numbered_one_begins_and_an_interrupted_numbered_one_goes_on(tmp_path: Path) -> None:
    finish(begin(tmp_path / "run").path)
    second = begin(tmp_path / "run")
    assert second.path == tmp_path / "run-2"
    save(second.path, 1)
    assert (begin(tmp_path / "run").path, begin(tmp_path / "run").step) == (second.path, 1)
    finish(second.path)
    assert begin(tmp_path / "run").path == tmp_path / "run-3"
    for number in range(3, 12):
        finish(tmp_path / f"run-{number}" if (tmp_path / f"run-{number}").exists() else begin(tmp_path / "run").path)
    assert begin(tmp_path / "run").path == tmp_path / "run-12"  # numbers, not letters, are ordered


def test_never_begins_beside_an_unfinished_run(tmp_path: Path) -> None:
    save(begin(tmp_path / "run").path, 1)
    assert begin(tmp_path / "run", "never").path == tmp_path / "run-2"


def test_a_path_goes_on_even_with_a_finished_run_and_sets_later_checkpoints_aside(tmp_path: Path) -> None:
    first = begin(tmp_path / "run")
    for step in (1, 2, 3):
        save(first.path, step)
    finish(first.path)
    run = begin(tmp_path / "elsewhere", str(first.path / "global_step_2"))
    assert (run.path, run.step) == (first.path, 2)
    assert (first.path / "superseded" / "global_step_3").is_dir()
    assert not (first.path / "summary.json").exists()
    assert begin(tmp_path / "elsewhere", str(first.path)).step == 2


def test_a_path_without_a_checkpoint_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="neither a global_step_N folder nor a run folder"):
        begin(tmp_path / "run", str(tmp_path / "nothing"))
    with pytest.raises(CheckpointError, match="no complete checkpoint"):
        begin(tmp_path / "run", str(tmp_path / "run" / "global_step_7"))


def test_a_changed_frozen_key_is_refused_with_both_values_and_a_free_one_is_not(tmp_path: Path) -> None:
    save(begin(tmp_path / "run").path, 1)
    longer = {"trainer.total_training_steps": 9, "data.train_files": ("moved/a.jsonl",), "retriever.url": "http://b"}
    assert begin(tmp_path / "run", **longer).step == 1
    with pytest.raises(ConfigError, match=r"trainer\.seed: 1 in the run, 2 now") as caught:
        begin(tmp_path / "run", **{"trainer.seed": 2})
    assert "trainer.resume=never" in str(caught.value)
    assert "total_training_steps" not in str(caught.value)


def test_the_hash_depends_on_frozen_keys_alone() -> None:
    assert config_hash(CONFIG) == config_hash(CONFIG | {"trainer.logger": ("console",), "job.cache_dir": "x"})
    assert config_hash(CONFIG) != config_hash(CONFIG | {"trainer.seed": 2})


def test_records_after_the_restored_step_are_cut_back(tmp_path: Path) -> None:
    run = begin(tmp_path / "run")
    save(run.path, 2)
    metrics = MetricsFile(run.path / "metrics.jsonl")
    for step in range(5):
        metrics.append(step, {})
        write_atomically(run.path / "rollouts" / f"step_{step}.jsonl", "{}\n")
        write_atomically(run.path / "eval" / "val" / f"step_{step}.jsonl", "{}\n")
        write_atomically(run.path / "eval" / "val" / f"summary_step_{step}.json", "{}")
    (run.path / "rollouts" / "step_5.jsonl.123.tmp").write_text("{")
    assert begin(tmp_path / "run").step == 2
    assert [row["step"] for row in metrics.rows()] == [0, 1, 2]
    assert sorted(path.name for path in (run.path / "rollouts").iterdir()) == [f"step_{n}.jsonl" for n in range(3)]
    assert sorted(path.name for path in (run.path / "eval" / "val").iterdir()) == sorted(
        [f"step_{n}.jsonl" for n in range(3)] + [f"summary_step_{n}.json" for n in range(3)]
    )


def test_files_without_a_step_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    remove_later(tmp_path, -1)
    assert (tmp_path / "notes.txt").exists()


def test_two_processes_cannot_run_in_one_folder_and_a_killed_one_frees_it(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from verl.trainer.run_folder import open_run\n"
        "run = open_run(Path(sys.argv[1]), 'auto', {}, 2)\n"
        "sys.stdout.write('locked\\n'); sys.stdout.flush(); sys.stdin.read()"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "run")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None and other.stdout.readline() == "locked\n"
        with pytest.raises(ResourceError, match="another process is running in this folder"):
            open_run(tmp_path / "run", "auto", {}, keep=2)
        other.kill()
        other.wait()
    open_run(tmp_path / "run", "auto", {}, keep=2).lock.close()


def test_a_disk_without_room_for_one_checkpoint_is_refused_at_start(tmp_path: Path) -> None:
    check_free_space(tmp_path / "not" / "yet", 1)
    with pytest.raises(ResourceError, match=r"are free, one checkpoint needs about"):
        check_free_space(tmp_path / "not" / "yet", 2**60)


def test_a_folder_that_cannot_be_written_is_refused_at_start(tmp_path: Path) -> None:
    check_writable(tmp_path / "not" / "yet", "trainer.default_local_dir")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "below", tmp_path / ("n" * 300), Path("/proc/nothing")):
        with pytest.raises(ResourceError, match=f"save_val_dir={path}: cannot be written"):
            check_writable(path, "save_val_dir")
    good, bad = f"trainer.default_local_dir={tmp_path / 'run'}", f"trainer.default_local_dir={tmp_path / 'file'}"
    for overrides in ([bad], [good, "save_val=true", "save_val_dir=/proc/nothing"]):
        with pytest.raises(ResourceError, match=f"{overrides[-1]}: cannot be written"):
            run_session(load_config("tiny_ppo", overrides), "tiny_ppo")


@pytest.mark.parametrize(
    ("name", "content"),
    [("run.json", "{"), ("run.json", "{}"), ("run.json", "[]"), ("config.json", "{"), ("config.json", "[]")],
)
def test_a_damaged_record_of_the_run_is_named_and_nothing_is_cut(tmp_path: Path, name: str, content: str) -> None:
    folder = begin(tmp_path / "run").path
    save(folder, 1)
    save(folder, 2)
    finish(folder)
    (folder / name).write_text(content)
    with pytest.raises(CheckpointError, match=rf"{name}: damaged"):
        begin(tmp_path / "run", str(folder / "global_step_1"))
    assert (folder / "summary.json").exists() and (folder / "global_step_2" / "COMPLETE").exists()


def test_a_run_whose_checkpoints_are_all_damaged_is_not_begun_again_in_silence(tmp_path: Path) -> None:
    folder = begin(tmp_path / "run").path
    save(folder, 1)
    (folder / "global_step_1" / "state.json").write_text("")
    with pytest.raises(CheckpointError, match="every checkpoint of this unfinished run is damaged"):
        begin(tmp_path / "run")
    assert (folder / "global_step_1" / "shard").is_file()
