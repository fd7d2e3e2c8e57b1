"""The cache of a session holds each text once, as long as a row refers to it."""

import pytest
import torch

from decisionllm.backbones.kv_cache import NONE, TextPrefix

TOKENS = 2  # of each text here


def texts(*numbers):
    """Texts whose keys are one number each, and whose values are its opposite."""
    keys = (
        torch.tensor(numbers, dtype=torch.float32)
        .view(-1, 1, 1, 1)
        .expand(-1, 1, TOKENS, 4)
        .contiguous()
    )
    return TextPrefix(
        [keys],
        [-keys],
        torch.ones(len(numbers), TOKENS).bool(),
        torch.full((len(numbers),), TOKENS),
    )


def cache(rows, room=3):
    """The cache of a session of rows that have no text yet."""
    return texts(0).with_size(0, TOKENS).with_room(torch.full((rows,), NONE), room)


class Reader:
    """Reads the text of a task "7" as keys 7, and records which tasks it has read."""

    def __init__(self):
        self.read = []

    def __call__(self, tasks):
        self.read += tasks
        return texts(*map(int, tasks))


def held(cache):
    """The keys of the text of each row."""
    return cache.texts.keys[0][cache.text_index, 0, 0, 0].tolist()


def test_a_text_is_read_once_and_held_once():
    some, read = cache(5), Reader()
    some.set_texts(torch.arange(4), ["1", "2", "1", "1"], read)
    some.set_texts(torch.tensor([4, 1]), ["2", "3"], read)
    assert read.read == ["1", "2", "3"] and held(some) == [1, 3, 1, 1, 2]
    assert len(some.texts.text_length) == 4  # twice the first two
    assert some.nbytes == 4 * 2 * (4 * TOKENS + 5 * 3) * 4  # float32 keys and values of width 4


def test_places_that_no_row_refers_to_are_used_again():
    """A row is given to 100 episodes, one after the other: two texts are held, and one more that
    may come back.
    """
    some, read = cache(2), Reader()
    some.set_texts(torch.tensor([0]), ["0"], read)
    for i in range(1, 100):
        some.set_texts(torch.tensor([1]), [str(i)], read)
        assert held(some) == [0, i] and len(some.texts.text_length) <= 3
        assert len(some.places) == len(some.texts.text_length)


def test_a_text_that_comes_back_is_not_read_again():
    some, read = cache(2), Reader()
    some.set_texts(torch.tensor([0, 1]), ["1", "2"], read)
    some.set_texts(torch.tensor([1]), ["1"], read)
    some.set_texts(torch.tensor([0]), ["2"], read)
    assert read.read == ["1", "2"] and held(some) == [2, 1]
    some.set_texts(torch.tensor([0, 1]), ["1", "3"], read)
    assert held(some) == [1, 3] and len(some.texts.text_length) == 2


def test_rows_have_their_own_steps_and_the_same_texts():
    some, read = cache(3), Reader()
    some.set_texts(torch.arange(3), ["1", "2", "3"], read)
    other = some.rows(torch.tensor([2, 0]))
    assert other.texts.keys[0] is some.texts.keys[0] and held(other) == [3, 1]
    other.keys[0].fill_(9)
    assert some.keys[0].sum() == 0


@pytest.mark.parametrize("changed", [0, 1], ids=["the first", "the second"])
def test_another_text_of_one_cache_leaves_the_other_as_it_is(changed):
    """Both read the same texts; the place of "2" is free in the second one alone."""
    first, read = cache(3), Reader()
    first.set_texts(torch.arange(3), ["1", "2", "3"], read)
    caches = first, first.rows(torch.tensor([2, 0]))
    caches[changed].set_texts(torch.tensor([0]), ["4"], read)
    assert [held(each) for each in caches] == (
        [[4, 2, 3], [3, 1]] if changed == 0 else [[1, 2, 3], [4, 1]]
    )


def test_a_few_rows_do_not_hold_the_texts_of_all():
    some, read = cache(8), Reader()
    some.set_texts(torch.arange(7), list("1234567"), read)
    few = some.rows(torch.tensor([7, 5, 2]))
    assert len(few.texts.text_length) == 2 and few.text_index[0] == NONE and held(few)[1:] == [6, 3]
    few.set_texts(torch.tensor([0]), ["6"], read)
    assert (
        read.read == list("1234567")
        and held(few) == [6, 6, 3]
        and held(some)[:7] == [1, 2, 3, 4, 5, 6, 7]
    )


def test_a_shorter_text_is_masked_to_its_length():
    some = texts(1).with_size(0, 5).with_room(torch.tensor([NONE]), 1)
    some.set_texts(torch.tensor([0]), ["7"], Reader())
    assert some.texts.text_mask.tolist() == [
        [True, True, False, False, False]
    ] and some.texts.text_length.tolist() == [2]
    assert some.texts.values[0][0, 0, :, 0].tolist() == [-7, -7, 0, 0, 0]
