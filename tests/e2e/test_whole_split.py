"""The real program with the shipped model: 3,610 rows at batch 256 are all scored in file order, twice the same."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from verl.trainer.main_eval import main

N = 3610


@pytest.mark.slow
def test_every_row_is_scored_by_the_real_engine_twice_the_same(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = tmp_path / "val.jsonl"
    with rows.open("w") as file:
        for number in range(N):
            record = {"qid": f"q{number}", "question": f"Where is Item {number}?", "history": [], "answers": ["there"]}
            file.write(json.dumps(record) + "\n")
    files = []
    for run in range(2):
        arguments = [
            "--config-name", "tiny_ppo", f"data.val_files={rows}", "data.val_data_num=null", "data.val_batch_size=256",
            "data.max_response_length=8", "do_search=false", "cluster.kind=local", "trainer.n_gpus_per_node=1",
            "actor_rollout_ref.rollout.n_workers=1", "actor_rollout_ref.rollout.deterministic=true",
            f"trainer.default_local_dir={tmp_path / str(run)}", "trainer.logger=[console]",
            "job.evaluate_bounds=false",
        ]  # fmt: skip
        assert main(arguments) == 0
        folder = tmp_path / str(run)
        lines = (folder / "eval/val/results_step_0.jsonl").read_text(encoding="utf-8").splitlines()
        kept = [json.loads(line) for line in lines]
        assert [row["qid"] for row in kept] == [f"q{n}" for n in range(N)]
        published = json.loads((folder / "validation_results_step0.json").read_text(encoding="utf-8"))
        assert [row["question"] for row in published] == [row["question"] for row in kept]
        names = ("eval/val/results_step_0.jsonl", "eval/val/summary_step_0.json", "validation_results_step0.json")
        files.append([(folder / name).read_bytes() for name in names])
        assert json.loads(files[-1][1])["n"] == N
    capsys.readouterr()
    assert files[0] == files[1]
