"""A sample of the trainings of several ranks, and the whole of them."""

import pytest

from tests.torture.test_campaigns import play

pytestmark = [pytest.mark.torch, pytest.mark.processes]


def test_a_few_trainings_are_as_the_model_says():
    code, body = play("--only", "training", "--count", "2", "--seed", "2")
    assert (code, body["violations"]) == (0, {"training": []})


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_trainings_are_as_the_model_says():
    code, body = play("--only", "training", "--count", "300", timeout=1180)
    assert (code, body["violations"]) == (0, {"training": []})
