"""The exactness audit: four template families pass it, and every kind of damage is found."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from model_families import CHATML, FAMILIES, make_family
from rollout_models import id_of
from test_exactness import TURNS

from search_r1.codec import Codec
from search_r1.template_check import check_template
from verl.data.samples import assemble
from verl.errors import ModelError
from verl.trainer.audit import Gap, check_gaps, check_round_trip, check_tokens, measure_gaps
from verl.trainer.main_audit import main
from verl.types import Completion, Level, Origin, Reward, Segment, StopReason, Trajectory
from verl.workers.models import load_tokenizer
from verl.workers.rollout.recording import Generation

Audit = Callable[..., tuple[int, dict[str, Any], str]]
HEADER_ONCE = CHATML.replace("if add_generation_prompt", "if add_generation_prompt and messages | length == 1")


@pytest.fixture
def audit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Audit:
    """Run ``main_audit`` in this process on a model folder: (status, audit.json, what was printed)."""
    rows = [
        {"qid": f"r{i}", "question": f"Who is {i}?", "history": ["Hi", "Yes"], "answers": ["a1"]} for i in range(12)
    ]
    data = tmp_path / "val.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))

    def call(folder: Path, *overrides: str) -> tuple[int, dict[str, Any], str]:
        status = main(
            [
                "task=rollout_tasks:OfflineSearchTask",
                f"data.val_files={data}",
                "data.template=compact",
                "data.max_start_length=300",
                "data.max_prompt_length=900",
                "data.max_response_length=12",
                "data.max_obs_length=90",
                "max_turns=3",
                f"actor_rollout_ref.model.path={folder}",
                "actor_rollout_ref.model.dtype=float32",
                "actor_rollout_ref.rollout.dtype=float32",
                "actor_rollout_ref.rollout.max_num_seqs=24",
                "cluster.kind=local",
                "trainer.n_gpus_per_node=1",
                f"trainer.default_local_dir={tmp_path / 'run'}",
                "audit.episodes=24",
                *overrides,
            ]
        )
        printed = capsys.readouterr()
        path = tmp_path / "run" / "audit.json"
        assert path.exists(), printed.err
        return status, json.loads(path.read_text()), printed.out

    return call


def levels(record: dict[str, Any]) -> dict[str, str]:
    return {finding["check"]: finding["level"] for finding in record["findings"]}


EXPECTED_NOTES = {
    "Qwen2.5": set(),
    "Qwen3": {"native thinking"},
    "Llama-3.2": {"white space", "date"},
    "SmolLM2": set(),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_is_exact_and_its_habits_are_named(audit: Audit, tmp_path: Path, family: str) -> None:
    status, record, printed = audit(make_family(tmp_path / "model", family, TURNS))
    assert status == 0 and record["exact"] and "verdict: exact" in printed
    found = levels(record)
    # A random model's text hardly ever survives being encoded again: exactly what carrying ids is for.
    assert {name for name, level in found.items() if level == "note"} - {"round trip"} == EXPECTED_NOTES[family]
    assert {"context", "trained ids", "mask", "log-probs", "turn end", "generation prompt", "hint"} <= set(found)
    gaps = record["gaps"]
    assert gaps["whole"]["largest"] < 1e-4 and gaps["whole"]["tokens"] > 200
    assert len(gaps["by_turn"]) > 1
    assert ("tags are single tokens" in printed) == (family == "Qwen3")
    assert sum(gap["tokens"] for gap in gaps["by_turn"].values()) == gaps["whole"]["tokens"]
    assert sum(gap["tokens"] for gap in gaps["by_position"].values()) == gaps["whole"]["tokens"]


def test_thinking_can_be_forbidden_where_the_template_can(audit: Audit, tmp_path: Path) -> None:
    folder = make_family(tmp_path / "model", "Qwen3", TURNS)
    status, record, printed = audit(folder, "data.native_thinking=forbid")
    assert status == 0
    assert levels(record)["native thinking"] == "ok" and "forbid" in printed
    # Once there is a reply the template leaves its closed block out, which episodes keep.
    assert levels(record)["append-only"] == "note"
    tokenizer = load_tokenizer(str(folder))
    prompt = Codec(tokenizer, "forbid").encode_messages([{"role": "user", "content": "Hi"}])
    assert tokenizer.decode(list(prompt)).endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")
    other = load_tokenizer(str(make_family(tmp_path / "other", "Qwen2.5")))
    with pytest.raises(ModelError, match=r"data\.native_thinking=forbid: .* no switch"):
        Codec(other, "forbid")


def test_a_template_that_forgets_the_header_is_caught(audit: Audit, tmp_path: Path) -> None:
    status, record, printed = audit(make_family(tmp_path / "model", "SmolLM2", TURNS, HEADER_ONCE))
    assert status == 1 and not record["exact"]
    assert levels(record)["generation prompt"] == "fail"
    assert "verdict: NOT exact" in printed and "whenever add_generation_prompt is set" in printed


def test_an_engine_in_lower_precision_is_measured_and_judged_by_its_limits(audit: Audit, tmp_path: Path) -> None:
    folder = make_family(tmp_path / "model", "SmolLM2", TURNS)
    low = "actor_rollout_ref.rollout.dtype=bfloat16"
    status, record, _ = audit(folder, low)
    assert status == 0 and record["gaps"]["whole"]["largest"] > 1e-4, "one token may be off by anything in bfloat16"
    status, record, printed = audit(folder, low, "audit.max_gap=1e-6")
    assert status == 1 and levels(record)["log-probs"] == "fail" and levels(record)["trained ids"] == "ok"
    assert "verdict: NOT exact" in printed and "worst on average in turn" in printed


@pytest.mark.parametrize(
    ("template", "check"),
    [
        (CHATML.replace("<|im_end|>\n{% endfor", "\n{% endfor"), "turn end"),
        (CHATML.replace("im_start", "begin_turn"), "turn markers"),
        ("{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% endif %}{% endfor %}", "turns kept"),
        (HEADER_ONCE, "generation prompt"),
    ],
)
def test_a_broken_template_fails_its_check_and_no_other(tmp_path: Path, template: str, check: str) -> None:
    tokenizer = load_tokenizer(str(make_family(tmp_path / "model", "SmolLM2", (), template)))
    findings = check_template(Codec(tokenizer), tokenizer)
    assert [finding.check for finding in findings if finding.level is Level.FAIL] == [check]
    assert all(finding.remedy for finding in findings if finding.level is Level.FAIL)


def test_a_tokenizer_that_tidies_text_up_is_caught(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(str(make_family(tmp_path / "model", "SmolLM2")))

    class Tidy:
        def __getattr__(self, name: str) -> Any:
            return getattr(tokenizer, name)

        def decode(self, token_ids: Any, skip_special_tokens: bool = False) -> str:
            return str(tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)).replace(" ,", ",")

    findings = check_template(Codec(Tidy()), Tidy())
    assert [finding.check for finding in findings if finding.level is Level.FAIL] == ["decoding"]


# -- damage between engine and loss ------------------------------------------------------------------------------


def episode() -> tuple[Trajectory, dict[str, tuple[Generation, ...]]]:
    """Prompt 7 8, sampled 1 2 (log-probs -1 -2), observation 9, sampled 3 (-3); a fourth token was cut away."""
    segments = (
        Segment(Origin.PROMPT, (7, 8)),
        Segment(Origin.MODEL, (1, 2), (-1.0, -2.0), 0),
        Segment(Origin.ENV, (9,)),
        Segment(Origin.MODEL, (3,), (-3.0,), 0),
    )
    trajectory = Trajectory("p#0", "p", segments, StopReason.ANSWERED, reward=Reward(1.0))
    first = Generation((7, 8), Completion((1, 2), (-1.0, -2.0), "stop", 0))
    second = Generation((7, 8, 1, 2, 9), Completion((3, 4), (-3.0, -4.0), "stop", 0))
    return trajectory, {"p#0": (first, second)}


def failed(trajectory: Trajectory, recordings: Any, **changes: Any) -> dict[str, str]:
    (sample,) = assemble([trajectory]).samples
    findings = check_tokens([trajectory], recordings, [replace(sample, **changes)])
    return {finding.check: finding.detail for finding in findings if finding.level is Level.FAIL}


def test_an_exact_episode_passes_and_its_overrun_is_counted() -> None:
    trajectory, recordings = episode()
    findings = check_tokens([trajectory], recordings, assemble([trajectory]).samples)
    assert [finding.level for finding in findings] == [Level.OK, Level.OK, Level.OK, Level.NOTE]
    assert findings[3].detail.startswith("1 tokens of 2 generations")


def test_every_damage_is_found_where_it_is() -> None:
    trajectory, recordings = episode()
    # The observation was encoded again: the second turn saw another token than is trained on.
    assert failed(trajectory, recordings, token_ids=(7, 8, 1, 2, 10, 3)) == {
        "context": "1 of 1 episodes do not hold: every generation continued exactly the tokens that stand before it in "
        "its sample; first: p#0: turn 1 saw another token at position 4 than is trained on"
    }
    # Model text was encoded again.
    assert (
        "turn 0, token 1: trained (5,), sampled (2,)"
        in failed(trajectory, recordings, token_ids=(7, 8, 1, 5, 9, 3))["trained ids"]
    )
    # The mask moved by one.
    shifted = failed(trajectory, recordings, loss_mask=(False, True, True, False, False, True))
    assert set(shifted) == {"mask"} and "position 1" in shifted["mask"]
    # A generation went missing.
    assert "1 generations became 2 turns" in failed(trajectory, {"p#0": recordings["p#0"][:1]})["trained ids"]


def test_gaps_are_those_computed_by_hand() -> None:
    trajectory, _ = episode()
    (sample,) = assemble([trajectory]).samples
    sample = replace(sample, old_logprobs=(0.0, 0.0, -1.1, -2.0, 0.0, -2.8))
    gaps = measure_gaps([trajectory], [sample])
    assert gaps.whole.tokens == 3 and gaps.whole.largest == pytest.approx(0.2)
    assert gaps.whole.mean == pytest.approx(0.1) and gaps.whole.k1 == pytest.approx((0.1 - 0.2) / 3)
    k3 = (math.exp(-0.1) - 1 + 0.1 + math.exp(0.2) - 1 - 0.2) / 3
    assert gaps.whole.k3 == pytest.approx(k3)
    assert {name: gap.tokens for name, gap in gaps.by_turn.items()} == {"0": 2, "1": 1}
    assert gaps.by_turn["1"].k1 == pytest.approx(-0.2)
    assert {name: gap.tokens for name, gap in gaps.by_position.items()} == {"0": 2, "1-7": 1}
    assert gaps.largest_ratio == pytest.approx(0.1)
    assert check_gaps(gaps, 0.3, 0.11).level is Level.OK
    assert check_gaps(gaps, 0.19, 0.11).level is Level.FAIL
    assert check_gaps(gaps, math.inf, 0.09).detail.endswith("worst on average in turn 1")
    assert Gap.of(np.array([]), np.array([])).tokens == 0


def test_text_that_would_be_cut_otherwise_is_shown(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(str(make_family(tmp_path / "model", "SmolLM2", TURNS)))
    # The tokenizer has no merges: it spells the tag, while the model can sample it whole.
    spelled, whole = tokenizer.encode("<search>", add_special_tokens=False), [id_of(tokenizer, "<search>")]

    def turn(ids: list[int]) -> Trajectory:
        segments = (Segment(Origin.PROMPT, (5,)), Segment(Origin.MODEL, tuple(ids), (-1.0,) * len(ids), 0))
        return Trajectory("p#0", "p", segments, StopReason.ANSWERED)

    assert check_round_trip([turn(spelled)], tokenizer).level is Level.OK
    finding = check_round_trip([turn(spelled), turn(whole)], tokenizer)
    assert finding.level is Level.NOTE and finding.detail.startswith("1 of 2 turns")
    assert "sampled ['<search>'], encoded again ['<', 's', 'e']" in finding.detail
