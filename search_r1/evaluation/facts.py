"""What has to be known to repeat an evaluation, collected from the configuration, the files and the service."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from search_r1.config import SearchConfig
from search_r1.judge.prompts import JUDGE_PROMPTS
from verl.identity import file_sha256, model_fingerprint


def data_facts(files: Sequence[Path], subset: int | None, episodes: int) -> dict[str, Any]:
    """Return the files with their hashes, the size of the random subset (always the same one), and the episodes."""
    chosen = "all rows" if subset is None else f"data.val_data_num={subset}, the seeded subset"
    return {
        "rows": chosen,
        "episodes": episodes,
        "files": {str(path): f"sha256 {file_sha256(path)}" for path in files if path.is_file()},
    }


def retrieval_facts(config: SearchConfig, info: Any) -> dict[str, Any]:
    """Return address, depth, and what the service says of itself (``/info``): corpus, backend, manifest."""
    if not config.do_search:
        return {"search": "off"}
    facts: dict[str, Any] = {"url": config.retriever.url, "topk": config.retriever.topk}
    if not isinstance(info, Mapping):
        return {**facts, "corpus": None, "retriever": None}
    manifest: Mapping[str, Any] = info["manifest"] if isinstance(info.get("manifest"), Mapping) else {}
    corpus = info.get("corpus") or manifest.get("corpus")
    rest = {name: value for name, value in info.items() if name not in ("manifest", "corpus", "limits")}
    # The hashes of an index's files follow from corpus, parameters and versions.
    index = {name: value for name, value in manifest.items() if name not in ("corpus", "files")}
    return {**facts, "corpus": corpus, "retriever": rest, "index": index}


def scoring_facts(config: SearchConfig) -> dict[str, Any]:
    """Return how answers were scored."""
    facts: dict[str, Any] = {
        "normaliser": config.reward_model.normaliser,
        "f1": "multiset, best reference",
        "intervals": "bootstrap over questions, percentile, 2000 resamples, seed 0",
    }
    evaluation, judge = config.evaluation, config.judge
    if evaluation.bertscore_model is not None:
        folder = Path(evaluation.bertscore_model)
        facts["bertscore"] = {
            "encoder": str(folder),
            "layer": evaluation.bertscore_layer or "last",
            "weights": model_fingerprint(folder),
        }
    if evaluation.judge:
        template = JUDGE_PROMPTS[judge.prompt].template
        facts["judge"] = {
            "model": judge.model,
            "url": judge.url,
            "prompt": judge.prompt,
            "prompt_sha256": hashlib.sha256(template.encode()).hexdigest(),
        }
    return facts
