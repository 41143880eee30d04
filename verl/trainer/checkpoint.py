"""Checkpoints: ``<run>/global_step_N/`` with trainer state, an optional Hugging Face export and a completion marker.

    global_step_40/
        policy/  critic/     sharded model, optimizer, schedule and RNG state, written by the workers
        hf/                  safetensors, tokenizer, config (see ``trainer.export_every``)
        state.json           the driver's state: step, prompt cursor, KL coefficient, best score, the step's figures
        COMPLETE             file list with sizes, written last by rename

A folder without ``COMPLETE`` is the rest of a kill and is never read. An old checkpoint is deleted only after the new
one is complete, and its marker goes first, so that a kill in the middle of a deletion leaves no half that looks whole.
What is assumed of a shared file system: rename within a folder is atomic, and files that a worker closed and synced are
seen by the driver.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from verl.errors import CheckpointError, ResourceError
from verl.identity import file_sha256
from verl.tracking import write_atomically

logger = logging.getLogger(__name__)

_PREFIX = "global_step_"
_MARKER = "COMPLETE"
_STATE = "state.json"


@dataclass(frozen=True)
class TrainerState:
    """What the driver needs to go on after step ``step`` as if nothing had happened. JSON-serialisable throughout."""

    step: int
    run_id: str
    config_hash: str
    prompts: Mapping[str, Any]
    """Cursor of the prompt stream."""
    prompts_hash: str
    """Of the training prompts' ids in file order: another data file cannot be continued."""
    kl: Mapping[str, Any]
    """State of the KL controller."""
    score: float | None = None
    """Validation score of this step, None when it was not evaluated."""
    best_step: int | None = None
    best_score: float | None = None
    """Best among the checkpoints written so far, this one included."""
    figures: Mapping[str, float] = field(default_factory=dict)
    """The step's row of ``metrics.jsonl``: it may be lost if the kill falls between saving and logging."""
    wall_seconds: Mapping[str, float] = field(default_factory=dict)
    """By phase, over the whole run so far."""
    cpu_seconds: Mapping[str, float] = field(default_factory=dict)
    entropy: Mapping[str, Any] = field(default_factory=dict)
    """State of the entropy controller."""

    @classmethod
    def from_json(cls, data: Mapping[str, Any], source: Path) -> TrainerState:
        """Rebuild; raises CheckpointError naming the file when a field is missing or unknown."""
        known = {item.name for item in fields(cls)}
        if set(data) != known:
            odd = ", ".join(sorted(set(data) ^ known))
            raise CheckpointError(f"{source}: written by another version of the trainer (fields differ: {odd})")
        return cls(**data)

    def check_data(self, prompts_hash: str, source: Path) -> None:
        """Raise CheckpointError when the training prompts are not those of the checkpoint."""
        if self.prompts_hash != prompts_hash:
            raise CheckpointError(
                f"{source}: the training prompts differ from those of the run (hash {self.prompts_hash} then, "
                f"{prompts_hash} now): data.train_files, the template or the model's tokenizer has changed; "
                "trainer.resume=never begins a new run"
            )


@dataclass(frozen=True, order=True)
class Checkpoint:
    """A complete checkpoint on disk."""

    step: int
    path: Path

    def state(self) -> TrainerState:
        """Read ``state.json``; raises CheckpointError."""
        source = self.path / _STATE
        return TrainerState.from_json(_read_json(source), source)

    def files(self) -> dict[str, int]:
        """Return relative path -> bytes as recorded when it was written; raises CheckpointError."""
        return {name: recorded["bytes"] for name, recorded in self._recorded().items()}

    def _recorded(self) -> dict[str, dict[str, Any]]:
        """Return relative path -> ``bytes`` and ``sha256`` of every file."""
        recorded = _read_json(self.path / _MARKER).get("files")
        if not isinstance(recorded, dict):
            raise CheckpointError(f"{self.path / _MARKER}: damaged (no list of files); use another checkpoint")
        return recorded

    def verify(self) -> None:
        """Raise CheckpointError when a file is missing or is not, byte for byte, what was written."""
        for name, recorded in self._recorded().items():
            path = self.path / name
            if not path.is_file():
                raise CheckpointError(f"{path}: missing, although the checkpoint was complete; use another one")
            if path.stat().st_size != recorded["bytes"]:
                raise CheckpointError(
                    f"{path}: {path.stat().st_size} bytes, {recorded['bytes']} when written; use another one"
                )
            if (found := file_sha256(path)) != recorded["sha256"]:
                raise CheckpointError(
                    f"{path}: sha256 {found[:16]}, {recorded['sha256'][:16]} when written; use another one"
                )
        self.state()

    @property
    def export(self) -> Path | None:
        """The Hugging Face folder, if this checkpoint has one."""
        path = self.path / "hf"
        return path if path.is_dir() else None


class CheckpointStore:
    """The checkpoints of one run folder."""

    def __init__(self, folder: Path, keep: int) -> None:
        self.folder = folder
        self._keep = keep

    def complete(self) -> list[Checkpoint]:
        """Return the complete checkpoints, oldest first."""
        found = []
        for path in self.folder.glob(f"{_PREFIX}*"):
            number = path.name.removeprefix(_PREFIX)
            if number.isdigit() and (path / _MARKER).is_file():
                found.append(Checkpoint(int(number), path))
        return sorted(found)

    def at(self, step: int) -> Checkpoint:
        """Return the complete checkpoint of a step; raises CheckpointError when there is none."""
        checkpoint = Checkpoint(step, self.folder / f"{_PREFIX}{step}")
        if not (checkpoint.path / _MARKER).is_file():
            have = ", ".join(str(c.step) for c in self.complete()) or "none"
            raise CheckpointError(f"{checkpoint.path}: no complete checkpoint (complete steps: {have})")
        return checkpoint

    def newest(self) -> Checkpoint | None:
        """Return the newest checkpoint that is complete and undamaged; warns about damaged ones."""
        for checkpoint in reversed(self.complete()):
            try:
                checkpoint.verify()
            except CheckpointError as error:
                logger.warning("checkpoint of step %d is damaged and skipped: %s", checkpoint.step, error)
                continue
            return checkpoint
        return None

    def save(self, state: TrainerState, write: Callable[[Path], None], good_step: int | None = None) -> Checkpoint:
        """Write a checkpoint: ``write(folder)`` lets the workers write, then state and marker follow, then retention.

        ``good_step`` is kept, too: what to fall back to when newer ones may be damaged.
        Raises ResourceError when the disk is full; the older checkpoints are then untouched.
        """
        path = self.folder / f"{_PREFIX}{state.step}"
        self._check_space(path)
        shutil.rmtree(path, ignore_errors=True)  # the rest of a kill, or of the step that is written again
        path.mkdir(parents=True)
        try:
            write(path)
            write_atomically(path / _STATE, json.dumps(asdict(state), indent=1))
            marker = {"step": state.step, "files": _sync_tree(path)}
            write_atomically(path / _MARKER, json.dumps(marker, indent=1))
        except BaseException as error:
            shutil.rmtree(path, ignore_errors=True)
            if is_disk_full(error):
                raise ResourceError(self._disk_full_message(path)) from error
            raise
        checkpoint = Checkpoint(state.step, path)
        self._append_index(state, checkpoint)
        self._retire({state.best_step, good_step})
        return checkpoint

    def cut_back(self, step: int) -> None:
        """Forget what is later than ``step`` or incomplete; later complete checkpoints are moved to ``superseded/``."""
        for path in self.folder.glob(f"{_PREFIX}*"):
            number = path.name.removeprefix(_PREFIX)
            if not number.isdigit():
                continue
            if not (path / _MARKER).is_file():
                shutil.rmtree(path)
            elif int(number) > step:
                target = self.folder / "superseded" / path.name
                shutil.rmtree(target, ignore_errors=True)
                target.parent.mkdir(exist_ok=True)
                path.replace(target)
        records = []
        for checkpoint in self.complete():
            try:
                records.append(_index_record(checkpoint.state(), checkpoint))
            except CheckpointError as error:
                logger.warning("checkpoint of step %d is damaged and not listed: %s", checkpoint.step, error)
        write_atomically(self.folder / "checkpoints.jsonl", "".join(json.dumps(record) + "\n" for record in records))

    def _append_index(self, state: TrainerState, checkpoint: Checkpoint) -> None:
        with (self.folder / "checkpoints.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(_index_record(state, checkpoint)) + "\n")

    def _retire(self, exempt: set[int | None]) -> None:
        """Delete all but the newest ``keep`` and the exempt ones."""
        for checkpoint in self.complete()[: -self._keep]:
            if checkpoint.step not in exempt:
                (checkpoint.path / _MARKER).unlink()
                shutil.rmtree(checkpoint.path)

    def _check_space(self, path: Path) -> None:
        """Refuse to begin when the last checkpoint would not fit once more."""
        done = self.complete()
        if done and shutil.disk_usage(self.folder).free < _bytes(done[-1]):
            raise ResourceError(self._disk_full_message(path))

    def _disk_full_message(self, path: Path) -> str:
        free = shutil.disk_usage(self.folder).free / 2**20
        done = self.complete()
        size = f"the last one took {_bytes(done[-1]) / 2**20:.0f} MiB, " if done else ""
        newest = f"step {done[-1].step} is the newest complete checkpoint" if done else "there is no older checkpoint"
        return (
            f"disk full: cannot write {path} ({size}{free:.0f} MiB are free); {newest}. Free space there, or lower "
            "trainer.keep_checkpoints, and start the same command again: it goes on from that checkpoint"
        )


def is_disk_full(error: BaseException | None) -> bool:
    """True when this error, or one that caused it, says that a disk or a quota is full."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            return True
        # PyTorch's writer reports a short write by the position it did not reach.
        if "inline_container" in str(error) and "unexpected pos" in str(error):
            return True
        # Errors that crossed a process may have lost their type but keep the system's words.
        if os.strerror(errno.ENOSPC) in str(error):
            return True
        error = error.__cause__ or error.__context__
    return False


def _bytes(checkpoint: Checkpoint) -> int:
    """Return the size of a checkpoint, 0 when its marker is damaged."""
    try:
        return sum(checkpoint.files().values())
    except CheckpointError:
        return 0


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: damaged ({error}); use another checkpoint") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: damaged (no JSON object); use another checkpoint")
    return value


def _sync_tree(folder: Path) -> dict[str, dict[str, Any]]:
    """Flush every file to the disk; return relative path -> ``bytes`` and ``sha256``."""
    found = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
            found[path.relative_to(folder).as_posix()] = {"bytes": path.stat().st_size, "sha256": file_sha256(path)}
    return found


def _index_record(state: TrainerState, checkpoint: Checkpoint) -> dict[str, Any]:
    return {
        "step": state.step,
        "path": checkpoint.path.name,
        "score": state.score,
        "best": state.best_step == state.step,
        "export": checkpoint.export is not None,
        "bytes": sum(checkpoint.files().values()),
    }
