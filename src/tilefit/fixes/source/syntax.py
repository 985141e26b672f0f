"""A parsed source file: its calls by where they end, its names by what they mean."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import TypeVar

import libcst as cst
from libcst.metadata import (
    Assignment,
    GlobalScope,
    MetadataWrapper,
    ParentNodeProvider,
    PositionProvider,
    Scope,
    ScopeProvider,
)

from tilefit.fixes.changes.fix import RefusedError, refuse
from tilefit.fixes.source.file import Edit, SourceFile

Node = TypeVar("Node", bound=cst.CSTNode)


class Syntax:
    """A source file, parsed.

    Raises:
        RefusedError: it cannot be parsed.
    """

    def __init__(self, file: SourceFile) -> None:
        self.file = file
        # Lines of blanks at the end are of no statement, and LibCST drops an empty line before them.
        text = file.text.rstrip()
        try:
            tree = cst.parse_module(text)
        except cst.ParserSyntaxError as error:
            raise RefusedError(f"line {error.raw_line} of {file.name} cannot be parsed") from error
        refuse(tree.code != text, f"{file.name} cannot be parsed without changing it")
        wrapper = MetadataWrapper(tree, unsafe_skip_copy=True)
        self.tree = tree
        self._positions = wrapper.resolve(PositionProvider)
        self._scopes = wrapper.resolve(ScopeProvider)
        self._parents = wrapper.resolve(ParentNodeProvider)
        self._kinds: dict[type[cst.CSTNode], list[cst.CSTNode]] = {}

    # ---- places ----------------------------------------------------------------------------

    def start(self, node: cst.CSTNode) -> int:
        """Offset of a node's first character."""
        position = self._positions[node].start
        return self.file.offset(position.line, position.column)

    def stop(self, node: cst.CSTNode) -> int:
        """Offset behind a node's last character."""
        position = self._positions[node].end
        return self.file.offset(position.line, position.column)

    def line_end(self, node: cst.CSTNode) -> int:
        """Offset behind the line that a node ends on."""
        number = self.file.line_of(self.stop(node))
        return self.file.line_starts[number - 1] + len(self.file.line(number))

    def line(self, node: cst.CSTNode) -> int:
        """The line a node begins on."""
        return int(self._positions[node].start.line)

    def where(self, node: cst.CSTNode) -> str:
        """File and line, for a message: ``train.py:12``."""
        return f"{self.file.name}:{self.line(node)}"

    def code(self, node: cst.CSTNode) -> str:
        """A node as it is written."""
        return self.file.text[self.start(node) : self.stop(node)]

    def replaced(self, node: cst.CSTNode, text: str) -> Edit:
        """The edit that writes ``text`` in a node's place."""
        return Edit(self.start(node), self.stop(node), text)

    def indentation(self, line: int) -> str:
        """What a line begins with."""
        text = self.file.line(line)
        return text[: len(text) - len(text.lstrip())]

    # ---- nodes -----------------------------------------------------------------------------

    def all(self, kind: type[Node], within: cst.CSTNode | None = None) -> Iterator[Node]:
        """All nodes of a kind, in the order of the file."""
        first, last = (self.start(within), self.stop(within)) if within else (0, len(self.file.text))
        for node in self._of_kind(kind):
            assert isinstance(node, kind)
            if first <= self.start(node) and self.stop(node) <= last:
                yield node

    def _of_kind(self, kind: type[cst.CSTNode]) -> list[cst.CSTNode]:
        if kind not in self._kinds:
            found = [node for node in self._positions if isinstance(node, kind)]
            self._kinds[kind] = sorted(found, key=self.start)
        return self._kinds[kind]

    def on_line(self, kind: type[Node], line: int) -> list[Node]:
        """The nodes of a kind that a line is a part of, the outermost first."""
        return [n for n in self.all(kind) if self.line(n) <= line <= self.file.line_of(self.stop(n))]

    def names(self, *within: cst.CSTNode) -> set[str]:
        """All names that nodes contain."""
        return {name.value for each in within for name in self.all(cst.Name, each)}

    def parent(self, node: cst.CSTNode) -> cst.CSTNode:
        """The node that a node is part of."""
        return self._parents[node]

    def around(self, node: cst.CSTNode, kind: type[Node]) -> Node | None:
        """The innermost node of a kind around a node."""
        while not isinstance(node, cst.Module):
            node = self._parents[node]
            if isinstance(node, kind):
                return node
        return None

    @cached_property
    def _calls(self) -> dict[tuple[int, int], cst.Call]:
        """Every call by the position behind its closing parenthesis, where no other call ends."""
        return {
            (position.end.line, position.end.column): node
            for node, position in self._positions.items()
            if isinstance(node, cst.Call)
        }

    def call_ending(self, line: int, utf8_column: int) -> cst.Call | None:
        """The call whose closing parenthesis is just before a position, as Python's bytecode gives it."""
        characters = len(self.file.line(line).encode()[:utf8_column].decode(errors="replace"))
        return self._calls.get((line, characters))

    # ---- names -----------------------------------------------------------------------------

    def scope(self, node: cst.CSTNode) -> Scope:
        """The scope a node is in."""
        scope = self._scopes[node]
        assert scope is not None
        return scope

    @property
    def global_scope(self) -> GlobalScope:
        """The scope of the module."""
        scope = self.scope(self.tree)
        assert isinstance(scope, GlobalScope)
        return scope

    def means(self, node: cst.CSTNode) -> set[str]:
        """What a name or attribute may mean, by its imports: ``torch.optim.AdamW``."""
        return {name.name for name in self.scope(node).get_qualified_names_for(node)}

    def assignments(self, name: str, scope: Scope) -> list[Assignment]:
        """Where a name gets its value, as a scope sees it."""
        return [assigned for assigned in scope[name] if isinstance(assigned, Assignment)]
