"""Where the number behind an argument is written: the literal, through names, parameters and attributes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import libcst as cst
from libcst.metadata import Assignment, ClassScope

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
        raise RefusedError(f"a library makes it ({Path(caller.path).name}), whose files stay as they are")
    syntax = program.syntax(caller.path)
    call = syntax.call_ending(*caller.end) if caller.end else None
    if call is None:
        raise RefusedError(f"the call in line {caller.line} of {syntax.file.name} is not found there")
    return syntax, call


class OtherValueError(RefusedError):
    """An expression has its value from a literal, and it is another."""


class Origin(NamedTuple):
    """Where a value comes from.

    Attributes:
        syntax: The file.
        expression: What gives it, no name or parameter itself.
        at: Index of the call in whose function it is evaluated.
        name: The last name it went by; may be empty.
    """

    syntax: Syntax
    expression: cst.BaseExpression
    at: int
    name: str


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
        origin = self._origin(Origin(syntax, expression, at, name))
        match origin.expression:
            case cst.Integer() as node:
                if node.evaluated_value != self.value:
                    raise OtherValueError(f"{origin.syntax.code(node)} is not {self.value}")
                return Literal(origin.syntax, node, origin.name)
            case cst.Attribute(value=owner, attr=attr):
                return self._held(origin, owner, attr.value)
            case cst.Subscript(
                value=owner, slice=[cst.SubscriptElement(slice=cst.Index(value=cst.SimpleString() as key))]
            ):
                return self._held(origin, owner, str(key.evaluated_value))
        raise RefusedError(f"{origin.syntax.code(origin.expression)} is not a plain number")

    def _origin(self, value: Origin) -> Origin:
        """The value, followed through names, parameters and ``self``."""
        while True:
            match value.expression:
                case cst.Name():
                    followed = self._named(value)
                case cst.Attribute(value=cst.Name(value="self"), attr=attr):
                    followed = self._of_self(value, attr.value)
                case _:
                    return value
            if followed is None:
                return value
            value = followed

    def _named(self, value: Origin) -> Origin | None:
        """What a name is set to; None for an imported one, which is an attribute of another file."""
        syntax, expression, at, _ = value
        assert isinstance(expression, cst.Name)
        name = expression.value
        found = syntax.assignments(name, syntax.scope(expression))
        if len(found) != 1:
            raise RefusedError(f"{name} is set in {len(found) or 'no'} places of {syntax.file.name}")
        (assigned,) = found
        if isinstance(assigned.node, cst.Param):
            return self._parameter(syntax, assigned.node, at)
        if isinstance(assigned.node, cst.Import | cst.ImportFrom):
            return self._imported(name)
        result = syntax.value_of(assigned)
        if result is None:
            raise RefusedError(f"{name} is not set to one value")
        return Origin(syntax, result, at, name)

    def _imported(self, name: str) -> Origin:
        """The global of this name in another of the program's files."""
        values = [
            Origin(syntax, value, len(self.chain), name)
            for syntax in self.program.syntaxes()
            for assigned in syntax.global_scope[name]
            if isinstance(assigned, Assignment) and (value := syntax.value_of(assigned)) is not None
        ]
        if len(values) != 1:
            raise RefusedError(f"{name} is set in {len(values) or 'none'} of your files")
        return values[0]

    def _parameter(self, syntax: Syntax, parameter: cst.Param, at: int) -> Origin:
        """The argument a parameter was called with, or its default."""
        parameters = syntax.around(parameter, cst.Parameters)
        function = syntax.parent(parameters) if parameters else None
        name = parameter.name.value
        if not isinstance(function, cst.FunctionDef):
            raise RefusedError(f"{name} is a lambda's")
        while at < len(self.chain) and not self._runs(at, syntax, function):
            at += 1
        if at >= len(self.chain):
            raise RefusedError(f"nobody is seen calling {function.name.value}")
        is_target = at + 1 == len(self.chain)  # which is called without arguments
        given = None if is_target else self._argument(syntax, function, parameter, at + 1)
        if given is not None:
            return Origin(*given, at + 1, name)
        if parameter.default is None:
            raise RefusedError(f"{name} is passed in a way that hides it")
        return Origin(syntax, parameter.default, at + 1, name)

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
        is_method = isinstance(syntax.scope(function), ClassScope)
        place = names.index(parameter.name.value) - is_method if parameter.name.value in names else None
        for index, argument in enumerate(call.args):
            if argument.star:
                raise RefusedError(f"{caller.code(call)} hides its arguments")
            is_it = argument.keyword.value == parameter.name.value if argument.keyword else index == place
            if is_it:
                return caller, argument.value
        return None

    def _of_self(self, value: Origin, name: str) -> Origin | None:
        """What ``self.name`` is set to in its class; None where that is not one expression."""
        owner = value.syntax.around(value.expression, cst.ClassDef)
        values = [
            assign.value
            for assign in (value.syntax.all(cst.Assign, owner) if owner else ())
            for target in assign.targets
            if isinstance(target.target, cst.Attribute)
            and isinstance(target.target.value, cst.Name)
            and (target.target.value.value, target.target.attr.value) == ("self", name)
        ]
        return Origin(value.syntax, values[0], value.at, name) if len(values) == 1 else None

    def _held(self, value: Origin, owner: cst.BaseExpression, name: str) -> Literal:
        """What an object holds under a name: an argument of the call that made it, or its class's default.

        Where the object's making is not seen, the one place in the files that gives the name the value.
        """
        try:
            holder = self._origin(Origin(value.syntax, owner, value.at, ""))
        except RefusedError:
            return self.anywhere(name)
        match holder.expression:
            case cst.Call(func=maker, args=arguments):
                for argument in arguments:
                    if argument.keyword is not None and argument.keyword.value == name:
                        return self.literal(holder.syntax, argument.value, holder.at, name)
                made = holder.syntax.code(maker).rpartition(".")[2]
                defaults = [
                    literal
                    for syntax in self.program.syntaxes()
                    for literal in self._defaults(syntax, name)
                    if (around := syntax.around(literal.node, cst.ClassDef)) and around.name.value == made
                ]
                if len(defaults) == 1:
                    return defaults[0]
            case cst.Dict(elements=elements):
                for element in elements:
                    if isinstance(element, cst.DictElement) and _is_text(element.key, name):
                        return self.literal(holder.syntax, element.value, holder.at, name)
        return self.anywhere(name)

    def anywhere(self, name: str) -> Literal:
        """The one place in the program's files that gives something of this name the value.

        A value that is passed or assigned goes before a default.

        Raises:
            RefusedError: there is none, or several.
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
            if _is_text(element.key, name):
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


def _is_text(node: cst.BaseExpression, text: str) -> bool:
    return isinstance(node, cst.SimpleString) and node.evaluated_value == text


def _is_global(syntax: Syntax, node: cst.CSTNode) -> bool:
    return syntax.scope(node) is syntax.global_scope
