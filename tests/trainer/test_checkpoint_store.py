"""Checkpoints are whole or not there; retention never leaves a gap; a full disk is an error with a remedy."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections import namedtuple
from pathlib import Path

import pytest

from verl.errors import CheckpointError, ResourceError
from verl.trainer.checkpoint import Checkpoint, CheckpointStore, TrainerState, is_disk_full


def state(step: int, score: float | None = None, best: int | None = None) -> TrainerState:
    return TrainerState(step, "run1", "cfg", {"position": step}, "data", {"value": 0.1}, score, best)


def write_one(folder: Path) -> None:
    (folder / "policy").mkdir()
    (folder / "policy" / "shard.bin").write_bytes(b"x" * 100)


def test_state_comes_back_and_the_files_are_listed_with_sizes(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    saved = store.save(state(3, 0.5, 3), write_one)
    assert store.newest() == saved == Checkpoint(3, tmp_path / "global_step_3")
    assert saved.state() == state(3, 0.5, 3)
    assert saved.files()["policy/shard.bin"] == 100
    assert saved.export is None


def test_a_kill_while_the_workers_write_leaves_the_older_checkpoint(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    store.save(state(1), write_one)
    # What a SIGKILL in the middle of a save leaves behind: files, but no marker.
    (tmp_path / "global_step_2").mkdir()
    write_one(tmp_path / "global_step_2")
    newest = store.newest()
    assert newest is not None and newest.step == 1
    with pytest.raises(CheckpointError, match=r"complete steps: 1"):
        store.at(2)
    # The step is written again over the rest.
    assert store.save(state(2), write_one).files().keys() == {"policy/shard.bin", "state.json"}


def test_an_error_while_saving_removes_the_half(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=2)

    def fail(folder: Path) -> None:
        write_one(folder)
        raise RuntimeError("a worker died")

    with pytest.raises(RuntimeError, match="a worker died"):
        store.save(state(1), fail)
    assert not (tmp_path / "global_step_1").exists()


def test_the_newest_k_and_the_best_are_kept(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    for step, best in ((1, 1), (2, 2), (3, 2), (4, 2), (5, 2)):
        store.save(state(step, 0.1, best), write_one)
    assert [checkpoint.step for checkpoint in store.complete()] == [2, 4, 5]


def test_a_good_step_outlives_newer_ones_until_another_is_named(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=1)
    for step, good in ((1, None), (2, 1), (3, 1), (4, 3)):
        store.save(state(step), write_one, good)
        expected = {1: [1], 2: [1, 2], 3: [1, 3], 4: [3, 4]}[step]
        assert [checkpoint.step for checkpoint in store.complete()] == expected


def test_old_ones_go_only_after_the_new_one_is_complete(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=1)
    store.save(state(1), write_one)

    def look(folder: Path) -> None:
        assert [checkpoint.step for checkpoint in store.complete()] == [1]
        write_one(folder)

    store.save(state(2), look)
    assert [checkpoint.step for checkpoint in store.complete()] == [2]


def test_a_damaged_newest_checkpoint_is_skipped_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = CheckpointStore(tmp_path, keep=3)
    store.save(state(1), write_one)
    second = store.save(state(2), write_one)
    (second.path / "policy" / "shard.bin").write_bytes(b"short")
    newest = store.newest()
    assert newest is not None and newest.step == 1
    assert "shard.bin: 5 bytes, 100 when written" in caplog.text
    with pytest.raises(CheckpointError, match="use another one"):
        second.verify()


def test_a_full_disk_names_the_remedy_and_the_checkpoint_to_go_on_from(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    store.save(state(4), write_one)

    def full(folder: Path) -> None:
        write_one(folder)
        raise RuntimeError("worker failed") from OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(ResourceError, match=r"disk full.*step 4 is the newest complete.*start the same command again"):
        store.save(state(5), full)
    assert [checkpoint.step for checkpoint in store.complete()] == [4]
    assert not (tmp_path / "global_step_5").exists()


def test_a_save_that_cannot_fit_is_refused_before_it_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    store.save(state(1), write_one)
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(1000, 950, 50))
    with pytest.raises(ResourceError, match="disk full"):
        store.save(state(2), lambda _: pytest.fail("nothing may be written"))


def test_disk_full_is_recognised_through_causes_and_lost_types() -> None:
    quota = OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))
    wrapped = RuntimeError("save failed")
    wrapped.__cause__ = quota
    assert is_disk_full(wrapped)
    assert is_disk_full(RuntimeError("worker: [Errno 28] No space left on device"))
    assert not is_disk_full(OSError(errno.EACCES, "denied"))


def test_a_short_write_of_pytorch_is_a_full_disk() -> None:
    assert is_disk_full(RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 704 vs 598"))
    assert is_disk_full(OSError(errno.EFBIG, os.strerror(errno.EFBIG)))
    assert not is_disk_full(RuntimeError("unexpected key"))


def test_cutting_back_sets_later_ones_aside_and_rewrites_the_index(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=5)
    for step in (1, 2, 3):
        store.save(state(step, best=1), write_one)
    (tmp_path / "global_step_4").mkdir()
    store.cut_back(2)
    assert [checkpoint.step for checkpoint in store.complete()] == [1, 2]
    assert (tmp_path / "superseded" / "global_step_3" / "COMPLETE").is_file()
    assert not (tmp_path / "global_step_4").exists()
    records = [json.loads(line) for line in (tmp_path / "checkpoints.jsonl").read_text().splitlines()]
    assert [(record["step"], record["best"]) for record in records] == [(1, True), (2, False)]


def test_other_training_data_is_refused(tmp_path: Path) -> None:
    state(1).check_data("data", tmp_path)
    with pytest.raises(CheckpointError, match="training prompts differ"):
        state(1).check_data("other", tmp_path)


def test_a_state_of_another_version_is_refused_by_field(tmp_path: Path) -> None:
    saved = CheckpointStore(tmp_path, keep=1).save(state(1), write_one)
    data = json.loads((saved.path / "state.json").read_text())
    del data["kl"]
    (saved.path / "state.json").write_text(json.dumps(data))
    with pytest.raises(CheckpointError, match=r"state\.json.*fields differ: kl"):
        saved.state()


def test_one_flipped_bit_is_noticed(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=3)
    first, second = store.save(state(1), write_one), store.save(state(2), write_one)
    shard = second.path / "policy" / "shard.bin"
    data = bytearray(shard.read_bytes())
    data[50] ^= 1
    shard.write_bytes(data)
    with pytest.raises(CheckpointError, match=r"shard\.bin: sha256 [0-9a-f]{16}, [0-9a-f]{16} when written"):
        second.verify()
    assert store.newest() == first


@pytest.mark.parametrize("name", ["COMPLETE", "state.json"])
def test_an_emptied_small_file_counts_as_damage_and_is_named(tmp_path: Path, name: str) -> None:
    store = CheckpointStore(tmp_path, keep=3)
    first, second = store.save(state(1), write_one), store.save(state(2), write_one)
    (second.path / name).write_text("")
    with pytest.raises(CheckpointError, match=name):
        second.verify()
    assert store.newest() == first
    store.save(state(3), write_one)
    store.cut_back(3)
    assert [json.loads(line)["step"] for line in (tmp_path / "checkpoints.jsonl").read_text().splitlines()] == [1, 3]
