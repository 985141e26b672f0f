"""Sites that say the same thing, as one."""

from __future__ import annotations

from collections.abc import Iterable


def pattern(modules: Iterable[str]) -> str:
    """The narrowest path with ``*`` that fits all module paths.

    >>> pattern(["transformer.h.0.mlp.c_fc", "transformer.h.11.mlp.c_fc"])
    'transformer.h.*.mlp.c_fc'
    >>> pattern(["encoder.embed", "head"])
    '*'
    """
    paths = [module.split(".") for module in dict.fromkeys(modules)]
    if not paths:
        return ""
    if len({len(path) for path in paths}) == 1:
        parts = ["*" if len(set(column)) > 1 else column[0] for column in zip(*paths, strict=True)]
    else:
        parts = []
        for column in zip(*paths, strict=False):
            if len(set(column)) > 1:
                break
            parts.append(column[0])
        parts.append("*")
    while parts[-2:] == ["*", "*"]:
        parts.pop()
    return ".".join(parts)


def listed(modules: Iterable[str], noun: str) -> str:
    """Modules by a path that fits them all, or by their number where only ``*`` does.

    >>> listed(["h.0.act", "h.1.act"], "layers")
    'h.*.act'
    >>> listed(["0", "2"], "layers")
    '2 layers'
    >>> listed(["2"], "layers")
    'module 2'
    """
    paths = list(dict.fromkeys(modules))
    common = pattern(paths)
    if common.isdigit():
        return f"module {common}"
    return f"{len(paths)} {noun}" if common == "*" else common or "the model"
