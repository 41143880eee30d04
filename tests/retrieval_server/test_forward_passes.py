"""Forward passes side by side on a CPU, and linear layers that are converted once."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from retrieval_server.backends.torch_models import Passes, convert_linear, mixed_precision

CPU = torch.device("cpu")


@pytest.fixture
def three_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


def test_texts_of_one_length_are_shared_out_among_the_threads(three_threads: None) -> None:
    meeting = threading.Barrier(3, timeout=20)  # broken unless three passes are under way together

    def forward(rows: list[int], length: int) -> tuple[int, int]:
        meeting.wait()
        return length, torch.get_num_threads()

    found = list(Passes(CPU, max_rows=64).run(forward, [5] * 30, max_length=64))
    assert sorted(row for rows, _ in found for row in rows) == list(range(30))
    assert [(len(rows), told) for rows, told in found] == [(10, (8, 1))] * 3  # 50 tokens each, one thread each
    assert torch.get_num_threads() == 3


def test_a_lone_text_has_all_threads(three_threads: None) -> None:
    passes = Passes(CPU, max_rows=64)
    assert list(passes.run(lambda rows, length: torch.get_num_threads(), [9], max_length=64)) == [([0], 3)]
    assert list(passes.run(lambda rows, length: length, [], max_length=64)) == []


def test_a_pass_that_fails_leaves_the_threads_as_they_were(three_threads: None) -> None:
    def forward(rows: list[int], length: int) -> None:
        if length == 16:
            raise FloatingPointError("not finite")

    with pytest.raises(FloatingPointError, match="not finite"):
        list(Passes(CPU, max_rows=64).run(forward, [3, 12, 30], max_length=64))
    assert torch.get_num_threads() == 3


def test_converting_once_gives_the_products_of_converting_in_every_pass() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(50, 32), nn.Linear(32, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 16))
    ids = torch.randint(0, 50, (3, 7))
    with torch.inference_mode(), mixed_precision(CPU, torch.bfloat16):
        expected = model(ids)
        convert_linear(model, torch.bfloat16)
        assert torch.equal(model(ids), expected)
    assert [weight.dtype for weight in model.parameters()].count(torch.bfloat16) == 4  # two layers and their biases
    assert model[3].weight.dtype == torch.float32
