"""Where an operation comes from: its module and its line of source."""

from __future__ import annotations

import os
import sys
import traceback
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from itertools import islice
from types import CodeType, FrameType, ModuleType
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch.nn.modules import module as nn_module

from tilefit.capture.packages import library_folder
from tilefit.ops import Called, Fallback, Op, Site
from tilefit.ops.step import maker

_HERE = os.path.dirname(os.path.abspath(__file__))
_DRIVER = os.path.join(_HERE, "run.py")
#: What calls the user's code to make a target: who called that is no line of theirs.
_LOADERS = os.path.join(_HERE, "targets") + os.sep
_STANDARD = os.path.dirname(os.__file__) + os.sep
#: Where files begin that are neither the user's nor a model library's.
_FOREIGN = (
    os.path.dirname(_HERE) + os.sep,
    os.path.dirname(os.path.abspath(torch.__file__)) + os.sep,
    "<frozen",
)


#: Where a module or an optimizer keeps the line that made it.
_MADE = "_tilefit_made"
#: Where an optimizer keeps what modules were called where it was made: by the call that goes on in a frame
#: (:meth:`SiteTracker.source_call`), the innermost first, and by their names there.
_NAMES = "_tilefit_names"
_Names = Mapping[str, "weakref.ref[nn.Module]"]
#: Frames that are a part of a statement of the frame around them.
_WITHIN_STATEMENTS = ("<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>", "<lambda>")


def call_end(code: CodeType, instruction: int) -> tuple[int, int] | None:
    """Line, and column in bytes of UTF-8, just behind a call's closing parenthesis; None if not known.

    Args:
        code: What the call is in.
        instruction: Index of the call's instruction there.
    """
    _, line, _, column = next(islice(code.co_positions(), instruction // 2, None))
    return None if line is None or column is None else (line, column)


@contextmanager
def noting_makers() -> Iterator[None]:
    """Within the block every module that is made remembers the user's line that made it, or what it is in;
    every optimizer the line, be it a library's, and what modules are called there."""

    def noting(plain: Callable[..., None]) -> Callable[..., None]:
        def noted(made: object, *args: Any, **keywords: Any) -> None:
            plain(made, *args, **keywords)
            made.__dict__[_MADE] = _maker(made)
            if isinstance(made, torch.optim.Optimizer):
                made.__dict__[_NAMES] = dict(_names_around())

        return noted

    kinds = nn.Module, torch.optim.Optimizer
    with ExitStack() as stack:
        for kind in kinds:
            stack.enter_context(patch.object(kind, "__init__", noting(kind.__init__)))
        yield


def made_at(made: object) -> str:
    """``file:line`` that made a module or an optimizer; empty where that is not known."""
    return str(made.__dict__.get(_MADE, ""))


def _maker(made: object) -> str:
    """``file:line`` of the innermost frame of the user's that is not its own constructor."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and not frame.f_code.co_filename.startswith(_LOADERS):
        code = frame.f_code
        of_library = isinstance(made, nn.Module) and library_folder(code.co_filename)
        if not (_is_foreign(code.co_filename) or of_library):
            own = code.co_name == "__init__" and frame.f_locals.get(code.co_varnames[0]) is made
            if not own:
                return f"{short_path(code.co_filename)}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


def _names_around() -> Iterator[tuple[str, _Names]]:
    """What the frames of the user's own files call modules, attributes of objects among them."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and not frame.f_code.co_filename.startswith(_LOADERS):
        file = frame.f_code.co_filename
        # What a comprehension names is known in it alone.
        if not (_is_foreign(file) or library_folder(file) or frame.f_code.co_name in _WITHIN_STATEMENTS):
            named: dict[str, Any] = {**frame.f_locals}
            for name, value in frame.f_locals.items():
                kind = type(value)  # nothing of the program's own is asked for, which may raise
                if kind.__dictoffset__ and not issubclass(kind, nn.Module | type | ModuleType):
                    held = object.__getattribute__(value, "__dict__")
                    named |= {f"{name}.{part}": held[part] for part in held}
            names = {name: weakref.ref(it) for name, it in named.items() if issubclass(type(it), nn.Module)}
            yield _call_in(short_path(file), frame), names
        frame = frame.f_back


def called(model: nn.Module, call: str, optimizers: Iterable[torch.optim.Optimizer]) -> Called:
    """A model that is called, by the name that it, or what it only wraps, has where an optimizer was made."""
    inner = model
    while True:
        for optimizer in optimizers:
            for beside, names in optimizer.__dict__.get(_NAMES, {}).items():
                if beside and (found := _expressions(inner, names)):
                    return Called(call, beside, min(found, key=len))
        parts = [part for part in inner.children() if any(True for _ in part.parameters())]
        if len(parts) != 1 or any(True for _ in inner.parameters(recurse=False)):
            return Called(call)
        (inner,) = parts


def _expressions(model: nn.Module, names: _Names) -> list[str]:
    """What a model is called by way of names: ``net``, ``self.net``, ``net.blocks[3]``."""
    return [
        name + "".join(f"[{part}]" if part.isdigit() else f".{part}" for part in path.split(".") if part)
        for name, module in names.items()
        if (held := module()) is not None
        for path, part in held.named_modules()
        if part is model
    ]


def _call_in(path: str, frame: FrameType) -> str:
    """``file:line:column`` of where the call that goes on in a frame ends; empty where that is not known."""
    end = call_end(frame.f_code, frame.f_lasti)
    return f"{path}:{end[0]}:{end[1]}" if end else ""


def _is_foreign(filename: str) -> bool:
    """Whether a file is PyTorch's, Python's or ours."""
    # Installed packages may lie in the folder of the standard library.
    standard = filename.startswith(_STANDARD) and "-packages" not in filename
    return standard or filename.startswith(_FOREIGN)


class SiteTracker:
    """Follows the modules that are running and maps each backward operation to its forward site.

    Autograd numbers its nodes in the order of their creation, and a node is created just before the forward
    operation it belongs to is dispatched, so the number links the two.

    Args:
        on_root: Told of every model that runs, once, with what its names begin with.
        on_backward: Called when a backward pass begins.
        is_model: Whether a module that runs, and is no part of a known model, is to be named.
        on_gradients: Called when a backward pass has ended.
    """

    def __init__(
        self,
        on_root: Callable[[str, nn.Module], None],
        on_backward: Callable[[], None],
        is_model: Callable[[nn.Module], bool] = lambda module: True,
        on_gradients: Callable[[], None] = lambda: None,
    ) -> None:
        #: The models that ran, by what the names of their modules and parameters begin with.
        self.roots: list[tuple[str, nn.Module]] = []
        #: Those that were not named before, and where their first calls are written (:meth:`source_call`).
        self.calls: list[tuple[nn.Module, str]] = []
        self._on_root = on_root
        self._on_backward, self._on_gradients = on_backward, on_gradients
        self._is_model = is_model
        #: The user's line that made a module, by its path; of those inside it only where it is another.
        self.made: dict[str, str] = {}
        #: Folders of installed packages that operations' lines are in.
        self.libraries: dict[str, None] = {}
        self._names: dict[int, str] = {}
        #: Class name of every module by its path.
        self.classes: dict[str, str] = {}
        self._types: dict[str, type[nn.Module]] = {}
        self._stack: list[str] = []
        self._modules_outside = 0  # that were running when the backward pass began
        self._creates_graph = False  # the backward pass is to be differentiated itself
        self._forward: dict[int, Site] = {}
        self._user_code: dict[CodeType, str] = {}
        self._fallback: Fallback | None = None
        self._fallbacks = 0

    def is_running(self, kind: type[nn.Module]) -> bool:
        """Whether the innermost module that runs is of a class."""
        return bool(self._stack) and issubclass(self._types.get(self._stack[-1], object), kind)

    @property
    def within(self) -> bool:
        """Whether a module runs."""
        return bool(self._stack)

    def is_outermost(self, module: nn.Module) -> bool:
        """Whether a module is a model, about to run within none."""
        return not self._stack and (any(module is root for _, root in self.roots) or self._is_new(module))

    def _is_new(self, module: nn.Module) -> bool:
        """Whether a module that runs is to be named."""
        return id(module) not in self._names and self._is_model(module)

    def is_repeated_forward(self) -> bool:
        """Whether what runs within a backward pass is a forward pass again (activation checkpointing).

        It runs modules, or at least builds a graph where the gradients themselves do not.
        """
        return len(self._stack) > self._modules_outside or (
            torch.is_grad_enabled() and not self._creates_graph
        )

    def name_modules(self, root: nn.Module) -> None:
        """Learn the paths of a model's modules."""
        prefix = f"{type(root).__name__}." if self.roots else ""
        self.roots.append((prefix, root))
        for name, module in root.named_modules():
            path = (prefix + name).removesuffix(".")
            self._names.setdefault(id(module), path)
            self.classes.setdefault(path, type(module).__name__)
            self._types.setdefault(path, type(module))
            line = made_at(module)
            if line != maker(self.made, path):
                self.made.setdefault(path, line)
        self._on_root(prefix, root)

    @contextmanager
    def following(self) -> Iterator[None]:
        """Within the block, modules that run are noticed."""

        def entered(module: nn.Module, args: Any) -> None:
            if self._is_new(module):
                self.calls.append((module, self.source_call()))
                self.name_modules(module)
            self._stack.append(self._names.get(id(module), ""))

        def left(module: nn.Module, args: Any, output: Any) -> None:
            self._stack.pop()

        def run_backward(
            outputs: Any, gradients: Any, retain_graph: Any, create_graph: bool, *args: Any, **kw: Any
        ) -> Any:
            with torch._C.DisableTorchFunction():  # they look at every parameter
                self._on_backward()
            with patch.multiple(self, _modules_outside=len(self._stack), _creates_graph=create_graph):
                found = engine(outputs, gradients, retain_graph, create_graph, *args, **kw)
                with torch._C.DisableTorchFunction():
                    self._on_gradients()
                return found

        engine = torch.autograd._engine_run_backward  # type: ignore[attr-defined]
        with (
            nn_module.register_module_forward_pre_hook(entered),
            nn_module.register_module_forward_hook(left, always_call=True),
            patch.object(torch.autograd, "_engine_run_backward", run_backward),
            patch.object(self, "_stack", []),
        ):
            yield

    def falling_back(self, fused: Op | None, reason: str = "") -> AbstractContextManager[object]:
        """Within the block runs one call as several operations; see :class:`~tilefit.ops.Fallback`. With None
        what runs is not of the call that is running."""
        self._fallbacks += 1
        fallback = None if fused is None else Fallback(self._fallbacks, fused, reason)
        return patch.object(self, "_fallback", fallback)

    def forward_site(self) -> Site:
        """The site of a forward operation that is being dispatched; remembered for its backward."""
        site = self.here()
        self._remember(site)
        return site

    def here(self) -> Site:
        """Which module and line are running."""
        return Site(self._stack[-1] if self._stack else "", self.source_line(), self._fallback)

    def backward_site(self, node: Any) -> Site:
        """The site of the forward operation whose gradient ``node`` computes."""
        site = self._forward.get(node._sequence_nr()) or Site("", self.source_line())
        if self._creates_graph:
            self._remember(site)
        return site

    def _remember(self, site: Site) -> None:
        """Note the site of the autograd node that was made last, unless it has one."""
        self._forward.setdefault(torch.autograd._get_sequence_nr() - 1, site)  # type: ignore[attr-defined]

    def source_line(self) -> str:
        """``file:line`` of the innermost frame that is neither PyTorch's nor ours; empty if there is none."""
        path, frame = self._users(sys._getframe(1))
        return f"{path}:{frame.f_lineno}" if frame else ""

    def source_stack(self) -> tuple[str, ...]:
        """The lines of the user's that run, the innermost first; one that is run by itself is there once."""
        lines: dict[str, None] = {}
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            path, frame = self._users(frame)
            if frame is not None:
                lines[f"{path}:{frame.f_lineno}"] = None
                frame = frame.f_back
        return tuple(lines)

    def source_call(self) -> str:
        """``file:line:column`` of where the call that goes on in that frame ends (:func:`call_end`); without
        what is not known."""
        path, frame = self._users(sys._getframe(1))
        return _call_in(path, frame) if frame else ""

    def is_called_by(self, folder: str) -> bool:
        """Whether the user's line that runs calls what goes on by way of PyTorch's files in a folder."""
        frame: FrameType | None = sys._getframe(1)
        _, user = self._users(frame)
        while frame is not None and frame is not user and not frame.f_code.co_filename.startswith(folder):
            frame = frame.f_back
        return frame is not None and frame is not user

    def _users(self, frame: FrameType | None) -> tuple[str, FrameType | None]:
        while frame is not None and frame.f_code.co_filename != _DRIVER:
            if path := self._user_path(frame.f_code):
                return path, frame
            frame = frame.f_back
        return "", None

    def _user_path(self, code: CodeType) -> str:
        path = self._user_code.get(code)
        if path is None:
            path = "" if _is_foreign(code.co_filename) else short_path(code.co_filename)
            self._user_code[code] = path
            if path and library_folder(code.co_filename):
                self.libraries[path.partition(os.sep)[0]] = None
        return path


def user_line(error: BaseException) -> str:
    """``file:line`` of the innermost frame of the user's or the model's code an error passed, or of the file
    that is no Python; or empty."""
    if isinstance(error, SyntaxError) and error.filename and error.lineno:
        return f"{short_path(error.filename)}:{error.lineno}"
    frames = user_frames(error)
    return f"{short_path(frames[-1].filename)}:{frames[-1].lineno}" if frames else ""


def user_frames(error: BaseException) -> list[traceback.FrameSummary]:
    """The frames of the user's or the model's code that an error passed, the innermost last."""
    return [f for f in traceback.extract_tb(error.__traceback__) if not _is_foreign(f.filename)]


def short_path(filename: str) -> str:
    """A file name as people refer to it: relative to here, or from its package on."""
    if library := library_folder(filename):
        return os.path.relpath(filename, library)
    relative = os.path.relpath(filename) if os.path.isabs(filename) else filename
    return filename if relative.startswith("..") else relative
