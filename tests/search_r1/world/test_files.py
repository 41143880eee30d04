import hashlib
import json

from search_r1.world import WorldSettings, write_world
from search_r1.world.files import SplitSize


def test_the_same_settings_write_the_same_bytes(tmp_path):
    settings = WorldSettings({"dev": SplitSize(10, 3)}, seed=5)
    counts = write_world(tmp_path / "a", settings)
    write_world(tmp_path / "b", settings)
    assert counts["corpus.jsonl"] == 60
    for name, n_lines in counts.items():
        text = (tmp_path / "a" / name).read_text()
        assert text == (tmp_path / "b" / name).read_text()
        assert len(text.splitlines()) == n_lines
        assert all(isinstance(json.loads(line), dict) for line in text.splitlines())


def test_rows_name_the_corpus_they_were_written_with(tmp_path):
    write_world(tmp_path, WorldSettings({"dev": SplitSize(10, 3)}, seed=5))
    digest = hashlib.sha256((tmp_path / "corpus.jsonl").read_bytes()).hexdigest()
    rows = [json.loads(line) for line in (tmp_path / "dev.jsonl").read_text().splitlines()]
    assert {row["corpus_sha256"] for row in rows} == {digest}
