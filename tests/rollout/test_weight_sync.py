"""The weight channel: buckets, checks before the first write, tied weights, damage on the way."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from verl.errors import EngineError, ResourceError
from verl.workers.weight_sync import WeightChannel, receive

Tensors = dict[str, torch.Tensor]


@pytest.fixture
def tensors() -> Tensors:
    generator = torch.Generator().manual_seed(0)
    return {
        "embed": torch.randn(10, 4, generator=generator),
        "layer.weight": torch.randn(4, 4, generator=generator),
        "layer.bias": torch.randn(4, generator=generator),
        "scale": torch.tensor(1.5),
    }


def spec(tensors: Tensors, dtype: str = "float32") -> dict[str, tuple[tuple[int, ...], str]]:
    return {name: (tuple(t.shape), dtype) for name, t in tensors.items()}


@pytest.mark.parametrize("checksums", [False, True])
@pytest.mark.parametrize("bucket", [1, 100, 2**30])
def test_tensors_arrive_byte_equal_whatever_the_bucket(
    tmp_path: Path, tensors: Tensors, bucket: int, checksums: bool
) -> None:
    channel = WeightChannel(tmp_path / "w", checksums=checksums, bucket_bytes=bucket)
    manifest = channel.publish(iter(tensors.items()), version=7)
    assert len(manifest.files) == {1: 4, 100: 2, 2**30: 1}[bucket]
    arrived = dict(receive(manifest, spec(tensors)))
    assert arrived.keys() == tensors.keys()
    assert all(torch.equal(arrived[name], tensors[name]) for name in tensors)
    channel.close()
    assert not (tmp_path / "w").exists()


def test_floating_tensors_are_cast_on_the_way_out(tmp_path: Path, tensors: Tensors) -> None:
    everything = tensors | {"steps": torch.tensor([3])}
    manifest = WeightChannel(tmp_path).publish(iter(everything.items()), version=1, dtype=torch.bfloat16)
    expected = spec(tensors, "bfloat16") | {"steps": ((1,), "int64")}
    arrived = dict(receive(manifest, expected))
    assert torch.equal(arrived["embed"], tensors["embed"].to(torch.bfloat16))
    assert arrived["steps"].tolist() == [3]


def test_all_mismatches_are_named_before_the_first_tensor(tmp_path: Path, tensors: Tensors) -> None:
    manifest = WeightChannel(tmp_path).publish(iter(tensors.items()), version=2)
    expected = spec(tensors)
    expected["embed"] = ((11, 4), "float32")
    expected["layer.bias"] = ((4,), "bfloat16")
    expected["norm"] = ((4,), "float32")
    del expected["scale"]
    with pytest.raises(EngineError) as caught:
        receive(manifest, expected)  # not even iterated
    message = str(caught.value)
    assert "version 2" in message
    assert "embed: sent float32(10, 4), expected float32(11, 4)" in message
    assert "layer.bias: sent float32(4,), expected bfloat16(4,)" in message
    assert "norm: missing" in message
    assert "scale: not a weight" in message


def test_a_tied_weight_may_come_under_either_name_or_both(tmp_path: Path, tensors: Tensors) -> None:
    expected, aliases = spec({"embed": tensors["embed"]}), {"head": "embed"}
    for sent in ({"embed": 1}, {"head": 1}, {"embed": 1, "head": 1}, {"head": 1, "embed": 1}):
        manifest = WeightChannel(tmp_path).publish(((name, tensors["embed"]) for name in sent), version=1)
        arrived = list(receive(manifest, expected, aliases))
        assert [name for name, _ in arrived] == ["embed"]
        assert torch.equal(arrived[0][1], tensors["embed"])


def test_a_head_that_differs_from_its_tied_embedding_is_refused(tmp_path: Path, tensors: Tensors) -> None:
    both = {"embed": tensors["embed"], "head": tensors["embed"] + 1}
    manifest = WeightChannel(tmp_path).publish(iter(both.items()), version=1)
    with pytest.raises(EngineError, match="head and embed are one tied weight"):
        list(receive(manifest, spec({"embed": tensors["embed"]}), {"head": "embed"}))


def test_a_new_publish_removes_the_files_of_the_last_one_and_of_a_killed_run(tmp_path: Path, tensors: Tensors) -> None:
    (tmp_path / "weights-9-0.safetensors").write_bytes(b"left over")
    (tmp_path / "other.txt").write_text("not ours")
    channel = WeightChannel(tmp_path)
    channel.publish(iter(tensors.items()), version=1)
    channel.publish(iter(tensors.items()), version=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["other.txt", "weights-2-0.safetensors"]


def test_damage_on_the_way_is_noticed(tmp_path: Path, tensors: Tensors) -> None:
    manifest = WeightChannel(tmp_path, checksums=True).publish(iter(tensors.items()), version=1)
    path = Path(manifest.files[0])
    content = bytearray(path.read_bytes())
    content[-1] ^= 1  # the last byte of the last tensor's data
    path.write_bytes(content)
    with pytest.raises(EngineError, match="checksum of"):
        list(receive(manifest, spec(tensors)))
    path.unlink()
    with pytest.raises(EngineError, match="cannot read weights version 1"):
        list(receive(manifest, spec(tensors)))


def test_ranks_that_do_not_write_take_part_in_gathering(tmp_path: Path, tensors: Tensors) -> None:
    seen = []
    gathering = ((name, seen.append(name) or tensor) for name, tensor in tensors.items())
    manifest = WeightChannel(tmp_path / "w").publish(gathering, version=1, write=False)
    assert seen == list(tensors)
    assert manifest.entries == ()
    assert not (tmp_path / "w").exists()


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path, tensors: Tensors) -> None:
    channel = WeightChannel(tmp_path / "w")
    (tmp_path / "w").mkdir()
    (tmp_path / "w" / "weights-1-0.partial").mkdir()  # in the way of the file
    with pytest.raises(ResourceError, match=r"cannot write weights version 1 to .*w: "):
        channel.publish(iter(tensors.items()), version=1)
