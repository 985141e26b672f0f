"""The plugin of pytest: a test that returns a model fails where the model wastes the GPU.

    @pytest.mark.tilefit(gpu="a100-80gb", max_waste="5%", amp="bf16")
    def test_sizes():
        return build_model(), torch.empty(8192, 4096)

The test returns ``(model, inputs)``, a model that needs none, or a callable that does a whole training step;
from a fixture, where a fixture makes it. The mark takes the arguments of
:func:`tilefit.testing.assert_no_waste`, which says what waste is. pytest loads the plugin by itself;
``-p no:tilefit`` leaves it out.
"""

from __future__ import annotations

import unittest
from inspect import signature
from typing import Any

import pytest

from tilefit.errors import TilefitError

_MARK = "tilefit"


def pytest_configure(config: pytest.Config) -> None:
    """Make the mark known."""
    config.addinivalue_line(
        "markers",
        f"{_MARK}(gpu, max_waste='5%', rules=(), **options): the test returns (model, inputs), and fails "
        "where a step of it wastes more of the GPU than that; see tilefit.testing.assert_no_waste.",
    )


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Refuse the mark where it would have no effect."""
    method = isinstance(item, pytest.Function) and item.cls and issubclass(item.cls, unittest.TestCase)
    if method and item.get_closest_marker(_MARK):
        pytest.fail(
            f"a method of unittest.TestCase cannot be marked {_MARK}: call "
            "tilefit.testing.assert_no_waste in it",
            pytrace=False,
        )


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a marked test, and check what it returns."""
    mark = pyfuncitem.get_closest_marker(_MARK)
    if mark is None:
        return None
    arguments = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}
    returned = pyfuncitem.obj(**arguments)
    model, inputs = returned if isinstance(returned, tuple) and len(returned) == 2 else (returned, None)
    if message := _wrong(model, mark) or _waste(model, inputs, pyfuncitem.name, mark):
        pytest.fail(message, pytrace=False)
    return True


def _wrong(model: Any, mark: pytest.Mark) -> str:
    """What is wrong with the test itself."""
    from tilefit.options import CheckKeywords
    from tilefit.session import check
    from tilefit.testing import assert_no_waste

    known = [
        *signature(assert_no_waste).parameters,
        *signature(check).parameters,
        *CheckKeywords.__annotations__,
    ]
    own = ("model", "inputs", "select", "options", "keywords")
    known = [name for name in dict.fromkeys(known) if name not in own]
    if mark.args or not mark.kwargs.keys() <= set(known):
        wrong = ", ".join(map(str, [*mark.args, *(mark.kwargs.keys() - set(known))]))
        return f"the mark {_MARK} takes no {wrong}; it takes, by name: {', '.join(known)}"
    if not callable(model):
        returned = "nothing" if model is None else f"a value of type {type(model).__name__}"
        return (
            f"a test marked {_MARK} returns (model, inputs), a model, or a callable that does a training "
            f"step; this one returned {returned}"
        )
    return ""


def _waste(model: Any, inputs: Any, name: str, mark: pytest.Mark) -> str:
    """What is wrong with the model."""
    from tilefit.testing import WasteError, assert_no_waste

    try:
        assert_no_waste(model, inputs, **{"name": name, **mark.kwargs})
    except (WasteError, TilefitError) as error:
        return str(error)
    return ""
