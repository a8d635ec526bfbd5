"""Each epoch draws every prompt once, and a draw depends on nothing but its number."""

import pytest

from rl_actors.data.order import PromptOrder


@pytest.mark.parametrize("shuffle", [True, False])
def test_every_epoch_draws_every_prompt_once(shuffle):
    order = PromptOrder(7, seed=3, shuffle=shuffle)
    for epoch in range(4):
        assert sorted(order.index(epoch * 7 + position) for position in range(7)) == list(range(7))


def test_a_draw_depends_on_its_number_alone():
    forward = PromptOrder(10, seed=0)
    expected = [forward.index(number) for number in range(35)]
    backward = PromptOrder(10, seed=0)
    assert [backward.index(number) for number in reversed(range(35))] == expected[::-1]


def test_epochs_and_seeds_have_their_own_orders():
    count = 50
    orders = {
        (seed, epoch): tuple(PromptOrder(count, seed).index(epoch * count + position) for position in range(count))
        for seed in range(3)
        for epoch in range(3)
    }
    assert len(set(orders.values())) == len(orders)


def test_without_shuffling_the_dataset_order_holds():
    order = PromptOrder(3, seed=5, shuffle=False)
    assert [order.index(number) for number in range(7)] == [0, 1, 2, 0, 1, 2, 0]


def test_fingerprint_tells_orders_apart():
    same = {PromptOrder(20, seed=1).fingerprint for _ in range(2)}
    assert len(same) == 1
    assert (
        len(
            {
                *same,
                PromptOrder(21, 1).fingerprint,
                PromptOrder(20, 2).fingerprint,
                PromptOrder(20, 1, False).fingerprint,
            }
        )
        == 4
    )


def test_an_order_needs_a_prompt():
    with pytest.raises(ValueError, match="at least one prompt"):
        PromptOrder(0, seed=0)
