"""``LSTM``, ``GRU`` and ``RNN`` with the signature, semantics and parameters of ``torch.nn``'s.

They are subclasses of ``torch.nn.RNNBase`` but not of ``torch.nn.LSTM`` and its like: ``torch.compile``
refuses to trace instances of those. Arguments that do not fit, and empty tensors, are left to ``torch.nn``'s
own forward method, which says best what is wrong with them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, fx, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from tilefit import gpus
from tilefit.cost.recurrent_times import CUDNN
from tilefit.errors import UsageError
from tilefit.rnn.call import Call, computed_dtype
from tilefit.rnn.cells import BY_MODE, Layers, Rows
from tilefit.rnn.dispatch import BACKENDS, choose, in_graph
from tilefit.rnn.functional import Settings, check_rows, describe, run
from tilefit.rnn.torch_nn import flatten_bf16

if TYPE_CHECKING:
    from tilefit.rnn.explain import Explanation, Explanations


class Recurrent(nn.RNNBase):
    """What the modules share.

    Attributes:
        backend: ``persistent``, ``cudnn``, ``cell`` or ``reference``; None: the fastest, see
            :mod:`tilefit.rnn.dispatch`.
        recompute: Save no gates for backward, compute them again: less memory, more time.
    """

    #: The class of ``torch.nn`` that this one stands for.
    original: ClassVar[type[nn.RNNBase]]

    backend: str | None = None
    recompute: bool = False

    def __init__(
        self, mode: str, *args: Any, backend: str | None = None, recompute: bool = False, **kwargs: Any
    ) -> None:
        if mode != "LSTM" and "proj_size" in kwargs:
            raise ValueError("proj_size is an argument of LSTM only")
        super().__init__(mode, *args, **kwargs)
        configure(self, backend, recompute)

    def forward(
        self, input: Any, hx: Any = None, *, lengths: Tensor | None = None, reset: Tensor | None = None
    ) -> Any:
        """Run the layers over a sequence.

        Args:
            input: [T, B, I], [B, T, I] with ``batch_first``, [T, I], or a PackedSequence.
            hx: Initial state as of ``torch.nn``; None for zeros.
            lengths: Steps of each row, int[B]; None: all T. The output beyond them is 0, and the final state
                is that after a row's last step.
            reset: bool, of the input's sizes but the last: True where the state is zero before the step, in
                both directions.

        Returns:
            Output and final state as of ``torch.nn``. Within an autocast region they have its element type.

        Raises:
            TilefitError: the backend asked for cannot run the call.
            UsageError: ``lengths`` or ``reset`` does not fit the input.
        """
        if isinstance(input, fx.Proxy):
            raise UsageError(
                "torch.fx cannot trace layers of tilefit.nn",
                hint="Make them torch.nn's first: tilefit.strip(model).",
            )
        if isinstance(input, PackedSequence):
            if lengths is not None or reset is not None:
                raise UsageError("lengths= and reset= go with a padded input, not with a PackedSequence")
            return self._packed(input, hx)
        batched = input.dim() == 3
        batch = (input.shape[0 if self.batch_first else 1],) if batched else ()
        if input.dim() not in (2, 3) or not self._fits(input, hx, batch):
            return self._by_torch(input, hx)
        if reset is not None and reset.shape != input.shape[:-1]:
            raise UsageError(
                f"reset is {list(reset.shape)}",
                hint=f"Give {list(input.shape[:-1])}, the input's sizes but the last.",
            )
        if not batched:
            if lengths is not None:
                raise UsageError("lengths= goes with a batch of sequences, and the input is one")
            rows = reset.unsqueeze(1) if reset is not None else None
            hx = _each(hx, lambda state: state.unsqueeze(1))
            out, state = self._padded(input.unsqueeze(1), hx, None, rows)
            return out.squeeze(1), _each(state, lambda state: state.squeeze(1))
        if not self.batch_first:
            return self._padded(input, hx, lengths, reset)
        rows = reset.t() if reset is not None else None
        out, state = self._padded(input.transpose(0, 1), hx, lengths, rows)
        return out.transpose(0, 1), state

    def flatten_parameters(self) -> None:
        """Let the weights lie in one piece of memory, as cuDNN wants them, also where they are bf16."""
        super().flatten_parameters()
        if not torch.compiler.is_compiling():  # compiled code has no addresses, and cannot ask for cuDNN
            flatten_bf16(self)

    @property
    def last_call(self) -> Call | None:
        """What decided how the last call ran; None if there was none, or only in compiled code."""
        return self.__dict__.get("_call")

    def explain(self, *inputs: Any, gpu: str = "", **arguments: Any) -> Explanation:
        """Which backend runs the module, and why; see :func:`tilefit.nn.explain`."""
        return explain(self, *inputs, gpu=gpu, **arguments)[0]

    def extra_repr(self) -> str:
        """What ``print`` says beside ``torch.nn``'s arguments."""
        extra = f", backend={self.backend}" if self.backend else ""
        return f"{super().extra_repr()}{extra}{', recompute=True' if self.recompute else ''}"

    def _weights(self) -> list[Tensor]:
        # Not self._flat_weights: torch.func.functional_call may have put in others. A parametrised weight is
        # no parameter, but an attribute.
        parameters: dict[str, Any] = self._parameters
        names = self._flat_weights_names
        return [parameters[name] if name in parameters else getattr(self, name) for name in names]

    def _fits(self, x: Tensor, hx: Any, batch: tuple[int, ...]) -> bool:
        """Whether the arguments are as they should be; ``torch.nn`` says best what is wrong with them."""
        dtype = None if torch._C._is_any_autocast_enabled() else self.weight_ih_l0.dtype
        if x.shape[-1] != self.input_size or 0 in x.shape or dtype not in (None, x.dtype):
            return False
        if hx is None:
            return True
        layers = self.num_layers * (2 if self.bidirectional else 1)
        sizes = (self.proj_size or self.hidden_size, self.hidden_size)
        states = hx if self.mode == "LSTM" else (hx,)
        return all(
            state.shape == (layers, *batch, size) and dtype in (None, state.dtype)
            for state, size in zip(states, sizes, strict=False)
        )

    def _padded(self, x: Tensor, hx: Any, lengths: Tensor | None, reset: Tensor | None) -> tuple[Tensor, Any]:
        """Output [T, B, D * H] and final state of an input [T, B, I]."""
        flat = self._weights()
        if lengths is not None or reset is not None:
            lengths, reset = check_rows(x, lengths, reset)
        has_c = self.mode == "LSTM"
        h0, c0 = hx if has_c and hx is not None else (hx, None)
        layers = self._layers()
        call, backend = None, self.backend
        if not torch.compiler.is_compiling():
            call, backend = self._chosen(
                layers, x, x.shape[:2], flat, (h0, c0), ragged=lengths is not None, reset=reset is not None
            )
        how = Settings(self.dropout, self.training, self.recompute, backend)
        out, h_n, c_n = run(layers, x, flat, Rows(h0, c0, lengths, reset), how, call)
        return out, (h_n, c_n) if has_c else h_n

    def _packed(self, packed: PackedSequence, hx: Any) -> Any:
        """Output, as a PackedSequence of the same order, and final state."""
        data, batch_sizes, order, back = packed
        batch = int(batch_sizes[0])
        if data.dim() != 2 or not self._fits(data, hx, (batch,)):
            return self._by_torch(packed, hx)
        states = hx if isinstance(hx, (tuple, list)) else (hx,)
        sizes = len(batch_sizes), batch
        weights, layers = self._weights(), self._layers()
        if self._chosen(layers, data, sizes, weights, states, ragged=True, reset=False)[1] == CUDNN:
            return self._by_torch(packed, hx)
        x, lengths = pad_packed_sequence(PackedSequence(data, batch_sizes))
        if order is not None:
            hx = _each(hx, lambda state: state[:, order])
        out, state = self._padded(x, hx, lengths, None)
        data = pack_padded_sequence(out, lengths).data
        if back is not None:
            state = _each(state, lambda state: state[:, back])
        return PackedSequence(data, batch_sizes, order, back), state

    def _by_torch(self, input: Any, hx: Any) -> Any:
        """What ``torch.nn`` returns, in the element type of an autocast region; or its error."""
        out, state = self.original.forward(self, input, hx)
        dtype = computed_dtype(input.data)
        if out.data.dtype is not dtype:
            out = out._replace(data=out.data.to(dtype)) if isinstance(out, PackedSequence) else out.to(dtype)
            state = _each(state, lambda state: state.to(dtype))
        return out, state

    def _layers(self) -> Layers:
        directions = 2 if self.bidirectional else 1
        return Layers(BY_MODE[self.mode], self.num_layers, directions, len(self._all_weights[0]))

    def _chosen(
        self,
        layers: Layers,
        x: Tensor,
        sizes: Sequence[int],
        flat: list[Tensor],
        states: Sequence[Tensor | None],
        *,
        ragged: bool,
        reset: bool,
    ) -> tuple[Call, str]:
        """What a call is, which is remembered for :meth:`explain`, and its backend."""
        call = describe(layers, x, sizes, flat, states, ragged=ragged, reset=reset, proj=self.proj_size)
        self.__dict__["_call"] = call = in_graph(call, self.backend)
        return call, choose(call, self.backend).backend


class LSTM(Recurrent):
    """``torch.nn.LSTM``, by persistent kernels where they are the fastest.

    Args:
        *args, **kwargs: As of ``torch.nn.LSTM``.
        backend, recompute: See :class:`Recurrent`.
    """

    original = nn.LSTM

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__("LSTM", *args, **kwargs)

    # What torch.nn's forward method calls.
    get_expected_cell_size = nn.LSTM.get_expected_cell_size
    check_forward_args = nn.LSTM.check_forward_args  # type: ignore[assignment]
    permute_hidden = nn.LSTM.permute_hidden  # type: ignore[assignment]


class GRU(Recurrent):
    """``torch.nn.GRU``, by persistent kernels where they are the fastest.

    Args:
        *args, **kwargs: As of ``torch.nn.GRU``.
        backend, recompute: See :class:`Recurrent`.
    """

    original = nn.GRU

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__("GRU", *args, **kwargs)


class RNN(Recurrent):
    """``torch.nn.RNN``, by persistent kernels where they are the fastest.

    Args:
        input_size, hidden_size, num_layers, nonlinearity, *args, **kwargs: As of ``torch.nn.RNN``.
        backend, recompute: See :class:`Recurrent`.
    """

    original = nn.RNN

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        nonlinearity: str = "tanh",
        *args: Any,
        **kwargs: Any,
    ) -> None:
        if nonlinearity not in ("tanh", "relu"):
            raise ValueError(f"nonlinearity is {nonlinearity!r}, which is neither 'tanh' nor 'relu'")
        self.nonlinearity = nonlinearity
        super().__init__(f"RNN_{nonlinearity.upper()}", input_size, hidden_size, num_layers, *args, **kwargs)


def explain(model: nn.Module, *inputs: Any, gpu: str = "", **arguments: Any) -> Explanations:
    """Which backend runs each of our recurrent modules in a model, and why.

    Args:
        model: A model, or a recurrent module.
        *inputs, **arguments: The model is called once with them, as it is. Without any, the last call tells.
        gpu: Name of the GPU to tell for what cuDNN's algorithm is there, and of a module that ran on none
            which backend would be; empty: the one the module ran on.

    Raises:
        UsageError: no module of ours was called, or the GPU is unknown.
        TilefitError: the backend a module is told to use cannot run it.
    """
    from tilefit.rnn.explain import Explanations, explanation

    if inputs or arguments:
        model(*inputs, **arguments)
    named = gpus.get(gpu) if gpu else None
    found = Explanations(
        explanation(path, module.last_call, module.backend, named)
        for path, module in model.named_modules()
        if isinstance(module, Recurrent) and module.last_call is not None
    )
    if not found:
        raise UsageError(
            "no recurrent module of tilefit ran",
            hint="Give inputs to run the model with; tilefit.nn.convert(model) converts torch.nn's modules.",
        )
    return found


def configure(module: Recurrent, backend: str | None, recompute: bool) -> None:
    """Set how a module runs.

    Raises:
        UsageError: there is no such backend.
    """
    if backend is not None and backend not in BACKENDS:
        raise UsageError(
            f"unknown backend {backend!r} of a recurrent layer", hint=f"Use {', '.join(BACKENDS)}."
        )
    module.backend, module.recompute = backend, recompute


def _each(state: Any, change: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(state, (tuple, list)):
        return tuple(map(change, state))
    return state if state is None else change(state)
