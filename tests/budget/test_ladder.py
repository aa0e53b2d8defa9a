"""The ladder beside the search over every field of a policy, whose seconds were recorded."""

from statistics import median

from profiles.policy.ladder import ratios


def test_the_ladder_is_about_as_fast_as_the_search_was():
    found = ratios()
    assert len(found) == 28
    assert median(found) <= 1.02 and max(found) <= 1.08
