"""The environments that scripts make: which versions stand in which, and which gates run where. Nothing is installed here."""

import environment
import pytest
import test as gates  # scripts/test.py
import tomllib

PROJECT = tomllib.loads((environment.ROOT / "pyproject.toml").read_text())["project"]


def test_the_lowest_versions_are_the_declared_bounds_of_what_users_install():
    extras = PROJECT["optional-dependencies"]
    declared = [*PROJECT["dependencies"], *extras["encode"], *extras["video"], *extras["area"], *extras["objects"]]
    bounds = dict(item.split(">=") for item in declared if ";" not in item)
    found = environment.lowest()
    assert bounds.keys() - {name for name, version in bounds.items() if found[name] == version} == set(environment.NOT_LOWERED)


def test_what_is_not_lowered_and_the_tools_of_tests_stay_pinned():
    pins, found = environment.pinned(), environment.lowest()
    assert (found["torch"], found["pytest"]) == (pins["torch"], pins["pytest"])
    assert found.keys() == pins.keys()


def test_no_bound_is_above_the_version_that_is_checked():
    def order(version):
        return [int(part) for part in version.split(".")]

    pins = environment.pinned()
    assert [name for name, version in environment.lowest().items() if order(version) > order(pins[name])] == []


def test_the_two_environments_share_nothing_on_disk():
    usual, lowest = environment.USUAL, environment.LOWEST
    paths = [(one.folder, one.bin, one.python, one.stamp, one.unfinished, one.lock) for one in (usual, lowest)]
    assert set(paths[0]).isdisjoint(paths[1])
    assert (usual.python, usual.bin) == (environment.PYTHON, environment.BIN)


@pytest.mark.parametrize("arguments", [[], ["tests/encode", "-k", "vae"]])
def test_the_lowest_versions_are_held_against_the_tests_of_encoding_and_loading_or_as_asked(arguments):
    ((_name, command),) = gates.lowest_gates(arguments).items()
    assert command[0] == str(environment.LOWEST.python)
    assert command[-len(arguments or gates.OF_LIBRARIES) :] == list(arguments or gates.OF_LIBRARIES)


def test_the_usual_gates_run_in_the_usual_environment():
    for fast in (True, False):
        commands = gates.gates([], fast=fast)
        assert list(commands)[-1] == "pytest"
        assert all(command[0].startswith(str(environment.BIN)) for command in commands.values())
