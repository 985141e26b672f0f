"""A parsed source file: where its nodes are, and what its names mean."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeVar

import libcst as cst
from libcst.metadata import (
    Assignment,
    GlobalScope,
    MetadataWrapper,
    ParentNodeProvider,
    PositionProvider,
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
        self._nodes = sorted(self._positions, key=self.start)

    # ---- places ----------------------------------------------------------------------------

    def start(self, node: cst.CSTNode) -> int:
        """Offset of a node's first character."""
        position = self._positions[node].start
        return self.file.offset(position.line, position.column)

    def stop(self, node: cst.CSTNode) -> int:
        """Offset behind a node's last character."""
        position = self._positions[node].end
        return self.file.offset(position.line, position.column)

    def line(self, node: cst.CSTNode) -> int:
        """The line a node begins on."""
        return int(self._positions[node].start.line)

    def last_line(self, node: cst.CSTNode) -> int:
        """The line a node ends on."""
        return int(self._positions[node].end.line)

    def line_end(self, node: cst.CSTNode) -> int:
        """Offset behind the line that a node ends on."""
        number = self.last_line(node)
        return self.file.offset(number, len(self.file.line(number)))

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
        for node in self._nodes:
            if isinstance(node, kind) and first <= self.start(node) and self.stop(node) <= last:
                yield node

    def on_line(self, kind: type[Node], line: int) -> list[Node]:
        """The nodes of a kind that a line is a part of, the outermost first."""
        return [node for node in self.all(kind) if self.line(node) <= line <= self.last_line(node)]

    def names(self, *within: cst.CSTNode) -> set[str]:
        """All names that nodes contain."""
        return {name.value for each in within for name in self.all(cst.Name, each)}

    def parents(self, node: cst.CSTNode) -> Iterator[cst.CSTNode]:
        """The nodes around a node, the innermost first."""
        while not isinstance(node, cst.Module):
            yield (node := self._parents[node])

    def around(self, node: cst.CSTNode, *kinds: type[Node]) -> Iterator[Node]:
        """Those of some kinds."""
        return (each for each in self.parents(node) if isinstance(each, kinds))

    # ---- names -----------------------------------------------------------------------------

    def is_global(self, node: cst.CSTNode) -> bool:
        """Whether a node is in no function or class."""
        return isinstance(self._scopes[node], GlobalScope)

    def means(self, node: cst.CSTNode) -> set[str]:
        """What a name or attribute may mean, by its imports: ``torch.optim.AdamW``."""
        scope = self._scopes[node]
        return {name.name for name in scope.get_qualified_names_for(node)} if scope else set()

    def assignments(self, name: cst.Name) -> list[cst.CSTNode]:
        """Where a name gets its value, in the order of the file; empty for what is none, such as a keyword
        or an attribute."""
        scope = self._scopes.get(name)
        found = scope[name.value] if scope else ()
        return sorted((each.node for each in found if isinstance(each, Assignment)), key=self.start)
