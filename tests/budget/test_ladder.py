"""The ladder beside the search over every field of a policy, whose seconds were recorded."""

from statistics import median

from profiles.policy.ladder import CELLS, rows


def test_the_ladder_is_about_as_fast_as_the_search_was():
    ratios = [after / before for _, before, after, _ in rows()]
    assert len(ratios) == len(CELLS) == 28
    assert median(ratios) <= 1.02 and max(ratios) <= 1.06
