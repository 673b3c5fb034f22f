"""collate, the one place that shifts, and Rollout. Numbers: items of the acceptance list."""

from pathlib import Path

import pytest
import tiny
import torch
from hypothesis import given
from hypothesis import strategies as st

from ppo_kernels.ranks import BatchOrder
from ppo_kernels.trainer import Rollout, collate


def ids(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)


def test_01_action_index_j_predicts_token_j_plus_1() -> None:
    batch = collate([ids(1, 2, 3), ids(8)], [ids(4, 5, 6, 7), ids(9)], 0, "right")
    assert batch.input_ids.tolist() == [[1, 2, 3, 4, 5, 6, 7], [8, 9, 0, 0, 0, 0, 0]]
    assert batch.mask.int().tolist() == [[0, 0, 1, 1, 1, 1], [1, 0, 0, 0, 0, 0]]
    assert batch.lengths.tolist() == [7, 2]
    batch = collate([ids(1, 2, 3), ids(8)], [ids(4, 5, 6, 7), ids(9)], 0, "left")
    assert batch.input_ids[1].tolist() == [0, 0, 0, 0, 0, 8, 9]
    assert batch.mask.int().tolist() == [[0, 0, 1, 1, 1, 1], [0, 0, 0, 0, 0, 1]]


@given(
    st.lists(st.tuples(st.integers(1, 4), st.integers(0, 5)), min_size=1, max_size=5),
    st.sampled_from(["left", "right"]),
)
def test_01_mask_labels_and_positions_agree(sizes: list[tuple[int, int]], side: str) -> None:
    queries = [torch.arange(10, 10 + q) for q, _ in sizes]
    responses = [torch.arange(100 * i + 100, 100 * i + 100 + r) for i, (_, r) in enumerate(sizes)]
    batch = collate(queries, responses, 7, side)
    assert batch.input_ids[:, 1:][batch.mask].tolist() == torch.cat(responses).tolist()
    assert batch.labels.tolist() == torch.cat(responses).tolist()
    assert batch.mask.sum(-1).tolist() == [r for _, r in sizes]
    assert torch.equal(batch.scatter(batch.labels.float()) > 0, batch.mask)
    assert batch.attention_mask.sum(-1).tolist() == [q + r for q, r in sizes]
    assert batch.lengths.tolist() == [q + r for q, r in sizes]


def test_02_pad_id_is_only_a_filler_and_eos_is_an_action() -> None:
    rows = ([ids(5, 1), ids(6)], [ids(1, 9, 1), ids(1)])
    for side in ("left", "right"):
        masks = [collate(*rows, pad, side).mask for pad in (0, 1, 9)]
        assert torch.equal(masks[0], masks[1]) and torch.equal(masks[0], masks[2])
        assert masks[0].sum(-1).tolist() == [3, 1]


def test_03_positions_count_from_the_first_real_token() -> None:
    batch = collate([ids(1, 2, 3), ids(8)], [ids(4), ids(9)], 0, "left")
    assert batch.position_ids.tolist() == [[0, 1, 2, 3], [0, 0, 0, 1]]


def test_04_interior_mask() -> None:
    batch = collate([ids(1, 2)], [ids(3, 4, 5, 6)], 0, "right", [ids(1, 0, 0, 1)])
    assert batch.mask.int().tolist() == [[0, 1, 0, 0, 1]]
    assert batch.labels.tolist() == [3, 4, 5, 6]


def test_05_empty_response_and_empty_query() -> None:
    batch = collate([ids(1, 2), ids(3)], [ids(), ids(4, 5)], 0, "right")
    assert batch.mask.int().tolist() == [[0, 0], [1, 1]]
    with pytest.raises(ValueError, match=r"queries\[1\] is empty"):
        collate([ids(1), ids()], [ids(2), ids(3)])
    with pytest.raises(ValueError, match="padding_side must be one of"):
        collate([ids(1)], [ids(2)], 0, "middle")


def test_seq2seq_actions_follow_the_start_token() -> None:
    batch = collate([ids(5, 6, 7), ids(8)], [ids(3, 1), ids(1)], 9, "right", start_token_id=0)
    inputs = batch.inputs()
    assert inputs["decoder_input_ids"].tolist() == [[0, 3, 1], [0, 1, 9]]
    assert inputs["decoder_attention_mask"].tolist() == [[1, 1, 1], [1, 1, 0]]
    assert inputs["input_ids"].tolist() == [[5, 6, 7], [8, 9, 9]]
    assert inputs["attention_mask"].tolist() == [[1, 1, 1], [1, 0, 0]]
    assert batch.mask.int().tolist() == [[1, 1], [1, 0]]


def make_rollout(n: int, seed: int) -> Rollout:
    return tiny.trainer(batch_size=8, missing_eos_penalty=1.0).rollout(*tiny.rows(n, seed))


def same(a: Rollout, b: Rollout) -> None:
    for name, x in vars(a).items():
        y = getattr(b, name)
        if isinstance(x, list):
            assert [v.tolist() for v in x] == [v.tolist() for v in y], name
        else:
            torch.testing.assert_close(x, y, rtol=0, atol=0, equal_nan=True)


def test_rollouts_are_indexed_joined_and_saved(tmp_path: Path) -> None:
    a, b = make_rollout(5, 0), make_rollout(3, 1)
    both = Rollout.cat([a, b])
    assert len(both) == 8
    same(both[:5][[4, 0]], Rollout.cat([a, b])[[4, 0]])
    assert both.mask.sum() == a.mask.sum() + b.mask.sum()
    assert torch.equal(both.advantages[both.mask][-int(b.mask.sum()) :], b.advantages[b.mask])
    keep = both.scores > 0
    assert len(both[keep]) == int(keep.sum())
    assert [len(one) for one in a] == [1] * 5
    both.save(tmp_path / "rollout.pt")
    same(Rollout.load(tmp_path / "rollout.pt"), both)


def test_24_batch_order_goes_on_where_it_was() -> None:
    def order(rank: int = 0, size: int = 1) -> BatchOrder:
        return BatchOrder(10, 3, seed=5, shuffle=True, rank=rank, size=size)

    whole = order()
    epochs = [list(whole), list(whole)]
    assert epochs[0] != epochs[1]
    assert all(len({i for rows in epoch for i in rows}) == 9 for epoch in epochs)
    first = order()
    begun = next(iter(first))
    resumed = order()
    resumed.place.update(first.place)
    assert [begun, *resumed] == epochs[0] and list(resumed) == epochs[1]


def test_37_ranks_get_disjoint_rows_and_too_few_are_refused() -> None:
    parts = [BatchOrder(12, 3, 0, True, rank, 2) for rank in (0, 1)]
    seen = [i for part in parts for rows in part for i in rows]
    assert sorted(seen) == list(range(12))
    with pytest.raises(ValueError, match="5 rows, fewer than batch_size = 3 on 2"):
        BatchOrder(5, 3, 0, True, 0, 2)
