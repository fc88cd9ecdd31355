import inspect
import pickle

import pytest

from kvray import errors

CLASSES = [cls for _, cls in inspect.getmembers(errors, inspect.isclass)]


@pytest.mark.parametrize("cls", CLASSES)
def test_every_error_survives_pickling(cls: type[errors.KVRayError]) -> None:
    error = cls("The shard on node 3 did not answer.")
    copy = pickle.loads(pickle.dumps(error))  # noqa: S301
    assert type(copy) is cls
    assert str(copy) == str(error)


@pytest.mark.parametrize("cls", CLASSES)
def test_every_error_is_caught_as_an_error_of_kvray(cls: type[errors.KVRayError]) -> None:
    assert issubclass(cls, errors.KVRayError)


def test_a_config_error_is_caught_as_a_value_error() -> None:
    assert issubclass(errors.ConfigError, ValueError)
