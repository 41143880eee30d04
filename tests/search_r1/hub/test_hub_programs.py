"""The programs that fetch and publish, each as a process of its own against a hub on a local port."""

from __future__ import annotations

import hashlib
import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fake_hub import FakeHub, serve

from search_r1.datasets.load import load_rows
from search_r1.hub.conversations import split_patterns
from search_r1.hub.publish import uploads
from search_r1.hub.repository import Repository, readable
from verl.errors import DataError

ROOT = Path(__file__).resolve().parents[3]
CORPUS, INDEX = "datasets/slupart/topiocqa-collection", "datasets/slupart/topiocqa-e5-index"
CONVERSATIONS = "datasets/slupart/chatr1-convqa-all"
PARTS = (b"first piece " * 9, b"second piece " * 9)
LONG = b"long piece .. " * 2_000_000
"""28 MB: the client writes blocks of 10 MiB, so less would leave nothing to go on from."""
_BLOCK = 10 * 2**20


def parquet(*rows: dict[str, Any]) -> bytes:
    sink = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(list(rows)), sink)
    return sink.getvalue()


def passage(number: int) -> dict[str, Any]:
    return {"id": f"p{number}", "contents": f'"Mill {number}"\nText {number}é.', "extra": 1}


def row(number: int) -> dict[str, Any]:
    truth = {"target": ["1801"], "rewrite": "When was the mill built?", "doc": ""}
    return {
        "data_source": "topiocqa",
        "prompt": [{"role": "user", "content": f"<context>\n</context>\nUser query:\nWhen {number}?"}],
        "question": f"When {number}?",
        "golden_answers": ["1801"],
        "reward_model": {"style": "rule", "ground_truth": truth},
    }


CARD = """---
configs:
- config_name: topiocqa
  data_files:
  - split: train
    path: convs/a-*.parquet
  - split: test
    path: convs/b-00000-of-00001.parquet
---
# Conversations
"""


@pytest.fixture
def hub() -> Iterator[FakeHub]:
    shards = {f"data/train-{n:05d}-of-00006.parquet": parquet(passage(2 * n), passage(2 * n + 1)) for n in range(6)}
    found = FakeHub(
        {
            CORPUS: {**shards, "README.md": b"passages"},
            INDEX: {"index/part_aa": PARTS[0], "index/part_ab": PARTS[1]},
            CONVERSATIONS: {
                "README.md": CARD.encode(),
                "convs/a-00000-of-00002.parquet": parquet(row(0), row(1)),
                "convs/a-00001-of-00002.parquet": parquet(row(2)),
                "convs/b-00000-of-00001.parquet": parquet(row(3)),
            },
        }
    )
    with serve(found):
        yield found


class Desk:
    """A user's folder, and programs run in it."""

    def __init__(self, folder: Path, endpoint: str) -> None:
        self.folder = folder
        kept = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
        # The protocol for huge files (xet) needs a store of its own; without it the client speaks plain HTTP and LFS.
        self.env = {
            **kept,
            "HF_ENDPOINT": endpoint,
            "HF_HOME": str(folder / "home"),
            "HF_TOKEN": "hf_secret",
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        }

    def start(self, program: str, *arguments: str, **env: str) -> subprocess.Popen[str]:
        command = [sys.executable, str(ROOT / "scripts" / f"{program}.py"), *arguments]
        return subprocess.Popen(
            command,
            cwd=self.folder,
            env={**self.env, **env},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def run(self, program: str, *arguments: str, status: int = 0, **env: str) -> str:
        process = self.start(program, *arguments, **env)
        printed = process.communicate(timeout=120)[0]
        assert process.returncode == status, printed
        assert "Traceback" not in printed
        return printed

    def shell(self, line: str) -> None:
        subprocess.run(["bash", "-c", line], cwd=self.folder, check=True)


@pytest.fixture
def desk(hub: FakeHub, tmp_path: Path) -> Desk:
    return Desk(tmp_path, hub.url)


def test_the_published_quick_start_for_passages_and_index(hub: FakeHub, desk: Desk) -> None:
    desk.run("download", "--save_path", "collection")
    desk.shell("rm collection/data/*.parquet")
    desk.shell("cat collection/index/part_* > collection/topiocqa/index/e5_Flat.index && rm collection/index/part_*")
    assert (desk.folder / "collection/topiocqa/index/e5_Flat.index").read_bytes() == b"".join(PARTS)
    lines = (desk.folder / "collection/topiocqa.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line) for line in lines] == [
        {"id": f"p{n}", "contents": f'"Mill {n}"\nText {n}é.'} for n in range(12)
    ]


def test_a_second_run_transfers_nothing_and_needs_no_hub(hub: FakeHub, desk: Desk) -> None:
    desk.run("download", "--save_path", "c", "--join")
    assert (desk.folder / "c/topiocqa/index/e5_Flat.index").read_bytes() == b"".join(PARTS)
    hub.asked.clear()
    desk.run("download", "--save_path", "c", "--join")
    assert [asked for asked in hub.asked if "/resolve/" in asked[1]] == []
    printed = desk.run("download", "--save_path", "c", HF_HUB_OFFLINE="1")
    assert "HF_HUB_OFFLINE is set; using the 6 files in c that were checked before" in printed
    (desk.folder / "c/index/part_ab").write_bytes(b"changed")
    assert "HF_HUB_OFFLINE is set" in desk.run("download", "--save_path", "c", status=2, HF_HUB_OFFLINE="1")
    desk.run("download", "--save_path", "c")
    assert (desk.folder / "c/index/part_ab").read_bytes() == PARTS[1]


def test_a_transfer_that_breaks_off_goes_on_where_it_stopped(hub: FakeHub, desk: Desk) -> None:
    hub.repos[INDEX]["index/part_aa"] = LONG
    hub.cut_after["index/part_aa"] = _BLOCK + 500_000
    desk.run("download", "--save_path", "c")
    assert hub.downloads("index/part_aa") == ["", f"bytes={_BLOCK}-"]
    assert (desk.folder / "c/index/part_aa").read_bytes() == LONG


def test_a_killed_download_goes_on_where_it_stopped(hub: FakeHub, desk: Desk) -> None:
    hub.repos[INDEX]["index/part_aa"] = LONG
    hub.stall_after["index/part_aa"] = _BLOCK + 700_000
    process = desk.start("download", "--save_path", "c")
    assert hub.stalled.wait(60)
    unfinished = desk.folder / "c/index"
    for _ in range(600):  # what was sent reaches the disk in blocks
        if sum(path.stat().st_size for path in unfinished.glob(".part_aa.*.partial")):
            break
        process.poll()
        hub.go_on.wait(0.05)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    hub.go_on.set()
    kept = sum(path.stat().st_size for path in unfinished.glob(".part_aa.*.partial"))
    desk.run("download", "--save_path", "c")
    assert (desk.folder / "c/index/part_aa").read_bytes() == LONG
    assert sorted(path.name for path in unfinished.iterdir()) == ["part_aa", "part_ab"]
    assert 0 < kept <= _BLOCK and hub.downloads("index/part_aa")[1] == f"bytes={kept}-"


def test_a_damaged_copy_is_noticed_and_removed(hub: FakeHub, desk: Desk) -> None:
    hub.damaged.add("index/part_ab")
    printed = desk.run("download", "--save_path", "c", status=2)
    assert "part_ab: has the checksum " in printed and "the copy was removed, run the same command again" in printed
    assert not (desk.folder / "c/index/part_ab").exists()
    hub.damaged.clear()
    desk.run("download", "--save_path", "c")
    assert (desk.folder / "c/index/part_ab").read_bytes() == PARTS[1]


def test_an_unreachable_hub_is_one_line_with_the_remedy(desk: Desk) -> None:
    printed = desk.run("download", "--save_path", "c", status=2, HF_ENDPOINT="http://127.0.0.1:9")
    (line,) = [line for line in printed.splitlines() if line.startswith("download: ")]
    assert "dataset slupart/topiocqa-e5-index: http://127.0.0.1:9 cannot be reached" in line
    assert "Set HF_ENDPOINT to a mirror" in line


def test_the_cache_serves_without_the_hub(hub: FakeHub, desk: Desk) -> None:
    code = "import sys, huggingface_hub as h; [h.snapshot_download(r, repo_type='dataset') for r in sys.argv[1:]]"
    repos = [CORPUS.partition("/")[2], INDEX.partition("/")[2]]
    subprocess.run([sys.executable, "-c", code, *repos], env=desk.env, check=True, capture_output=True)
    hub.asked.clear()
    printed = desk.run("download", "--save_path", "c", "--join", HF_HUB_OFFLINE="1")
    assert "using 6 files of the cache" in printed and hub.asked == []
    assert (desk.folder / "c/topiocqa/index/e5_Flat.index").read_bytes() == b"".join(PARTS)
    assert len((desk.folder / "c/topiocqa.jsonl").read_text().splitlines()) == 12


def test_what_the_repository_lacks_is_named(hub: FakeHub, desk: Desk) -> None:
    del hub.repos[CORPUS]["data/train-00003-of-00006.parquet"]
    printed = desk.run("download", "--save_path", "c", "--skip_index", status=2)
    assert "data/train-00000-of-00006.parquet is one of 00006 shards, and -00003-of-00006 is missing" in printed
    printed = desk.run("download", "--save_path", "c", "--corpus_repo", "no/body", "--skip_index", status=2)
    assert "dataset no/body: not found at http" in printed and "check the name, and HF_TOKEN" in printed
    hub.repos[INDEX] = {"index/part_aa": b"x"}
    printed = desk.run("download", "--save_path", "c", status=2)
    assert "no file 'index/part_ab' in it; it holds index/part_aa" in printed


def test_wiki18_as_search_r1_publishes_it(hub: FakeHub, desk: Desk) -> None:
    hub.repos["datasets/PeterJinGo/wiki-18-corpus"] = {"wiki-18.jsonl.gz": b"g" * 100}
    hub.repos["datasets/PeterJinGo/wiki-18-e5-index"] = {"part_aa": PARTS[0], "part_ab": PARTS[1]}
    desk.run("download", "--save_path", "w", "--collection", "wiki18")
    desk.shell("cat w/part_* > w/e5_Flat.index")
    assert (desk.folder / "w/e5_Flat.index").read_bytes() == b"".join(PARTS)
    assert (desk.folder / "w/wiki-18.jsonl.gz").read_bytes() == b"g" * 100


def test_conversations(hub: FakeHub, desk: Desk) -> None:
    desk.run("download_data_conv")
    train, test = (desk.folder / f"data_conv/topiocqa_{split}/{split}.parquet" for split in ("train", "test"))
    assert [row.question for row in load_rows([train])] == ["When 0?", "When 1?", "When 2?"]
    assert [row.question for row in load_rows([test])] == ["When 3?"]
    printed = desk.run("download_data_conv", "--config", "qrecc", status=2)
    assert "has no configuration 'qrecc'; it has topiocqa" in printed
    train.unlink()
    desk.run("download_data_conv", HF_HUB_OFFLINE="1")
    assert len(load_rows([train])) == 3


def test_conversations_without_a_card() -> None:
    paths = ["qrecc/train-00000.parquet", "topiocqa/test.parquet", "topiocqa/train.parquet", "x_topiocqa_old.json"]
    assert split_patterns("topiocqa", None, paths) == {
        "train": ["topiocqa/train.parquet"],
        "test": ["topiocqa/test.parquet"],
    }
    with pytest.raises(DataError, match="no parquet file of 'faithdial'; it holds qrecc/train"):
        split_patterns("faithdial", "# no header", paths)


def test_upload_in_pieces_and_again(hub: FakeHub, desk: Desk) -> None:
    content = os.urandom(2500)
    (desk.folder / "e5_Flat.index").write_bytes(content)
    command = ["--repo_id", "me/mine", "--path", "e5_Flat.index", "--path_in_repo", "index", "--split_gb", "0.000001"]
    assert "me/mine: 3 files sent, 0 were there" in desk.run("upload", *command)
    files = hub.repos["datasets/me/mine"]
    assert sorted(files) == ["index/part_aa", "index/part_ab", "index/part_ac"]
    assert b"".join(files[name] for name in sorted(files)) == content
    assert "me/mine: 0 files sent, 3 were there" in desk.run("upload", *command)
    (desk.folder / "e5_Flat.index").write_bytes(content[:-1] + b"!")
    assert "me/mine: 1 files sent, 2 were there" in desk.run("upload", *command)
    assert sorted(path.name for path in desk.folder.iterdir()) == ["e5_Flat.index"]


def test_a_folder_is_uploaded_and_comes_back(hub: FakeHub, desk: Desk) -> None:
    (desk.folder / "mine/data").mkdir(parents=True)
    (desk.folder / "mine/data/train-00000-of-00001.parquet").write_bytes(parquet(passage(1)))
    (desk.folder / "mine/.hidden").write_text("no")
    desk.run("upload", "--repo_id", "me/mine", "--path", "mine")
    assert list(hub.repos["datasets/me/mine"]) == ["data/train-00000-of-00001.parquet"]
    desk.run("download", "--save_path", "c", "--corpus_repo", "me/mine", "--skip_index", "--name", "mine")
    assert json.loads((desk.folder / "c/mine.jsonl").read_text())["id"] == "p1"
    assert "no such file or folder" in desk.run("upload", "--repo_id", "me/x", "--path", "none", status=2)
    assert "must be above 0" in desk.run("upload", "--repo_id", "me/x", "--path", "mine", "--split_gb", "0", status=2)


def test_pieces_are_named_as_split_names_them(tmp_path: Path) -> None:
    (tmp_path / "big").write_bytes(b"x" * 60)
    names = [item.path for item in uploads(tmp_path / "big", 2)]
    assert names[0] == "part_aa" and names[26] == "part_ba" and names[-1] == "part_bd" and len(names) == 30
    with pytest.raises(DataError, match="more than 676 pieces"):
        (tmp_path / "big").write_bytes(b"x" * 1000)
        uploads(tmp_path / "big", 1)


def test_checksums_are_those_of_git_and_sha256(tmp_path: Path) -> None:
    from search_r1.hub.repository import RemoteFile

    path = tmp_path / "hello"
    path.write_bytes(b"hello\n")
    git = "ce013625030ba8dba906f756967f9e9ca394464a"  # printf 'hello\n' | git hash-object --stdin
    assert RemoteFile("hello", 6, None, git).mistake(path) is None
    assert RemoteFile("hello", 6, hashlib.sha256(b"hello\n").hexdigest(), "").mistake(path) is None
    assert RemoteFile("hello", 6, "0" * 64, "").mistake(path) is not None
    assert RemoteFile("hello", 7, None, git).mistake(path) == "has 6 bytes, the hub lists 7"


def test_shards_are_complete_or_named() -> None:
    repository = Repository("o/n")
    repository.check_complete(["a-*"], ["a-0-of-2.x", "a-1-of-2.x"])
    with pytest.raises(DataError, match=r"a-0-of-2\.x is one of 2 shards, and -1-of-2 is missing"):
        repository.check_complete(["a-*"], ["a-0-of-2.x", "b-1-of-2.x"])
    assert [readable(size) for size in (5, 2048, 79 * 2**30)] == ["5 B", "2.0 KiB", "79.0 GiB"]
