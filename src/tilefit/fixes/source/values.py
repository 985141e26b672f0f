"""Where the number behind an argument is written: the literal, through names, parameters and attributes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import libcst as cst
from libcst.metadata import Assignment, FunctionScope

from tilefit.fixes.fix import RefusedError
from tilefit.fixes.source.birth import Callers
from tilefit.fixes.source.program import Program
from tilefit.fixes.source.syntax import Syntax


@dataclass(frozen=True)
class Literal:
    """A whole number in a file.

    Attributes:
        syntax: The file.
        node: The number.
        name: What it is the value of, where it has a name: ``vocab_size``.
    """

    syntax: Syntax
    node: cst.Integer
    name: str = ""

    def __str__(self) -> str:
        return f"{self.name}={self.node.value}" if self.name else self.node.value


def called(program: Program, chain: Callers, index: int) -> tuple[Syntax, cst.Call]:
    """The call that was going on in a function.

    Raises:
        RefusedError: it is not in the file.
    """
    caller = chain[index]
    if not caller.is_users:
        raise RefusedError(f"{Path(caller.path).name}, a library's file, makes it")
    syntax = program.syntax(caller.path)
    call = syntax.call_ending(*caller.end) if caller.end else None
    if call is None:
        raise RefusedError(f"the call in line {caller.line} of {syntax.file.name} is not found there")
    return syntax, call


class Search:
    """Looks for the literal that gives an expression its value.

    Args:
        program: Whose files are searched.
        chain: The calls that were going on when the expression was evaluated.
        value: What the expression is known to be.
    """

    def __init__(self, program: Program, chain: Callers, value: int) -> None:
        self.program = program
        self.chain = chain
        self.value = value

    def literal(self, syntax: Syntax, expression: cst.BaseExpression, at: int, name: str = "") -> Literal:
        """The literal behind an expression in the function of ``chain[at]``.

        Raises:
            RefusedError: the value does not come from one literal.
        """
        match expression:
            case cst.Integer() if expression.evaluated_value == self.value:
                return Literal(syntax, expression, name)
            case cst.Name():
                return self._named(syntax, expression, at)
            case cst.Attribute(value=cst.Name(value="self"), attr=attr):
                return self._of_self(syntax, expression, attr.value, at)
            case cst.Attribute(attr=attr):
                return self._anywhere(attr.value)
            case cst.Subscript(
                slice=[cst.SubscriptElement(slice=cst.Index(value=cst.SimpleString() as key))]
            ):
                return self._anywhere(str(key.evaluated_value))
        raise RefusedError(f"{syntax.code(expression)} is not a plain number")

    def _named(self, syntax: Syntax, name: cst.Name, at: int) -> Literal:
        found = syntax.assignments(name.value, syntax.scope(name))
        if len(found) != 1:
            raise RefusedError(f"{name.value} is set in {len(found) or 'no'} places of {syntax.file.name}")
        assigned = found[0]
        if isinstance(assigned.node, cst.Param):
            return self._parameter(syntax, assigned, assigned.node, at)
        if isinstance(assigned.node, cst.Import | cst.ImportFrom):
            return self._anywhere(name.value)
        value = syntax.value_of(assigned)
        if value is None:
            raise RefusedError(f"{name.value} is not set to one value")
        return self.literal(syntax, value, at, name.value)

    def _parameter(self, syntax: Syntax, assigned: Assignment, parameter: cst.Param, at: int) -> Literal:
        """The argument a parameter was called with, or its default."""
        assert isinstance(assigned.scope, FunctionScope)
        function = syntax.around(parameter, cst.FunctionDef)
        name = parameter.name.value
        if function is None:
            raise RefusedError(f"{name} is a lambda's")
        while at < len(self.chain) and not self._runs(at, syntax, function):
            at += 1
        if at + 1 >= len(self.chain):
            raise RefusedError(f"nobody is seen calling {function.name.value}")
        given = self._argument(syntax, function, parameter, at + 1)
        if given is not None:
            return self.literal(*given, at + 1, name)
        if parameter.default is None:
            raise RefusedError(f"{name} is passed in a way that hides it")
        return self.literal(syntax, parameter.default, at + 1, name)

    def _runs(self, at: int, syntax: Syntax, function: cst.FunctionDef) -> bool:
        """Whether ``chain[at]`` is in this very function."""
        caller = self.chain[at]
        first = syntax.line(function.decorators[0] if function.decorators else function)
        return (
            caller.is_users
            and caller.code.co_firstlineno == first
            and caller.code.co_name == function.name.value
            and self.program.syntax(caller.path) is syntax
        )

    def _argument(
        self, syntax: Syntax, function: cst.FunctionDef, parameter: cst.Param, at: int
    ) -> tuple[Syntax, cst.BaseExpression] | None:
        """What a call passes for a parameter; None where it leaves the default."""
        caller, call = called(self.program, self.chain, at)
        names = [p.name.value for p in (*function.params.posonly_params, *function.params.params)]
        is_method = isinstance(syntax.scope(function), cst.metadata.ClassScope)
        place = names.index(parameter.name.value) - is_method if parameter.name.value in names else None
        for index, argument in enumerate(call.args):
            if argument.star:
                raise RefusedError(f"{caller.code(call)} hides its arguments")
            is_it = argument.keyword.value == parameter.name.value if argument.keyword else index == place
            if is_it:
                return caller, argument.value
        return None

    def _of_self(self, syntax: Syntax, expression: cst.Attribute, name: str, at: int) -> Literal:
        """What ``self.name`` is set to in its class; else wherever something of that name is set."""
        owner = syntax.around(expression, cst.ClassDef)
        values = [
            assign.value
            for assign in (syntax.all(cst.Assign, owner) if owner else ())
            for target in assign.targets
            if isinstance(target.target, cst.Attribute)
            and isinstance(target.target.value, cst.Name)
            and (target.target.value.value, target.target.attr.value) == ("self", name)
        ]
        if len(values) == 1:
            return self.literal(syntax, values[0], at, name)
        return self._anywhere(name)

    def _anywhere(self, name: str) -> Literal:
        """The one place in the program's files that gives something of this name the value.

        A value that is passed or assigned goes before a default.
        """
        given = [literal for syntax in self.program.syntaxes() for literal in self._given(syntax, name)]
        defaults = [literal for syntax in self.program.syntaxes() for literal in self._defaults(syntax, name)]
        for found in (given, defaults):
            if len(found) == 1:
                return found[0]
            if found:
                lines = ", ".join(f"{each.syntax.file.name}:{each.syntax.line(each.node)}" for each in found)
                raise RefusedError(f"{name}={self.value} stands in several places ({lines})")
        raise RefusedError(f"{name}={self.value} is not written in your files")

    def _given(self, syntax: Syntax, name: str) -> Iterator[Literal]:
        for argument in syntax.all(cst.Arg):
            if argument.keyword is not None and argument.keyword.value == name:
                yield from self._fitting(syntax, argument.value, name)
        for element in syntax.all(cst.DictElement):
            if isinstance(element.key, cst.SimpleString) and element.key.evaluated_value == name:
                yield from self._fitting(syntax, element.value, name)
        for assign in syntax.all(cst.Assign):
            for target in assign.targets:
                match target.target:
                    case cst.Attribute(attr=cst.Name(value=attr)) if attr == name:
                        yield from self._fitting(syntax, assign.value, name)
                    case cst.Name(value=variable) if variable == name and _is_global(syntax, assign):
                        yield from self._fitting(syntax, assign.value, name)

    def _defaults(self, syntax: Syntax, name: str) -> Iterator[Literal]:
        for annotated in syntax.all(cst.AnnAssign):
            if isinstance(annotated.target, cst.Name) and annotated.target.value == name and annotated.value:
                yield from self._fitting(syntax, annotated.value, name)
        for assign in syntax.all(cst.Assign):
            targets = [t.target.value for t in assign.targets if isinstance(t.target, cst.Name)]
            if targets == [name] and not _is_global(syntax, assign):
                yield from self._fitting(syntax, assign.value, name)
        for call in syntax.all(cst.Call):  # parser.add_argument("--vocab-size", default=50257)
            flags = [a.value.evaluated_value for a in call.args if isinstance(a.value, cst.SimpleString)]
            if any(str(flag).lstrip("-").replace("-", "_") == name for flag in flags):
                for argument in call.args:
                    if argument.keyword is not None and argument.keyword.value == "default":
                        yield from self._fitting(syntax, argument.value, name)

    def _fitting(self, syntax: Syntax, value: cst.BaseExpression, name: str) -> Iterator[Literal]:
        if isinstance(value, cst.Integer) and value.evaluated_value == self.value:
            yield Literal(syntax, value, name)


def _is_global(syntax: Syntax, node: cst.CSTNode) -> bool:
    return syntax.scope(node) is syntax.global_scope
