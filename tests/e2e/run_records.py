"""Arguments of toy runs, and what runs wrote, in a form that can be compared."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

#: Figures that depend on the clock, on the machine or on how often a run was interrupted; nothing else may differ.
VOLATILE = (
    "timing_s/",
    "cpu_s/",
    "throughput/",
    "progress/",
    "memory/",
    "rollout/decode_s",
    "rollout/prefill_s",
    "rollout/episodes_per_s",
    "rollout/model_tokens_per_s",
    "rollout/engine_busy",
    "rollout/in_flight",
    "rollout/search_wait_s",
    "rollout/episode_s/",
    "episode/search_seconds",
)


def toy_run(model: Path) -> list[str]:
    """Return the arguments of ``toy.yaml`` on a model."""
    return ["--config-name", str(Path(__file__).with_name("toy.yaml")), f"actor_rollout_ref.model.path={model}"]


def figures(folder: Path) -> list[dict[str, Any]]:
    """Return the rows of ``metrics.jsonl`` without what the clock decides."""
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [
        {name: value for name, value in json.loads(line).items() if not name.startswith(VOLATILE)} for line in lines
    ]
