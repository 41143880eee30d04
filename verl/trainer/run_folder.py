"""Which folder a run lives in, whether it goes on or begins, and what has to be cut back before it goes on.

``<base>``, ``<base>-2``, ``<base>-3`` ... are the runs of one ``trainer.default_local_dir``. A run is finished when its
``summary.json`` exists. See ``open_run`` for the rules of ``trainer.resume``.
"""

from __future__ import annotations

import fcntl
import fnmatch
import hashlib
import json
import os
import re
import tempfile
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from verl.errors import CheckpointError, ConfigError, ResourceError
from verl.tracking import MetricsFile, write_atomically
from verl.trainer.checkpoint import Checkpoint, CheckpointStore

SUMMARY = "summary.json"
_IDENTITY = "run.json"

#: Patterns of keys that may differ when a run goes on; all others are frozen. The data behind paths is checked apart.
FREE_KEYS: tuple[str, ...] = (
    # length, and how often something is written or shown
    "trainer.total_training_steps", "trainer.total_epochs", "trainer.save_freq", "trainer.test_freq",
    "trainer.keep_checkpoints", "trainer.export_every", "trainer.resume", "trainer.logger", "trainer.project_name",
    "trainer.experiment_name", "trainer.val_before_train", "save_val", "save_val_dir", "health.*",
    # paths and addresses
    "trainer.default_local_dir", "data.train_files", "data.val_files", "actor_rollout_ref.model.path",
    "critic.model.path", "job.*", "*.url", "*.api_key_env", "*.timeout_s", "*.retries", "*.backoff_s",
    # what evaluations measure beside, and how a judge is reached and paid; its model and prompt are part of the reward
    "evaluation.*", "judge.cache_path", "judge.max_concurrent", "judge.input_price", "judge.output_price",
    # where the work is done: a checkpoint loads at any world size
    "cluster.*", "trainer.nnodes", "trainer.n_gpus_per_node", "actor_rollout_ref.rollout.n_workers",
    "actor_rollout_ref.rollout.n_gpus", "actor_rollout_ref.rollout.placement",
    "actor_rollout_ref.rollout.max_failure_rate", "actor_rollout_ref.rollout.episode_timeout_s",
)  # fmt: skip


@dataclass(frozen=True)
class RunFolder:
    """An opened, locked run folder."""

    path: Path
    run_id: str
    restored: Checkpoint | None
    """Where the run goes on; None when it begins at step 0."""
    lock: IO[str]
    """Held as long as the process lives; the system frees it, also after a kill."""

    @property
    def step(self) -> int:
        """Last step that is done."""
        return self.restored.step if self.restored is not None else 0


def open_run(
    base: Path,
    resume: str,
    config: Mapping[str, Any],
    keep: int,
    check: Callable[[Checkpoint], None] = lambda checkpoint: None,
) -> RunFolder:
    """Choose, lock and prepare the folder of a run.

    ``auto``: the newest run of ``base`` goes on from its newest complete checkpoint when it is unfinished (from step 0
    when it has none); beside a finished one a new numbered folder begins. ``never``: a new folder begins in any case.
    A path (a run folder, or one of its ``global_step_N``) goes on there, also when that run was finished.

    ``config`` is the resolved flat configuration; ``check`` may refuse the checkpoint. What is later than the
    checkpoint is removed only when nothing has refused it. Raises ConfigError listing the frozen keys that differ,
    CheckpointError for a path that holds no checkpoint, ResourceError when another process runs in the folder.
    """
    path, restored = _choose(base, resume, keep)
    path.mkdir(parents=True, exist_ok=True)
    lock = _lock(path)
    try:
        if restored is not None:
            _check_frozen(path, restored, config)
            check(restored)
        run_id = _identity(path)
        _cut_back(path, restored.step if restored is not None else None, keep)
        write_atomically(path / "config.json", json.dumps(dict(config), indent=1, sort_keys=True))
        return RunFolder(path, run_id, restored, lock)
    except BaseException:
        lock.close()
        raise


def config_hash(config: Mapping[str, Any]) -> str:
    """Return a hash of the frozen keys of a flat configuration."""
    frozen = {key: value for key, value in config.items() if not _is_free(key)}
    return hashlib.sha256(json.dumps(frozen, sort_keys=True).encode()).hexdigest()[:16]


def _choose(base: Path, resume: str, keep: int) -> tuple[Path, Checkpoint | None]:
    if resume not in ("auto", "never"):
        return _named(Path(resume), keep)
    runs = _numbered(base)
    if not runs:
        return base, None
    newest_number, newest = runs[-1]
    if resume == "auto" and not (newest / SUMMARY).exists():
        store = CheckpointStore(newest, keep)
        restored = store.newest()
        if restored is None and store.complete():
            raise CheckpointError(
                f"{newest}: every checkpoint of this unfinished run is damaged (see the warnings above); "
                "trainer.resume=never begins a new run beside it"
            )
        return newest, restored
    return base.with_name(f"{base.name}-{newest_number + 1}"), None


def _named(path: Path, keep: int) -> tuple[Path, Checkpoint | None]:
    """Resolve ``trainer.resume=PATH``."""
    match = re.fullmatch(r"global_step_(\d+)", path.name)
    if match is not None:
        folder, checkpoint = path.parent, CheckpointStore(path.parent, keep).at(int(match[1]))
        checkpoint.verify()
        return folder, checkpoint
    newest = CheckpointStore(path, keep).newest()
    if newest is None:
        raise CheckpointError(
            f"trainer.resume={path}: neither a global_step_N folder nor a run folder with a complete checkpoint"
        )
    return path, newest


def _numbered(base: Path) -> list[tuple[int, Path]]:
    """Return the runs of a base folder as (number, path), oldest first. A folder counts once it has an identity."""
    runs = [(1, base)] if (base / _IDENTITY).exists() else []
    for path in base.parent.glob(f"{base.name}-*"):
        number = path.name.removeprefix(f"{base.name}-")
        if number.isdigit() and (path / _IDENTITY).exists():
            runs.append((int(number), path))
    return sorted(runs)


def _lock(path: Path) -> IO[str]:
    lock = (path / "run.lock").open("a", encoding="utf-8")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        lock.close()
        raise ResourceError(
            f"{path}: another process is running in this folder; wait for it, stop it, or choose another "
            "trainer.default_local_dir"
        ) from error
    return lock


def _identity(path: Path) -> str:
    """Return the run's id, kept over resumes."""
    source = path / _IDENTITY
    if not source.exists():
        write_atomically(source, json.dumps({"run_id": uuid.uuid4().hex[:12]}))
    run_id = _read_object(source).get("run_id")
    if not isinstance(run_id, str):
        raise _damaged(source, "no run_id")
    return run_id


def _read_object(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise _damaged(path, str(error)) from error
    if not isinstance(value, dict):
        raise _damaged(path, "no JSON object")
    return value


def _damaged(path: Path, reason: str) -> CheckpointError:
    return CheckpointError(
        f"{path}: damaged ({reason}); restore it, or begin a new run with another trainer.default_local_dir"
    )


def _is_free(key: str) -> bool:
    return any(fnmatch.fnmatchcase(key, pattern) for pattern in FREE_KEYS)


def _check_frozen(path: Path, restored: Checkpoint, config: Mapping[str, Any]) -> None:
    before = _read_object(path / "config.json")
    now = json.loads(json.dumps(dict(config)))  # tuples become lists, as in the file
    changed = [
        f"  {key}: {before.get(key, '(absent)')!r} in the run, {now.get(key, '(absent)')!r} now"
        for key in sorted(set(before) | set(now))
        if not _is_free(key) and before.get(key) != now.get(key)
    ]
    if changed:
        raise ConfigError(
            f"{path} has an unfinished run at step {restored.step} with another configuration:\n"
            + "\n".join(changed)
            + "\nGive the old values to go on, trainer.resume=never to begin a new run beside it, or another "
            "trainer.default_local_dir"
        )


def _cut_back(path: Path, step: int | None, keep: int) -> None:
    """Remove what is later than the restored step (None: everything) from the run's records."""
    last = -1 if step is None else step
    (path / SUMMARY).unlink(missing_ok=True)
    MetricsFile(path / "metrics.jsonl").cut_back(last)
    CheckpointStore(path, keep).cut_back(last)
    for folder in (path / "rollouts", *(path / "eval").glob("*")):
        remove_later(folder, last)


def remove_later(folder: Path, step: int) -> None:
    """Remove the files ``*step_<N>.*`` of a folder with N above ``step``, and half-written ones."""
    for file in sorted(folder.glob("*")):
        match = re.search(r"step_(\d+)\.", file.name)
        if file.suffix == ".tmp" or (match is not None and int(match[1]) > step):
            file.unlink()


def write_records(path: Path, records: Sequence[Mapping[str, Any]]) -> None:
    """Write a JSONL file atomically."""
    write_atomically(path, "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records))


def check_writable(path: Path, key: str) -> None:
    """Raise ResourceError naming ``key`` when nothing can be written into the folder; leaves nothing behind."""
    try:
        existing = path
        while not existing.exists():
            existing = existing.parent
        with tempfile.TemporaryFile(dir=existing):
            pass
    except OSError as error:
        raise ResourceError(
            f"{key}={path}: cannot be written ({error.strerror}); name a folder that can be, or correct what is there"
        ) from error


def check_free_space(path: Path, need_bytes: int) -> None:
    """Raise ResourceError before anything heavy starts when not even one checkpoint would fit."""
    existing = path
    while not existing.exists():
        existing = existing.parent
    usage = os.statvfs(existing)
    free = usage.f_bavail * usage.f_frsize
    if free < need_bytes:
        raise ResourceError(
            f"{path}: {free / 2**20:.0f} MiB are free, one checkpoint needs about {need_bytes / 2**20:.0f} MiB; free "
            "space or choose another trainer.default_local_dir"
        )
