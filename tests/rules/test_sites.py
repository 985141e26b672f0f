from __future__ import annotations

import pytest

from tilefit.rules.sites import pattern


@pytest.mark.parametrize(
    ("modules", "expected"),
    [
        ([], ""),
        (["lm_head"], "lm_head"),
        (["h.0.mlp.c_fc", "h.1.mlp.c_fc", "h.11.mlp.c_fc"], "h.*.mlp.c_fc"),
        (["layers.0.mlp.gate_proj", "layers.1.mlp.up_proj"], "layers.*.mlp.*"),
        (["encoder.layer.0.fc", "encoder.layer.0.mlp.fc"], "encoder.layer.0.*"),
        (["encoder.embed", "head"], "*"),
        (["conv1", "layer1"], "*"),
    ],
)
def test_pattern_is_the_narrowest_that_fits_all(modules: list[str], expected: str) -> None:
    assert pattern(modules) == expected
