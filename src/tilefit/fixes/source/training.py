"""What is written into a program: found by the lines that were seen when it ran."""

from __future__ import annotations

import ast
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain, zip_longest
from pathlib import Path
from typing import NamedTuple

import libcst as cst
from libcst.metadata import Assignment

from tilefit.fixes.changes.fix import RefusedError, refuse
from tilefit.fixes.source.change import Change, Write, imported, keyword
from tilefit.fixes.source.file import Edit
from tilefit.fixes.source.program import Files
from tilefit.fixes.source.settings import (
    FUSIBLE,
    autocast_around,
    fused,
    layout_call,
    switched_on,
    write_tf32,
)
from tilefit.fixes.source.syntax import Syntax
from tilefit.ops import Step
from tilefit.ops.program import TO_GPU, TO_HOST
from tilefit.rules import Finding
from tilefit.rules.base import Context
from tilefit.rules.finding import SAFE, UNSAFE
from tilefit.rules.outside.optimizer import unfused_updates

_NO_OPTIMIZERS = ("torch.optim.lr_scheduler.", "torch.optim.swa_utils.")
_LOADERS = {f"torch.utils.data.{module}DataLoader" for module in ("", "dataloader.")}
#: Copies of so many bytes are numbers, which are made where they are used.
_NUMBER_BYTES = 8


def files_of(step: Step, main: Path) -> Files:
    """The files of the program that a step was seen in."""
    program = step.program
    sources = chain(
        (entry.site.source for entry in step.ops),
        (event.site.source for event in program.events),
        (*program.optimizers, *(loader.source for loader in program.loaders)),
        (call.rpartition(":")[0] for call in program.models),
    )
    return Files(main, [Path(name) for name in dict.fromkeys(s.rpartition(":")[0] for s in sources) if name])


# ---- the optimizer and the model ---------------------------------------------------------------


def _fused(finding: Finding, context: Context, files: Files) -> Change:
    """``AdamW(model.parameters())``: with ``fused=True``; one beside it that cannot be fused stays."""
    wanted = {FUSIBLE[name] for name in unfused_updates(context.step)}
    calls = [(s, call) for s, call in _optimizers(context, files, beside=True) if s.means(call.func) & wanted]
    refuse(not calls, "the optimizer is not made by a call of PyTorch's class")
    return fused(files, calls)


def _optimizers(context: Context, files: Files, *, beside: bool = False) -> list[tuple[Syntax, cst.Call]]:
    """The calls that make the optimizers of the step; those ``beside`` PyTorch's may be passed over.

    Raises:
        RefusedError: one is not found in the user's files.
    """
    found = []
    for source in context.step.program.optimizers:
        syntax, line = _at(source, files)
        calls = [
            call
            for call in _calls(syntax, line)
            if any(name.startswith("torch.optim.") for name in syntax.means(call.func))
            if not any(name.startswith(_NO_OPTIMIZERS) for name in syntax.means(call.func))
        ]
        refuse(not calls and not beside, f"{source} does not call a class of torch.optim")
        found += [(syntax, call) for call in calls]
    return found


def _compiled(finding: Finding, context: Context, files: Files) -> Change:
    """``model.compile()`` behind the optimizer: in place, so that checkpoints keep their names."""
    if any(f.name.value == "compile" for s in files.syntaxes() for f in s.all(cst.FunctionDef)):
        raise RefusedError("the program has a function called compile")
    return _of_models(context, files, "compile()", behind=True)


def _channels_last(finding: Finding, context: Context, files: Files) -> Change:
    """``model.to(memory_format=torch.channels_last)`` before the optimizer, in place."""
    ranks = {len(p.shape) for p in context.step.parameters.values() if len(p.shape) > 3}
    return _of_models(context, files, layout_call(ranks, "torch"), behind=False)


def _of_models(context: Context, files: Files, method: str, *, behind: bool) -> Change:
    """Statements ``model.method``: beside those that make the optimizers of each model that is asked for its
    parameters there, and behind those that make the models that no optimizer steps."""
    places = [*beside_optimizers(context, files, behind)]
    note = ""
    calls = context.step.program.models or ("",)  # which is refused
    for call in calls[bool(places) :]:
        try:
            places.append(where_made(call, files))
        except RefusedError as refused:
            if not places:
                raise
            note = f"{refused.what}, and it is left as it is"
    models = dict.fromkeys((place.syntax, name) for place in places for name in place.models)
    summary = ", ".join(f"{name}.{method}" for _, name in models)

    def lines(name: str, syntax: Syntax) -> list[str]:
        return [f"{name}.{method}".replace("torch.", f"{imported(syntax, 'torch')[0]}.")]

    return statements(places, lines, summary, ["torch"] * ("torch." in method), note)


class Place(NamedTuple):
    """A statement, the models that are known there, and whether it is to be done behind the statement."""

    syntax: Syntax
    statement: cst.SimpleStatementLine
    models: list[str]
    after: bool


def statements(
    places: Iterable[Place],
    lines: Callable[[str, Syntax], Iterable[str]],
    summary: str,
    needed: Iterable[str] = (),
    note: str = "",
) -> Change:
    """Statements of models beside those that are there, once for each model.

    Args:
        places: Where.
        lines: Of the statements, by the model's name and the file; tabs stand for its indentation.
        summary, note: Of the change.
        needed: Modules that they need.
    """
    edits: dict[tuple[Syntax, Edit], None] = {}
    done: dict[tuple[Syntax, str], int] = {}
    for syntax, statement, models, after in places:
        begin = syntax.line(statement)
        at = syntax.line_end(statement) if after else syntax.file.line_starts[begin - 1]
        newline, indentation = syntax.file.newline_after(at), syntax.indentation(begin)
        new = [name for name in models if (syntax, name) not in done]
        own = [line.replace("\t", syntax.tree.default_indent) for name in new for line in lines(name, syntax)]
        text = "".join(
            f"{newline}{indentation}{each}" if after else f"{indentation}{each}{newline}" for each in own
        )
        if new:
            edits |= dict.fromkeys(edit for module in needed for edit in imported(syntax, module)[1])
            edits[syntax, Edit(at, at, text)] = None
        done |= dict.fromkeys(((syntax, name) for name in new), syntax.file.line_of(at) + after)
    return Change.of(edits, next(iter(done.values())), summary, note, SAFE)


def beside_optimizers(context: Context, files: Files, behind: bool) -> Iterator[Place]:
    """Statements that ask models for their parameters to make the optimizers of the step.

    Raises:
        RefusedError: they are not found, or it is not clear what a model is called there.
    """
    for syntax, call in _optimizers(context, files):
        files.require_own(syntax)
        statement = syntax.around(call, cst.SimpleStatementLine)
        given = [*_given(syntax, call)]
        calls = (each for node in given for each in syntax.all(cst.Call, node))
        models = {_whole(name, context, files): None for each in calls if (name := _asked(syntax, each))}
        loops = (loop for node in given for loop in syntax.all(cst.CompFor, node))
        each_of_many = [name.value for loop in loops for name in syntax.all(cst.Name, loop.target)]
        if statement is None or not models or models.keys() & set(each_of_many):
            raise RefusedError(
                "it is not clear what the model is called: no optimizer gets model.parameters()"
            )
        # Behind a return nothing runs.
        yield Place(syntax, statement, [*models], behind and not any(syntax.all(cst.Return, statement)))


def _whole(name: str, context: Context, files: Files) -> str:
    """Of a part, ``net.conv``, of a model that is called the model, ``net``; of a replica what it wraps."""
    for source in filter(None, context.step.program.models):
        try:
            syntax, call = _call(source, files)
        except RefusedError:
            continue
        called = syntax.code(call.func)
        if (part := name.removeprefix(f"{called}.")) != name:
            return f"{called}.module" if part.partition(".")[0] == "module" else called
    return name


def _given(syntax: Syntax, call: cst.Call) -> Iterator[cst.CSTNode]:
    """A call and what it is given by name: what was assigned to the names before it, and what loops run over
    that append to them."""
    waiting: list[cst.CSTNode] = [call]
    names: set[str] = set()
    while waiting:
        yield (node := waiting.pop(0))
        for name in syntax.all(cst.Name, node):
            if name.value in names or syntax.start(name) >= syntax.stop(call):
                continue
            names.add(name.value)
            assigned = (syntax.around(each.node, cst.Assign) for each in _assigned(syntax, name))
            waiting += [each for each in assigned if each and syntax.stop(each) <= syntax.start(call)]
            appended = (
                syntax.around(each, cst.For)
                for each in syntax.all(cst.Attribute)
                if syntax.code(each) in (f"{name.value}.append", f"{name.value}.extend")
            )
            waiting += [loop.iter for loop in appended if loop and syntax.stop(loop) <= syntax.start(call)]


def _assigned(syntax: Syntax, name: cst.Name) -> list[Assignment]:
    try:
        return syntax.assignments(name.value, syntax.scope(name))
    except KeyError:  # a keyword of a call, or an attribute
        return []


def where_made(source: str, files: Files) -> Place:
    """The last statement that names a model, where every call of it comes by.

    Args:
        source: Where a call of it ends: ``train.py:41:17``.
        files: Of the program.

    Raises:
        RefusedError: there is none.
    """
    syntax, call = _call(source, files)
    if isinstance(call.func, cst.Name):
        name = call.func.value
        assigned = [each.node for each in syntax.assignments(name, syntax.scope(call))]
        made = [syntax.around(node, cst.SimpleStatementLine) for node in sorted(assigned, key=syntax.start)]
        if made and made[-1] is not None and _comes_by(syntax, made[-1], call):
            return Place(syntax, made[-1], [name], True)
    where = f"line {syntax.line(call)} of {syntax.file.name}"
    raise RefusedError(f"the model that is called in {where} is not made there")


def _comes_by(syntax: Syntax, statement: cst.CSTNode, call: cst.CSTNode) -> bool:
    """Whether a statement has run once when a call is made: it is the file's own, or before it in a block
    around it, and in no loop."""
    block = syntax.parent(statement)
    if isinstance(block, cst.Module):
        return True
    loops = (cst.For, cst.While)
    before = syntax.start(statement) < syntax.start(call) < syntax.stop(block)
    return before and not any(syntax.around(statement, kind) for kind in loops)


def _asked(syntax: Syntax, call: cst.Call) -> str:
    """What a call asks for its parameters; empty where it does not."""
    match call.func:
        case cst.Attribute(value=model, attr=cst.Name(value="parameters" | "named_parameters")):
            return syntax.code(model)
    return ""


def _autocast(finding: Finding, context: Context, files: Files) -> Change:
    return autocast_around(context, files, *_call(next(iter(context.step.program.models), ""), files))


# ---- the loop ----------------------------------------------------------------------------------


def _turned(function: str, argument: str, old: str, note: str) -> Write:
    """What writes the other of two values for an argument in the line of a finding."""

    def write(finding: Finding, context: Context, files: Files) -> Change:
        syntax, line = _at(finding.source, files)
        for call in _calls(syntax, line):
            names = {name.rpartition(".")[2] for name in syntax.means(call.func)}
            is_method = isinstance(call.func, cst.Attribute) and call.func.attr.value == function
            given = keyword(call, argument) or next(iter(call.args), None)
            if (is_method or function in names) and given and syntax.code(given.value) == old:
                new = str(old != "True")
                word = f"{argument}=" if given.keyword else ""
                edit = syntax.replaced(given.value, new)
                return Change.of([(syntax, edit)], line, f"{function}({word}{new})", note)
        raise RefusedError(f"line {line} of {syntax.file.name} does not say {function}({old})")

    return write


def _sums_on_gpu(finding: Finding, context: Context, files: Files) -> Change:
    """``total += loss.item()``: ``total += loss.detach()``."""
    events = context.step.program.events
    edits = [
        (syntax, syntax.replaced(call.func.attr, "detach"))
        for source in dict.fromkeys(e.site.source for e in events if e.name in ("item", "float"))
        for syntax, line in (_at(source, files),)
        for statement in syntax.all(cst.AugAssign)
        if syntax.line(statement) == line and isinstance(statement.operator, cst.AddAssign)
        for call in syntax.all(cst.Call, statement)
        if isinstance(call.func, cst.Attribute) and call.func.attr.value == "item" and not call.args
        if all(isinstance(each, cst.BinaryOperation) for each in _between(syntax, call, statement))
    ]
    refuse(not edits, "the values are read for other things than a sum that is kept")
    note = "the sum is then a tensor on the GPU, with the loss's precision: float(total) where it is used"
    syntax, first = edits[0]
    return Change.of(edits, syntax.file.line_of(first.start), "+= loss.detach()", note)


def _between(syntax: Syntax, node: cst.CSTNode, outer: cst.CSTNode) -> Iterator[cst.CSTNode]:
    """The nodes around one, up to another."""
    while (node := syntax.parent(node)) is not outer:
        yield node


def _copies_unwaited(finding: Finding, context: Context, files: Files) -> Change:
    """``DataLoader(…)``: with ``pin_memory=True``; ``x.to(device)``: with ``non_blocking=True``."""
    program = context.step.program
    edits: list[tuple[Syntax, Edit]] = []
    level = SAFE
    read = {event.site.source for event in program.events if event.kind == TO_HOST}
    copies = [e for e in program.events if e.kind == TO_GPU and e.blocks and e.bytes > _NUMBER_BYTES]
    for source in dict.fromkeys(event.site.source for event in copies if not event.non_blocking):
        syntax, line = _at(source, files)
        calls = [call for call in _calls(syntax, line) if _copies(syntax, call)]
        refuse(source in read or not calls, f"it is not clear which calls in {source} copy to the GPU")
        if not all(_of_batch(syntax, call) for call in calls):
            level = UNSAFE
        edits += [(syntax, e) for call in calls if (e := switched_on(syntax, call, "non_blocking"))]
    pinned = [_pinned(source, files) for source in dict.fromkeys(e.source for e in program.loaders)]
    edits += filter(None, pinned)
    refuse(not edits, "the batches come from no DataLoader of yours")
    warning = "what is copied must not be a tensor of the GPU's, nor be written to meanwhile"
    summary = "pin_memory=True, non_blocking=True" if any(pinned) else "non_blocking=True"
    syntax, first = edits[0]
    note = "" if level == SAFE else warning
    return Change.of(edits, syntax.file.line_of(first.start), summary, note, level)


def _copies(syntax: Syntax, call: cst.Call) -> bool:
    """Whether a call is ``x.to(device)`` or ``x.cuda()``, and names no other place."""
    if not isinstance(call.func, cst.Attribute) or call.func.attr.value not in ("to", "cuda"):
        return False
    return "cpu" not in syntax.code(call) and not any(argument.star for argument in call.args)


def _of_batch(syntax: Syntax, call: cst.Call) -> bool:
    """Whether what is copied is what a loop over batches gives, so that nobody writes to it on the host."""
    assert isinstance(call.func, cst.Attribute)
    names = {name.value for name in syntax.all(cst.Name, call.func.value)}
    targets: list[cst.CSTNode] = []
    node: cst.CSTNode = call
    while (loop := syntax.around(node, cst.For)) is not None:
        targets.append(loop.target)
        node = loop
    for kind in (cst.ListComp, cst.DictComp, cst.GeneratorExp):
        if (made := syntax.around(call, kind)) is not None:
            targets.append(made.for_in.target)
    given = {name.value for target in targets for name in syntax.all(cst.Name, target)}
    return bool(names & given) and not _written_in_place(syntax, names)


def _written_in_place(syntax: Syntax, names: Collection[str]) -> bool:
    """Whether the file writes into a tensor of one of these names, or makes an array of its memory."""
    for call in syntax.all(cst.Call):
        match call.func:
            case cst.Attribute(value=cst.Name(value=name), attr=cst.Name(value=method)):
                writes = method.endswith("_") and not method.endswith("__")
                if name in names and (writes or method == "numpy"):
                    return True
    targets: Iterator[cst.CSTNode] = chain(
        (out.value for call in syntax.all(cst.Call) if (out := keyword(call, "out"))),
        (each.target for each in syntax.all(cst.AugAssign)),
        (each.target for each in syntax.all(cst.AssignTarget) if isinstance(each.target, cst.Subscript)),
    )
    return any(name.value in names for target in targets for name in syntax.all(cst.Name, target))


def _pinned(source: str, files: Files) -> tuple[Syntax, Edit] | None:
    """The edit that has a loader pin its batches; None where it does."""
    syntax, line = _at(source, files)
    calls = [each for each in _calls(syntax, line) if syntax.means(each.func) & _LOADERS]
    refuse(len(calls) != 1, f"{source} does not call DataLoader once")
    if any(argument.star == "**" for argument in calls[0].args):
        raise RefusedError(f"the loader in {source} gets arguments that stand elsewhere")
    edit = switched_on(syntax, calls[0], "pin_memory")
    return None if edit is None else (syntax, edit)


def _loop_at_once(finding: Finding, context: Context, files: Files) -> Change:
    """A loop over parameters: as multi-tensor operations."""
    syntax, line = _at(finding.source, files)
    loops = [each for each in syntax.all(cst.For) if _lies_in(syntax, line, each)]
    refuse(not loops, f"line {line} of {syntax.file.name} is in no loop")
    torch, imports = imported(syntax, "torch")
    loop = loops[-1]
    between = f"{syntax.file.newline_after(syntax.start(loop))}{syntax.indentation(syntax.line(loop))}"
    edit = syntax.replaced(loop, between.join(at_once(syntax.code(loop), torch)))
    summary = f"{torch}._foreach_… for the loop"
    return Change.of([*imports, (syntax, edit)], syntax.line(loop), summary, level=SAFE)


#: In-place methods of tensors that ``torch._foreach_`` has under the same name.
_METHODS = frozenset(
    "mul_ add_ sub_ div_ lerp_ addcmul_ addcdiv_ clamp_min_ clamp_max_ copy_ neg_ zero_".split()
)
#: What arithmetic on tensors is called there, and whether its sides may change places.
_OPERATORS = {
    ast.Add: ("add", True),
    ast.Mult: ("mul", True),
    ast.Sub: ("sub", False),
    ast.Div: ("div", False),
}


def at_once(loop: str, torch: str) -> Iterator[str]:
    """The statements that do to all tensors at once what the body of a loop does to each.

    ``for a, b in zip(x.parameters(), y.parameters()): a.mul_(d).add_(b, alpha=1 - d)``, or
    ``a.copy_(d * a + (1 - d) * b)``.

    Raises:
        RefusedError: the loop is another.
    """
    match ast.parse(loop).body:
        case [ast.For(body=[ast.Expr(value=call)], orelse=[], target=target, iter=over)]:
            lists = _lists(loop, target, over)
        case _:
            raise RefusedError("the loop does more than one thing")
    operations: list[tuple[str, Sequence[ast.AST]]] = []
    while isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute):
        name, given = call.func.attr, [*call.args, *call.keywords]
        if name == "clamp_" and len(call.args) == len(given) == 2:
            operations[:0] = [("clamp_min_", given[:1]), ("clamp_max_", given[1:])]
        else:
            refuse(name not in _METHODS, f"there is no multi-tensor form of {name}")
            operations.insert(0, (name, given))
        call = call.func.value
    written_to = _listed(call, lists)
    refuse(not written_to, "the loop writes to something else than the tensors it goes over")
    for name, own in operations:
        arguments = [written_to]
        for argument in own:
            arguments.append(_of_all(argument, lists, torch) or str(ast.get_source_segment(loop, argument)))
        yield f"{torch}._foreach_{name}({', '.join(arguments)})"


def _of_all(value: ast.AST, lists: Mapping[str, str], torch: str) -> str:
    """The list of what an expression is for each tensor; empty where it is the same for all."""
    if listed := _listed(value, lists):
        return listed
    names = {node.id for node in ast.walk(value) if isinstance(node, ast.Name)}
    if not names & lists.keys() and _is_steady(value):
        return ""
    match value:
        case ast.BinOp(left=left, op=operator, right=right) if type(operator) in _OPERATORS:
            name, turns = _OPERATORS[type(operator)]
            sides = [_of_all(side, lists, torch) for side in (left, right)]
            if turns and not sides[0]:
                (left, right), sides = (right, left), sides[::-1]
            if sides[0]:
                return f"{torch}._foreach_{name}({sides[0]}, {sides[1] or ast.unparse(right)})"
    raise RefusedError("what it adds depends on each tensor")


def _lists(loop: str, target: ast.expr, over: ast.expr) -> dict[str, str]:
    """What each name of a loop goes over: calls of ``parameters()``, which may be asked twice."""
    match target, over:
        case ast.Tuple(elts=names), ast.Call(func=ast.Name(id="zip"), args=lists, keywords=[]):
            pairs = list(zip_longest(names, lists))
        case _:
            pairs = [(target, over)]
    found = {}
    for pair in pairs:
        match pair:
            case (
                ast.Name(id=name),
                ast.Call(func=ast.Attribute(attr="parameters", value=owner), args=[], keywords=[]) as asked,
            ) if _is_steady(owner):
                found[name] = str(ast.get_source_segment(loop, asked))
            case _:
                raise RefusedError("the loop is not over parameters() alone")
    return found


#: Functions that say the same whenever they are asked.
_STEADY = frozenset("abs float int len max min pow".split())


def _is_steady(node: ast.AST) -> bool:
    """Whether code may be run once or twice in place of once for each tensor: it calls nothing of others."""
    acting = ast.Call | ast.NamedExpr | ast.Await | ast.Yield | ast.YieldFrom
    found = [each for each in ast.walk(node) if isinstance(each, acting)]
    return all(isinstance(each, ast.Call) and getattr(each.func, "id", "") in _STEADY for each in found)


def _listed(tensor: ast.AST, lists: Mapping[str, str]) -> str:
    """The list of what ``p``, ``p.data`` or ``p.detach()`` is one of; empty for what else there may be."""
    name, _, part = ast.unparse(tensor).partition(".")
    if name not in lists or part not in ("", "data", "detach()"):
        return ""
    return f"[each.data for each in {lists[name]}]" if part else f"list({lists[name]})"


# ---- places ------------------------------------------------------------------------------------


def _at(source: str, files: Files) -> tuple[Syntax, int]:
    """The file and the line of ``train.py:41``.

    Raises:
        RefusedError: it is not the user's to change.
    """
    name, _, line = source.rpartition(":")
    refuse(not name, "which line makes it so is not known")
    refuse(not Path(name).is_file(), f"{source} is no file of yours")
    syntax = files.syntax(name)
    files.require_own(syntax)
    return syntax, int(line)


def _call(source: str, files: Files) -> tuple[Syntax, cst.Call]:
    """The file and the call that ends at ``train.py:41:17``.

    Raises:
        RefusedError: it is not the user's to change, or not there.
    """
    source, _, column = source.rpartition(":")
    syntax, line = _at(source, files)
    call = syntax.call_ending(line, int(column))
    if call is None:
        raise RefusedError(f"the model's call is not found in line {line} of {syntax.file.name}")
    return syntax, call


def _lies_in(syntax: Syntax, line: int, node: cst.CSTNode) -> bool:
    return syntax.line(node) <= line <= syntax.file.line_of(syntax.stop(node))


def _calls(syntax: Syntax, line: int) -> Sequence[cst.Call]:
    """The calls that a line is a part of, the outermost first."""
    return [call for call in syntax.all(cst.Call) if _lies_in(syntax, line, call)]


#: What is written into a program, by the rule that it answers. A change is safe only where the
#: program computes the same for every input.
WRITERS: dict[str, Write] = {
    "ANO001": _turned("set_detect_anomaly", "mode", "True", "a NaN in the backward pass is then no error"),
    "FOR001": _loop_at_once,
    "GRD001": _turned(
        "zero_grad",
        "set_to_none",
        "False",
        "a parameter that gets no gradient in a step is then passed over, not stepped with zeros",
    ),
    "LAY001": _channels_last,
    "NTC001": _compiled,
    "NTC003": _fused,
    "PRC001": write_tf32,
    "PRC002": _autocast,
    "SYN001": _sums_on_gpu,
    "SYN002": _copies_unwaited,
}
