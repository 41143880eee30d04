"""Build the shipped model from nothing: tokenizer, initial weights, demonstrations and supervised stages.

    python scripts/build_tiny_model.py --out assets/tiny

Every stage is one call of ``python -m verl.trainer.main_sft`` on rows written here; all of it follows from ``--seed``.
No name of the train, dev or test split occurs in any stage. The last stage makes the *choice of query* weak on purpose
(mostly the user's words as they are, sometimes a wrong entity) and leaves reading as it is: that choice is what
reinforcement learning is to improve.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import json
import logging
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from search_r1.world.demonstrations import Demonstrator, Mixture, ModeWeights, Row
from search_r1.world.encyclopedia import build_encyclopedia
from search_r1.world.initial_weights import ModelShape, initial_weights
from search_r1.world.tokenizer import save_tokenizer, train_tokenizer

log = logging.getLogger("build_tiny_model")

VOCAB_SIZE = 1024
RECORD, TRAINING_LOG = "recipe.json", "training_log.jsonl"
SHIPPED_FILES = (
    "model.safetensors",
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
)
REPEATED_STEPS = 20
"""First steps of a stage that the log holds one by one, so that a test can repeat them."""
_LOG_EVERY = 25
_ALL = ModeWeights(0.6, 0.25, 0.15)
_POLICY = ModeWeights(0.33, 0.56, 0.11)
_ROWS_PER_WORLD = 400
_ENTITIES_PER_KIND = 60


@dataclass(frozen=True)
class Stage:
    """One supervised run: ``steps`` updates of ``batch`` fresh rows drawn from ``mixture``; ``lr`` is the peak rate."""

    name: str
    steps: int
    batch: int
    mixture: Mixture
    lr: float
    schedule: str = "constant"
    warmup: float = 0.02


# Values copied from passages come first, then the real episodes at a falling rate, then the choice of query.
RECIPE: tuple[Stage, ...] = (
    Stage("skills", 500, 12, Mixture(recall=0.15, reading=0.15, rewriting=0.45, episode=0.25), 2e-3),
    Stage("episodes", 1200, 12, Mixture(reading=0.05, rewriting=0.35, episode=0.6, modes=_ALL), 2e-3, "linear"),
    Stage("policy", 200, 12, Mixture(episode=1.0, modes=_POLICY, nothing_found=0.25), 5e-4, "linear"),
)


def stage_rows(stage: Stage, seed: int) -> Iterator[Row]:
    """The rows of one stage in training order, about a new practice encyclopedia every few hundred rows."""
    rng = random.Random(f"rows/{stage.name}/{seed}")
    n_rows = stage.steps * stage.batch
    for start in range(0, n_rows, _ROWS_PER_WORLD):
        world = build_encyclopedia("practice", _ENTITIES_PER_KIND, rng.getrandbits(32))
        demonstrator = Demonstrator(world, rng)
        for _ in range(min(_ROWS_PER_WORLD, n_rows - start)):
            yield demonstrator.row(stage.mixture)


def write_start(folder: Path, seed: int) -> None:
    """Tokenizer, config and initial weights as a Hugging Face folder."""
    from safetensors.numpy import save_file

    tokenizer = train_tokenizer(VOCAB_SIZE, seed)
    save_tokenizer(tokenizer, folder)
    shape = ModelShape(vocab_size=tokenizer.get_vocab_size())
    ids = {token: tokenizer.token_to_id(token) for token in ("<|im_end|>", "<|endoftext|>")}
    config = shape.config(eos_token_id=ids["<|im_end|>"], pad_token_id=ids["<|endoftext|>"])
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    save_file(initial_weights(shape, seed), folder / "model.safetensors", metadata={"format": "pt"})


def train(stage: Stage, start: Path, work: Path, seed: int, stop_after: int | None = None) -> Path:
    """Runs one stage from the model in ``start``; returns the folder of the trained model.

    ``stop_after`` repeats only the first steps, at the learning rates of the whole stage.
    """
    rows = work / f"{stage.name}.jsonl"
    with rows.open("w", encoding="utf-8") as file:
        for row in stage_rows(stage, seed):
            file.write(json.dumps(row) + "\n")
    settings: Mapping[str, object] = {
        "data.train_files": rows,
        "data.train_batch_size": stage.batch,
        "data.shuffle": "false",
        "model.partial_pretrain": start,
        "model.dtype": "float32",
        "optim.name": "adamw",
        "optim.lr": stage.lr,
        "optim.weight_decay": 0.0,
        "optim.warmup_style": stage.schedule,
        "optim.warmup_steps_ratio": stage.warmup,
        "trainer.default_local_dir": work / stage.name,
        "trainer.total_training_steps": stage.steps,
        "trainer.log_every_n_steps": 50,
        "trainer.seed": seed,
        "trainer.threads": 1,
    }
    arguments = [f"{key}={value}" for key, value in settings.items()]
    if stop_after is not None:
        arguments.append(f"trainer.stop_after={stop_after}")
    subprocess.run([sys.executable, "-m", "verl.trainer.main_sft", *arguments], check=True, cwd=_ROOT)
    return work / stage.name / "hf"


_ROOT = Path(__file__).resolve().parent.parent


def recipe_record(seed: int) -> dict[str, Any]:
    """Everything the weights follow from: what ``recipe_sha256`` of the card is the hash of."""
    return {
        "seed": seed,
        "vocab_size": VOCAB_SIZE,
        "rows_per_world": _ROWS_PER_WORLD,
        "entities_per_kind": _ENTITIES_PER_KIND,
        "stages": [asdict(stage) for stage in RECIPE],
    }


def recipe_sha256(seed: int) -> str:
    """Hash of the recipe in canonical JSON."""
    return hashlib.sha256(json.dumps(recipe_record(seed), sort_keys=True).encode()).hexdigest()


def export(trained: Path, tokenizer: Path, out: Path) -> None:
    """Writes the shipped folder: bfloat16 weights without the tied head, config, generation config and tokenizer."""
    import torch
    from safetensors.torch import load_file, save_file

    out.mkdir(parents=True, exist_ok=True)
    state = load_file(trained / "model.safetensors")
    state.pop("lm_head.weight", None)
    state = {name: tensor.to(torch.bfloat16).contiguous() for name, tensor in sorted(state.items())}
    save_file(state, out / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((tokenizer / "config.json").read_text(encoding="utf-8"))
    generation = {key: config[key] for key in ("eos_token_id", "pad_token_id")}
    (out / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n", encoding="utf-8")
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(tokenizer / name, out / name)


def write_record(out: Path, work: Path, seed: int) -> None:
    """Writes ``training_log.jsonl`` and ``recipe.json``: recipe and its hash, commit, versions, hashes of the files."""
    with (out / TRAINING_LOG).open("w", encoding="utf-8") as log_file:
        for stage in RECIPE:
            for line in (work / stage.name / "metrics.jsonl").read_text(encoding="utf-8").splitlines():
                row = json.loads(line)
                if row["step"] <= REPEATED_STEPS or row["step"] % _LOG_EVERY == 0:
                    entry = {"stage": stage.name, "step": row["step"], "loss": row["sft/loss"], "lr": row["sft/lr"]}
                    log_file.write(json.dumps(entry) + "\n")
    git = ["git", "-C", str(_ROOT), "rev-parse", "HEAD"]
    commit = subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip() or None
    packages = ("torch", "transformers", "tokenizers", "numpy")
    record = {
        "recipe": recipe_record(seed),
        "recipe_sha256": recipe_sha256(seed),
        "commit": commit,
        "versions": {name: importlib.metadata.version(name) for name in packages},
        "files": {name: hashlib.sha256((out / name).read_bytes()).hexdigest() for name in SHIPPED_FILES},
    }
    (out / RECORD).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


def build(out: Path, work: Path, seed: int) -> None:
    """All stages, one after the other; intermediate models stay in ``work``."""
    start = work / "start"
    write_start(start, seed)
    model = start
    for stage in RECIPE:
        began = time.perf_counter()
        model = train(stage, model, work, seed)
        log.info("stage %s: %.0f s", stage.name, time.perf_counter() - began)
    export(model, start, out)
    write_record(out, work, seed)


def main(argv: list[str] | None = None) -> int:
    """Entry point; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of the finished model")
    parser.add_argument("--work", type=Path, help="folder for rows and intermediate models (default: a temporary one)")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    if args.work is not None:
        args.work.mkdir(parents=True, exist_ok=True)
        build(args.out, args.work.resolve(), args.seed)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        build(args.out, Path(folder), args.seed)
    return 0


if __name__ == "__main__":
    sys.exit(main())
