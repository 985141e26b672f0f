"""What is written into a program, by the rule that it answers."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from itertools import chain, takewhile

from tilefit.fixes.changes.fix import RefusedError, refuse
from tilefit.fixes.source.change import Change, keyword, switched_on, with_torch
from tilefit.fixes.source.file import Edit, SourceFile, last_line, names
from tilefit.fixes.source.loops import write_loop_at_once
from tilefit.fixes.source.program import Files
from tilefit.ops import Called, Program
from tilefit.ops.program import TO_GPU, TO_HOST
from tilefit.rules import Finding
from tilefit.rules.base import Context
from tilefit.rules.finding import SAFE
from tilefit.rules.outside.optimizer import unfused_updates

#: Optimizers that can be fused: what they are called in a program, by what they are called in a step.
_FUSIBLE = {name.lower(): name for name in ("Adam", "AdamW", "SGD", "Adagrad")}
#: Methods of a tensor by which it is written to, now or through an array of its memory.
_WRITES = re.compile(r"(.*[^_])?_|numpy")
#: A statement of a file, a model's name there, and whether what is done to it stands behind the statement.
Place = tuple[SourceFile, ast.stmt, str, bool]
#: Copies of so many bytes are numbers, which are made where they are used.
_NUMBER_BYTES = 8
#: What a file may set TF32 by.
_OF_TF32 = ("set_float32_matmul_precision", "allow_tf32", "fp32_precision")


# ---- the optimizer and the models --------------------------------------------------------------


def _fused(finding: Finding, context: Context, files: Files) -> Change:
    """``AdamW(model.parameters())``: with ``fused=True``; one beside it that cannot be fused stays."""
    wanted = [_FUSIBLE[name] for name in unfused_updates(context.step)]
    calls = files.calls_of(context.step.program.optimizers or ("",), *wanted)  # no line is refused
    for file, call in calls:
        if foreach := keyword(call, "foreach"):
            raise RefusedError(f"{file.where(call)} asks for foreach={ast.unparse(foreach)}")
    edits = switched_on(calls, "fused")
    refuse(not edits, "the optimizer is not made by a call of PyTorch's class, or asks for it already")
    return Change(edits, "fused=True", level=SAFE)


def _compiled(finding: Finding, context: Context, files: Files) -> Change:
    """``model.compile()`` before the optimizer: in place, so that checkpoints keep their names."""
    if any(each.name == "compile" for file in files.all() for each in file.all(ast.FunctionDef)):
        raise RefusedError("the program has a function called compile")
    return _of_models(context.step.program, files, "compile()")


def _channels_last(finding: Finding, context: Context, files: Files) -> Change:
    """``model.to(memory_format=torch.channels_last)`` before the optimizer, in place."""
    ranks = {len(p.shape) for p in context.step.parameters.values() if len(p.shape) > 3}
    refuse(len(ranks) != 1, "the model has convolutions in two and in three dimensions")
    layout = "channels_last" if 4 in ranks else "channels_last_3d"
    return _of_models(context.step.program, files, f"to(memory_format=torch.{layout})")


def _of_models(program: Program, files: Files, method: str) -> Change:
    """A statement ``model.method`` for each model that a step calls: before the statement that makes an
    optimizer, where the program has a name for the model there, else behind the one that names it.

    Raises:
        RefusedError: of no model it is known where.
    """
    edits: dict[tuple[SourceFile, str], list[Edit]] = {}
    left = ""
    for model in program.models or (Called(""),):  # which is refused
        place = _named if files.built_at else _beside_optimizer if model.name else _called
        try:
            file, statement, name, behind = place(model, files)
        except RefusedError as refused:
            left = refused.what
            continue
        line, imports = with_torch(file, f"{name}.{method}")
        edit = (file.behind if behind else file.before)(statement, line)
        edits.setdefault((file, name), [edit, *imports])
    refuse(not edits, left)
    summary = ", ".join(f"{name}.{method}" for _, name in edits)
    note = f"{left}, and it is left as it is" if left else ""
    return Change([*chain(*edits.values())], summary, note, SAFE)


def _beside_optimizer(model: Called, files: Files) -> Place:
    """The statement that makes an optimizer, before which the model is what it will be."""
    file, call = files.call_at(model.beside)
    return file, file.statement(call), model.name, False


def _named(model: Called, files: Files) -> Place:
    """The statement that makes a model and gives it a name."""
    file, line = files.line_at(files.built_at)
    match [each.targets for each in file.on_line(ast.Assign, line)]:
        case [[ast.Name(id=name) as target]]:
            return file, file.statement(target), name, True
    raise RefusedError(f"the model that line {line} of {file.name} makes is given no name there")


def _called(model: Called, files: Files) -> Place:
    """The last statement that names a model, where every call of it comes by."""
    file, call = files.call_at(model.call)
    assigned = file.bindings(call.func)[-1:]
    if assigned and not isinstance(assigned[0], ast.arg):
        statement = file.statement(assigned[0])
        if _comes_by(file, statement, call):
            return file, statement, ast.unparse(call.func), True
    raise RefusedError(f"the model that is called in {file.where(call)} is not made there")


def _comes_by(file: SourceFile, statement: ast.stmt, call: ast.Call) -> bool:
    """Whether a statement has run once when a call is made: it is the file's own, or that of the constructor
    whose attribute is called, or before it in a block around it, and in no loop."""
    match file.parents[statement]:
        case ast.Module():
            return True
        case ast.FunctionDef(name="__init__") as constructor if isinstance(call.func, ast.Attribute):
            return [*file.around(constructor, ast.ClassDef)] == [*file.around(call, ast.ClassDef)]
    before = file.start(statement) < file.start(call) < file.stop(file.onward(statement)[-1])
    return before and not any(file.around(statement, ast.For, ast.While))


# ---- the loop ----------------------------------------------------------------------------------


def _anomalies_unseen(finding: Finding, context: Context, files: Files) -> Change:
    """``set_detect_anomaly(True)``: False."""
    refuse(not finding.source, "no fix does it")  # an environment variable, a setting
    for file, call in files.calls_of([finding.source], "set_detect_anomaly"):
        match [*call.args, keyword(call, "mode")]:
            case [ast.Constant(value=True) as given, *_]:
                note = "a NaN in the backward pass is then no error"
                return Change([file.replaced(given, "False")], "set_detect_anomaly(False)", note)
    raise RefusedError(f"{finding.source} does not say set_detect_anomaly(True)")


def _sums_on_gpu(finding: Finding, context: Context, files: Files) -> Change:
    """``total += loss.item()``: ``total += loss.detach()``."""
    reads = (event for event in context.step.program.events if event.name in ("item", "float"))
    edits: list[Edit] = []
    for source in dict.fromkeys(event.site.source for event in reads):
        file, line = files.line_at(source)
        for statement in file.on_line(ast.AugAssign, line):
            if isinstance(statement.op, ast.Add):
                stops = map(file.stop, _items(statement.value))
                edits += [Edit(file, stop - len("item"), stop, "detach") for stop in stops]
    refuse(not edits, "the values are read for other things than a sum that is kept")
    note = "the sum is then a tensor on the GPU, with the loss's precision: float(total) where it is used"
    return Change(edits, "+= loss.detach()", note)


def _items(value: ast.expr) -> Iterator[ast.expr]:
    """What is called as ``x.item()`` in sums and products."""
    match value:
        case ast.BinOp(left=left, right=right):
            yield from (*_items(left), *_items(right))
        case ast.Call(func=ast.Attribute(attr="item") as method):
            yield method


# ---- copies ------------------------------------------------------------------------------------


def _copies_unwaited(finding: Finding, context: Context, files: Files) -> Change:
    """``DataLoader(…)``: with ``pin_memory=True``; ``x.to(device)``: with ``non_blocking=True``."""
    program = context.step.program
    copied: list[tuple[SourceFile, ast.Call]] = []
    read = {event.site.source for event in program.events if event.kind == TO_HOST}
    copies = [e for e in program.events if e.kind == TO_GPU and e.blocks and e.bytes > _NUMBER_BYTES]
    for source in dict.fromkeys(event.site.source for event in copies if not event.non_blocking):
        calls = files.calls_of([source], "to", "cuda")
        own = [(file, call) for file, call in calls if "cpu" not in ast.unparse(call)]
        refuse(source in read or not own, f"it is not clear which calls in {source} copy to the GPU")
        copied += own
    made = files.calls_of((loader.source for loader in program.loaders), "DataLoader")
    pinned, unwaited = switched_on(made, "pin_memory"), switched_on(copied, "non_blocking")
    refuse(not pinned + unwaited, "the batches come from no DataLoader of yours")
    summary = "pin_memory=True, non_blocking=True" if pinned else "non_blocking=True"
    if all(_of_batch(file, call) for file, call in copied):
        return Change(unwaited + pinned, summary, level=SAFE)
    note = "what is copied must not be a tensor of the GPU's, nor be written to meanwhile"
    return Change(unwaited + pinned, summary, note)


def _of_batch(file: SourceFile, call: ast.Call) -> bool:
    """Whether what is copied is what a loop over batches gives, so that nobody writes to it on the host."""
    copied = names(call.func)
    loops = file.around(call, ast.For, ast.ListComp, ast.DictComp, ast.GeneratorExp)
    targets = (part.target for loop in loops for part in getattr(loop, "generators", [loop]))
    return bool(copied & names(*targets)) and not copied & names(*_written_to(file))


def _written_to(file: SourceFile) -> Iterator[ast.expr]:
    """The tensors that a file writes into, or makes arrays of the memory of."""
    for node in ast.walk(file.tree):
        match node:
            case ast.Call(func=ast.Attribute(value=tensor, attr=method)) if _WRITES.fullmatch(method):
                yield tensor
            case ast.keyword(arg="out", value=tensor) | ast.AugAssign(target=tensor):
                yield tensor
            case ast.Subscript(value=tensor, ctx=ast.Store()):
                yield tensor


# ---- precision ---------------------------------------------------------------------------------


def _autocast(finding: Finding, context: Context, files: Files) -> Change:
    """``with torch.autocast("cuda", dtype=torch.bfloat16):`` around the statements from the model's call to
    the one before ``backward``.

    Raises:
        RefusedError: it is not clear where that is, or takes more than a block.
    """
    refuse(not context.gpu.supports("bf16"), "fp16 needs a GradScaler in the training loop")
    file, call = files.call_at(next((each.call for each in context.step.program.models), ""))
    statements = _statements(file, call)
    header, imports = with_torch(file, 'with torch.autocast("cuda", dtype=torch.bfloat16):')
    edits = [*_within(file, header, statements), *imports]
    return Change(edits, header, "products run in bf16: the same training but for rounding")


def _statements(file: SourceFile, call: ast.Call) -> list[ast.stmt]:
    """The statements from the model's call to the one before ``backward``, as far as what that is called on
    is set there; without it, to the return."""
    block = file.onward(file.statement(call))
    for index, statement in enumerate(block):
        if any(getattr(each, "attr", "") == "backward" for each in ast.walk(statement)):
            shared = index == 0 or last_line(block[index - 1]) == statement.lineno
            refuse(shared, f"forward and backward share line {statement.lineno}: write them apart")
            setting = [n for n in range(index) if names(block[n], of=ast.Store) & names(statement)]
            return block[: max(setting, default=index - 1) + 1]
    if not isinstance(block[-1], ast.Return):
        raise RefusedError("it is not clear where the loss ends: there is no backward() in the same block")
    return block


def _within(file: SourceFile, header: str, statements: list[ast.stmt]) -> Iterator[Edit]:
    """The edits that put statements in a block with a header."""
    yield file.before(statements[0], header)
    indented = (file.indentation(statement.lineno) for statement in file.all(ast.stmt))
    one_level = next(filter(None, indented), 4 * " ")
    # In lines that begin within a string, blanks would be the string's.
    nodes = (node for statement in statements for node in ast.walk(statement))
    strings = (node for node in nodes if isinstance(node, ast.Constant | ast.JoinedStr))
    kept = {line for node in strings for line in range(node.lineno + 1, last_line(node) + 1)}
    for line in range(statements[0].lineno, last_line(statements[-1]) + 1):
        if line not in kept and file.lines[line - 1].strip():
            at = file.offset(line, len(file.indentation(line)))
            yield Edit(file, at, at, one_level)


def _tf32(finding: Finding, context: Context, files: Files) -> Change:
    """``torch.set_float32_matmul_precision("high")`` behind the imports that the main file begins with.

    Raises:
        RefusedError: a file of the program's seems to do so in a part that is not captured.
    """
    for each in files.all():
        for node in each.all(ast.Attribute):
            refuse(node.attr in _OF_TF32, f"{each.where(node)} does so already: tell with --tf32")
    file = files.file(files.main)
    head = takewhile(lambda each: isinstance(each, ast.Import | ast.ImportFrom | ast.Expr), file.tree.body)
    last = [each for each in head if not isinstance(each, ast.Expr)][-1:]
    refuse(not last, f"{file.name} does not begin with imports")
    statement, imports = with_torch(file, 'torch.set_float32_matmul_precision("high")')
    edits = [file.behind(last[0], file.new_line(last[0]) + statement), *imports]
    return Change(edits, statement, "fp32 products round their factors to 10 bits of mantissa")


#: ``(finding, context, files)`` to the change; raises ``RefusedError`` where it is not clear what to write.
Write = Callable[[Finding, Context, Files], Change]
#: What is written into files, by the rule that it answers. A change is safe only where the program computes
#: the same for every input.
WRITERS: dict[str, Write] = {
    "ANO001": _anomalies_unseen,
    "FOR001": write_loop_at_once,
    "LAY001": _channels_last,
    "NTC001": _compiled,
    "NTC003": _fused,
    "PRC001": _tf32,
    "PRC002": _autocast,
    "SYN001": _sums_on_gpu,
    "SYN002": _copies_unwaited,
}
#: Into the files of a target that is a model or a function: it is captured on shapes, where none is compiled.
WRITERS_OF_LOADED = {code: WRITERS[code] for code in ("LAY001", "NTC003", "PRC001", "PRC002")}
