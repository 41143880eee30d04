"""The whole job around the trainer: world, index, retrieval service, training or evaluation, end of the service.

``train_ppo.sh`` and ``eval.sh`` set up the environment and run this with their arguments:

    bash train_ppo.sh [--check] [--config-name NAME] key.path=value ...   (python scripts/job.py train ...)
    bash eval.sh model.path=FOLDER [--config-name NAME] key.path=value ...   (python scripts/job.py eval ...)

The last line printed is the path of the run's ``summary.json``. Exit status: 0, or 2 for a mistake of the user, else
that of the trainer. The service is stopped whatever happens.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from job_nodes import NodesOfJob, own_address, requeue, slurm_nodes
from job_service import PortTakenError, RetrievalService, Url, child, choose_url

from verl.config import RunConfig, load_config
from verl.errors import ChatR1Error, ConfigError, DataError, ResourceError

ROOT = Path(__file__).resolve().parents[1]
DEFAULT_RECIPE = "tiny_ppo"
STOPPING = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
PROGRAMS = {"train": "verl.trainer.main_ppo", "eval": "verl.trainer.main_eval"}


@dataclass
class Request:
    """What the command line asks for."""

    command: str
    recipe: str = DEFAULT_RECIPE
    check: bool = False
    overrides: list[str] = field(default_factory=list)
    stopped_by: int | None = None
    """The signal that ended the trainer."""

    def sets(self, key: str) -> bool:
        """True when the command line gives ``key`` a value."""
        return any(text.lstrip("+").partition("=")[0] == key for text in self.overrides)


def parse(arguments: Sequence[str]) -> Request:
    """Read the command line; raises SystemExit with the usage for what it does not know."""
    if {"-h", "--help"} & set(arguments):
        sys.stdout.write(__doc__ or "")
        raise SystemExit(0)
    if not arguments or arguments[0] not in PROGRAMS:
        raise _usage(f"the first word must be one of: {', '.join(PROGRAMS)}")
    request, rest = Request(arguments[0]), list(arguments[1:])
    while rest:
        word = rest.pop(0)
        if word == "--check":
            request.check = True
        elif word == "--config-name" and rest:
            request.recipe = rest.pop(0)
        elif word.startswith("--config-name="):
            request.recipe = word.partition("=")[2]
        elif word.startswith("-"):
            raise _usage(f"unknown option {word}")
        else:
            request.overrides.append(word)
    if request.command == "eval":
        _as_evaluation(request)
    return request


def _usage(mistake: str) -> SystemExit:
    """Say what was wrong and how it is meant; the status is that of a mistake of the user."""
    sys.stderr.write(f"error: {mistake}\n{__doc__}")
    return SystemExit(2)


def _as_evaluation(request: Request) -> None:
    """``model.path`` is short for the policy's path; an evaluation is a run of its own beside the training runs."""
    request.overrides = [
        f"actor_rollout_ref.{text.lstrip('+')}" if text.lstrip("+").startswith("model.path=") else text
        for text in request.overrides
    ]
    defaults = {
        "trainer.val_only": "true",
        "trainer.resume": "never",
        "trainer.default_local_dir": "runs/eval",
        "trainer.experiment_name": "eval",
        "save_val": "true",
        "job.evaluate_bounds": "false",
    }
    request.overrides += [f"{key}={value}" for key, value in defaults.items() if not request.sets(key)]


# ---------------------------------------------------------------------------------------------------------------
# Phases


class Phases:
    """Wall seconds of what happens around the trainer, said as it happens."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        started = os.environ.get("CHATR1_STARTED")
        self.begin = float(started) if started else time.time()
        if started:
            self.seconds["setup"] = round(time.time() - self.begin, 1)

    @contextmanager
    def phase(self, name: str, message: str) -> Iterator[None]:
        """Time a phase."""
        say(message)
        start = time.time()
        try:
            yield
        finally:
            self.seconds[name] = round(time.time() - start, 1)


def say(message: str) -> None:
    """Tell the user what happens now."""
    print(f"chatr1: {message}", flush=True)


def check_files(config: RunConfig) -> None:
    """Refuse missing files by key and path before anything is built; raises DataError."""
    wanted = [("data.val_files", path) for path in config.data.val_files]
    if not config.trainer.val_only:
        wanted += [("data.train_files", path) for path in config.data.train_files]
    if config.job.serve_retrieval and config.job.corpus_path is not None:
        wanted.append(("job.corpus_path", config.job.corpus_path))
    missing = [f"{key}: there is no file {path}" for key, path in wanted if not Path(path).exists()]
    if missing:
        raise DataError("\n".join([*missing, "set these keys to existing files: KEY=PATH on the command line"]))


def build_world(config: RunConfig) -> None:
    """Write the world into the folder of ``job.corpus_path``; files with the same bytes are left alone."""
    assert config.job.corpus_path is not None
    folder = Path(config.job.corpus_path).parent
    scratch = folder.with_name(f"{folder.name}.tmp{os.getpid()}")
    try:
        _run([str(ROOT / "scripts" / "build_world.py"), "--out", str(scratch), "--seed", str(config.job.world_seed)])
        folder.mkdir(parents=True, exist_ok=True)
        for file in sorted(scratch.iterdir()):
            target = folder / file.name
            if not target.exists() or target.read_bytes() != file.read_bytes():
                file.replace(target)
    finally:
        if scratch.exists():
            for file in scratch.iterdir():
                file.unlink()
            scratch.rmdir()


def index_folder(config: RunConfig) -> Path:
    """Return where the index lies: ``job.index_path``, or a folder of the cache named by the passages."""
    if config.job.index_path is not None:
        return Path(config.job.index_path)
    assert config.job.corpus_path is not None
    corpus = Path(config.job.corpus_path).resolve()
    return Path(config.job.cache_dir) / "indexes" / f"{corpus.parent.name}-{corpus.stem}"


def build_index(config: RunConfig) -> None:
    """Build the index unless the very same one exists (the builder compares its manifest)."""
    folder = index_folder(config)
    if not folder.exists() or config.job.index_path is None or config.job.build_world:
        command = ["-m", "retrieval_server.build_index", "--retrieval_method", "bm25"]
        _run([*command, "--corpus_path", str(config.job.corpus_path), "--save_dir", str(folder)])


def prepare_model(config: RunConfig) -> None:
    """Convert the packaged model that the recipe names; returns at once when that was done."""
    script = ROOT / "scripts" / f"prepare_{config.job.prepare_model}.py"
    _run([str(script), "--output", config.actor_rollout_ref.model.path])


def _run(arguments: Sequence[str]) -> None:
    """Run a helper program of the repository quietly; raises ResourceError with what it said when it fails."""
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, env=environment(), check=False)
    if done.returncode != 0:
        said = (done.stderr.strip() or done.stdout.strip()).splitlines()[-15:]
        raise ResourceError(f"{' '.join(arguments[:2])} failed with status {done.returncode}:\n" + "\n".join(said))


def environment() -> dict[str, str]:
    """Return the environment of child processes: this checkout first on the path, unbuffered output."""
    path = os.pathsep.join(part for part in (str(ROOT), os.environ.get("PYTHONPATH")) if part)
    return {**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}


# ---------------------------------------------------------------------------------------------------------------
# The trainer


def start_service(config: RunConfig, url: Url) -> RetrievalService:
    """Start the service of the job's index and return it, ready."""
    service = RetrievalService(
        url, index_folder(config), Path(str(config.job.corpus_path)), config.task_config.retriever.topk,
        log=Path(config.job.cache_dir) / "logs" / f"retrieval-{url.port}.log", env=environment(),
    )  # fmt: skip
    try:
        service.start(config.task_config.retriever.start_timeout_s)
    except PortTakenError:
        service.stop()
        if url.explicit:
            raise
        url.reserve()  # two jobs chose the same free port: the other one has it now
        return start_service(config, url)
    except BaseException:
        service.stop()
        raise
    say(f"the retrieval service listens on port {url.port}")
    return service


def run_trainer(request: Request, service: RetrievalService | None, nodes: NodesOfJob | None = None) -> tuple[int, str]:
    """Run the trainer to its end; SIGTERM, SIGINT and SIGUSR1 reach it as SIGTERM, so that it can save.

    Returns its status and what it wrote on standard output; progress goes to standard error, which it shares with us.
    """
    command = [sys.executable, "-m", PROGRAMS[request.command], "--config-name", request.recipe, *request.overrides]
    # Its own process group: Ctrl-C reaches it once, through us, and its workers not at all.
    env = environment() if nodes is None else nodes.env | {"RAY_ADDRESS": nodes.ray_address}
    trainer = child(command, env=env, stdout=subprocess.PIPE, start_new_session=True)
    asked: list[int] = []

    def forward(number: int, _: object) -> None:
        asked.append(number)
        request.stopped_by = asked[0]
        if trainer.poll() is None:
            # A second request means it: the trainer's first answer is to save and end.
            trainer.send_signal(signal.SIGTERM if len(asked) == 1 else signal.SIGKILL)

    before = {number: signal.signal(number, forward) for number in STOPPING}
    try:
        while True:
            try:
                written, _ = trainer.communicate(timeout=2.0)
                return trainer.returncode, written.decode("utf-8", "replace")
            except subprocess.TimeoutExpired:
                pass
            if service is not None and (reason := service.death()) is not None and not asked:
                say(f"the retrieval service ended during the run: {reason}")
                say("stopping the trainer; start the same command again to go on from the last checkpoint")
                forward(signal.SIGTERM, None)
    finally:
        if trainer.poll() is None:
            trainer.terminate()
            trainer.wait()
        for number, handler in before.items():
            signal.signal(number, handler)


def finish(summary: Path, phases: Phases) -> None:
    """Add the seconds around the trainer to the summary and print times and the path, the path last."""
    record = json.loads(summary.read_text(encoding="utf-8"))
    around = {name: seconds for name, seconds in phases.seconds.items() if name != "trainer"}
    record["wall_seconds"] = around | record["wall_seconds"]
    record["job_wall_seconds"] = round(time.time() - phases.begin, 1)
    scratch = summary.with_suffix(".tmp")
    scratch.write_text(json.dumps(record, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    scratch.replace(summary)
    told = ", ".join(f"{name} {seconds:.0f} s" for name, seconds in phases.seconds.items())
    say(f"done in {record['job_wall_seconds'] / 60:.1f} min ({told}); {record['cpu_minutes']:.1f} CPU minutes")
    print(summary.resolve(), flush=True)


# ---------------------------------------------------------------------------------------------------------------


def job(request: Request) -> int:
    """Run every phase; raises ChatR1Error for what the user can mend."""
    config = load_config(request.recipe, request.overrides)
    if request.check:
        command = [sys.executable, "-m", PROGRAMS[request.command], "--check", "--config-name", request.recipe]
        return subprocess.run([*command, *request.overrides], env=environment(), check=False).returncode
    phases = Phases()
    say(f"recipe {request.recipe}, runs under {config.trainer.default_local_dir}")
    url = choose_url(config.task_config.retriever.url, explicit=request.sets("retriever.url"))
    served_here = config.job.serve_retrieval and url.is_local
    names = slurm_nodes(config, os.environ)
    address = own_address(config.cluster.interface) if names else None
    if address is not None and url.is_local:
        if request.sets("retriever.url") or not served_here:
            raise ConfigError(
                f"retriever.url = {url.text} means another machine on each of the {len(names)} nodes: name the host of "
                "the service, or of its proxy"
            )
        url.host = address
    if served_here:
        url.reserve()
    if config.job.build_world:
        with phases.phase("world", f"building the world of seed {config.job.world_seed}"):
            build_world(config)
    check_files(config)
    if config.job.prepare_model is not None:
        with phases.phase("model", f"preparing the model in {config.actor_rollout_ref.model.path}"):
            prepare_model(config)
    service, nodes = None, None
    try:
        if address is not None:
            nodes = NodesOfJob(names, config, Path(config.job.cache_dir) / "logs", environment(), address)
            with phases.phase("nodes", f"starting Ray on {', '.join(names)}"):
                nodes.start()
        if served_here:
            with phases.phase("index", f"index of {config.job.corpus_path} in {index_folder(config)}"):
                build_index(config)
            with phases.phase("service", "starting the retrieval service"):
                service = start_service(config, url)
            if not request.sets("retriever.url"):
                request.overrides.append(f"retriever.url={url.text}")
        elif config.job.serve_retrieval:
            say(f"using the retrieval service at {url.text}")
        with phases.phase("trainer", f"running {PROGRAMS[request.command]}"):
            status, written = run_trainer(request, service, nodes)
    finally:
        if nodes is not None:
            nodes.stop()
            say("Ray has stopped on all nodes")
        if service is not None:
            service.stop()
            say("the retrieval service has stopped")
    if status != 0:
        then = "mend what it says above and start again" if status == 2 else "the same command goes on where it stopped"
        say(f"{PROGRAMS[request.command]} ended with status {status}; {then}")
        if request.stopped_by == signal.SIGUSR1 and requeue(os.environ):
            say("the job is back in the queue and goes on from its checkpoint")
        return status if status > 0 else 128 - status
    *lines, path = written.strip().splitlines() or [""]
    summary = Path(path)
    if summary.name != "summary.json" or not summary.is_file():
        raise ChatR1Error(f"{PROGRAMS[request.command]} ended well but named no summary.json; it wrote: {written!r}")
    if lines:
        say("\n".join(lines))
    finish(summary, phases)
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit status."""
    request = parse(sys.argv[1:] if arguments is None else arguments)
    # A signal before the trainer runs unwinds like Ctrl-C, so that the service is stopped.
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    try:
        return job(request)
    except ChatR1Error as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return 2
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
