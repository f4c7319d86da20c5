"""Cases of a grid are shared out between the lanes, and none is lost."""

from itertools import combinations, product

from tests.helpers.lanes import grid


def test_in_a_grid_every_two_values_meet_in_a_case_that_runs_always_and_no_case_is_lost() -> None:
    axes = {"a": [1, 2, 3], "b": "xyz", "c": [False, True], "d": [None, 5]}
    cases = grid(**axes).args[1]
    assert [case.values for case in cases] == list(product(*axes.values()))
    always = [case.values for case in cases if not case.marks]
    assert all(mark.name == "slow" for case in cases for mark in case.marks)
    assert len(always) < 13
    for one, other in combinations(range(4), 2):
        wanted = set(product(list(axes.values())[one], list(axes.values())[other]))
        assert {(case[one], case[other]) for case in always} == wanted
