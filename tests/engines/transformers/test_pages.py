"""Pages of vLLM's KV tensors are moved as the widest words that fit them; the bytes are the same for any shape.

On a GPU too, where there is one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
import torch

from kvstore.connectors.vllm.gpu_copy import Pages
from kvstore.errors import InvalidRequest

BLOCKS = [5, 0, 7, 2]
COUNT = 9


@pytest.fixture(params=["cpu", *(["cuda"] if torch.cuda.is_available() else [])], autouse=True)
def device(request: pytest.FixtureRequest) -> Iterator[str]:
    """Where tensors are made unless a test says otherwise."""
    with torch.device(request.param):
        yield request.param


def tensors(page_bytes: int, gap_bytes: int, offset_bytes: int, layers: int = 3) -> list[torch.Tensor]:
    """One tensor of bytes for each layer: pages with a gap behind each, from an offset on."""
    made = []
    for _ in range(layers):
        raw = torch.randint(0, 256, (offset_bytes + COUNT * (page_bytes + gap_bytes),), dtype=torch.uint8)
        made.append(raw.as_strided((COUNT, page_bytes), (page_bytes + gap_bytes, 1), offset_bytes))
    return made


def out_of(pages: Pages, blocks: Sequence[tuple[int, ...]]) -> torch.Tensor:
    """The blocks on the host."""
    return torch.from_numpy(pages.copy_out(blocks).rows().copy())


def back(pages: Pages, rows: torch.Tensor, blocks: Sequence[tuple[int, ...]]) -> None:
    """Writes rows as a load does: from memory of theirs."""
    host = pages.host(len(blocks))
    host.copy_(rows)
    pages.write(host, blocks, pages.now())


def numbered(blocks: list[int]) -> list[tuple[int]]:
    """Blocks of one group."""
    return [(block,) for block in blocks]


@pytest.mark.parametrize(
    ("page_bytes", "gap_bytes", "offset_bytes", "word"),
    [
        (64, 0, 0, torch.int64),
        (64, 8, 16, torch.int64),
        (64, 4, 0, torch.int32),
        (60, 0, 0, torch.int32),
        (64, 0, 2, torch.int16),
        (62, 0, 4, torch.int16),
        (63, 0, 0, torch.uint8),
        (64, 1, 0, torch.uint8),
    ],
)
def test_pages_of_any_size_come_out_and_go_back(
    page_bytes: int, gap_bytes: int, offset_bytes: int, word: torch.dtype
) -> None:
    layers = tensors(page_bytes, gap_bytes, offset_bytes)
    pages = Pages([{f"layer {at}": layer for at, layer in enumerate(layers)}], COUNT)
    assert pages._word is word and pages.block_bytes == 3 * page_bytes
    expected = torch.cat([layer[BLOCKS] for layer in layers], dim=1).cpu()
    assert torch.equal(out_of(pages, numbered(BLOCKS)), expected)

    before = [layer.clone() for layer in layers]
    others = [3, 8, 1, 4]
    back(pages, expected, numbered(others))
    for layer, was in zip(layers, before, strict=True):
        was[others] = was[BLOCKS]
        assert torch.equal(layer, was)


def test_groups_of_one_cluster_lie_side_by_side_and_a_layer_may_have_several_tensors() -> None:
    full, states = tensors(64, 0, 0, 3), tensors(32, 8, 0, 2)
    pages = Pages([{"full": full[0], "state": states}, {"other": full[1]}, {"third": full[2]}], COUNT)
    blocks = [(1, 5, 3), (2, 6, 8)]
    rows = out_of(pages, blocks)
    first, second, third = (list(each) for each in zip(*blocks, strict=True))
    parts = [full[0][first], states[0][first], states[1][first], full[1][second], full[2][third]]
    assert torch.equal(rows, torch.cat(parts, dim=1).cpu())
    for tensor in (*full, *states):
        tensor.zero_()
    back(pages, rows, [(4, 7, 0), (0, 1, 2)])
    found = [full[0][[4, 0]], states[0][[4, 0]], states[1][[4, 0]], full[1][[7, 1]], full[2][[0, 2]]]
    assert torch.equal(torch.cat(found, dim=1).cpu(), rows)
    assert not full[1][[4, 0]].any(), "each group has numbers of its own"


def test_the_parts_of_one_rank_are_the_blocks_of_two() -> None:
    # (blocks, heads, tokens, content) of two layers; each of two ranks has half of the heads.
    layers = [torch.randint(0, 256, (COUNT, 4, 8, 16), dtype=torch.uint8) for _ in range(2)]
    one = Pages([dict(zip("ab", layers, strict=True))], COUNT, 2)
    blocks = [(5,), (0,), (7,)]
    parts = one.parts(one.copy_out(blocks).rows())
    for rank, part in enumerate(parts):
        halves = [layer[:, 2 * rank : 2 * rank + 2].contiguous() for layer in layers]
        rows = Pages([dict(zip("ab", halves, strict=True))], COUNT).copy_out(blocks).rows()
        assert [each.tobytes() for each in part] == [row.tobytes() for row in rows]
    host = one.host(3)
    for number, part in enumerate(one.parts(host.numpy())):
        for row, written in zip(part, parts[number], strict=True):
            row[:] = written
    before = [layer[[5, 0, 7]] for layer in layers]
    for layer in layers:
        layer.zero_()
    one.write(host, [(1,), (2,), (3,)], one.now())
    for layer, was in zip(layers, before, strict=True):
        assert torch.equal(layer[[1, 2, 3]], was)


def test_an_engine_may_have_made_another_device_the_default() -> None:
    layer = tensors(64, 0, 0, 1)[0]
    pages = Pages([{"a": layer}], COUNT)
    with torch.device("meta"):
        rows = out_of(pages, numbered(BLOCKS))
        back(pages, rows.flip(0), numbered(BLOCKS))
    assert torch.equal(layer[BLOCKS].cpu(), rows.flip(0))


def test_heads_that_do_not_lie_together_and_stages_without_layers_are_refused() -> None:
    layer = torch.zeros((COUNT, 8, 4, 16), dtype=torch.uint8).transpose(1, 2)
    with pytest.raises(InvalidRequest, match="another KV cache layout"):
        Pages([{"a": layer}], COUNT, 2)
    with pytest.raises(InvalidRequest, match="layers of every kind"):
        Pages([{}], COUNT)


def test_the_engine_may_change_blocks_as_soon_as_they_are_on_their_way(device: str) -> None:
    layers = [torch.randint(0, 256, (COUNT, (8 << 20) if device == "cuda" else 64), dtype=torch.uint8) for _ in "abc"]
    pages = Pages([dict(zip("abc", layers, strict=True))], COUNT)
    expected, every = torch.cat(layers, dim=1).cpu(), numbered(list(range(COUNT)))
    for _ in range(5):
        copies = [pages.copy_out(every) for _ in range(3)]
        for layer in layers:
            layer.zero_()
        assert all(torch.equal(torch.from_numpy(copy.rows()), expected) for copy in copies)
        host = pages.host(COUNT)
        host.copy_(expected)
        for layer in layers:
            layer.fill_(1)  # what a step still does before the load may begin
        pages.write(host, every, pages.now())
        assert torch.equal(torch.cat(layers, dim=1).cpu(), expected)
