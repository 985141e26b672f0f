"""The call that ``torch.nn``'s recurrent modules make: cuDNN on CUDA, PyTorch's own code elsewhere.

cuDNN wants a layer's weights in one piece of memory. ``torch.nn`` lays them so, but not in bf16: there each
call copies them together first. :func:`flatten_bf16` does it for those.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from tilefit.rnn.call import computed_dtype, cuda_device
from tilefit.rnn.cells import BY_MODE, Layers, Rows
from tilefit.rnn.cudnn import MODES

_CALLS = {"LSTM": torch.lstm, "GRU": torch.gru, "RNN_TANH": torch.rnn_tanh, "RNN_RELU": torch.rnn_relu}


def run(
    layers: Layers, x: Tensor, flat: Sequence[Tensor], rows: Rows, dropout: float, training: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Layers one after another; arguments and results as of :func:`tilefit.rnn.functional.run`.

    Lengths go to the host, as ``pack_padded_sequence`` needs them there. Rows of length 0, which it refuses,
    run one step that is then forgotten.
    """
    cell, count, directions, kinds = layers
    h0, c0, lengths, _ = rows
    w_ih, w_hh = flat[:2]
    batch = x.shape[1]
    if h0 is None:  # with a projection (proj_size) h is shorter than c
        h0 = x.new_zeros((count * directions, batch, w_hh.shape[1]))
    if c0 is None and cell.has_c:
        c0 = x.new_zeros((count * directions, batch, w_ih.shape[0] // cell.gates))
    state: Any = h0 if c0 is None else (h0, c0)
    options = (kinds >= 4, count, dropout, training, directions == 2)
    call: Any = _CALLS[cell.mode]
    if lengths is None:
        out, *states = call(x, state, flat, *options, False)
    else:
        packed = pack_padded_sequence(x, lengths.cpu().clamp(min=1), enforce_sorted=False)
        order, back = packed.sorted_indices, packed.unsorted_indices
        state = tuple(s[:, order] for s in state) if cell.has_c else state[:, order]
        data, *states = call(packed.data, packed.batch_sizes, state, flat, *options)
        out, _ = pad_packed_sequence(packed._replace(data=data), total_length=x.shape[0])
        ran = (lengths > 0).unsqueeze(-1)
        initial = (h0,) if c0 is None else (h0, c0)
        states = [torch.where(ran, s[:, back], before) for s, before in zip(states, initial, strict=True)]
        out = torch.where(ran, out, 0)
    h_n, c_n = states[0], states[1] if cell.has_c else None
    dtype = computed_dtype(x)
    if out.dtype is not dtype:
        out, h_n, c_n = out.to(dtype), h_n.to(dtype), None if c_n is None else c_n.to(dtype)
    return out, h_n, c_n


def flatten_bf16(module: nn.RNNBase) -> None:
    """Move bf16 weights on CUDA into one piece of memory, as ``RNNBase.flatten_parameters`` moves others.

    That leaves them as they are since ``torch.backends.cudnn.is_acceptable`` does not know bf16, which cuDNN
    and PyTorch's calls of it do. The parameters stay the objects they are.
    """
    weights: list[Tensor] = [weight for weight in module._flat_weights if type(weight) is nn.Parameter]
    if len(weights) < len(module._flat_weights_names) or not torch.backends.cudnn.is_available():  # type: ignore[no-untyped-call]
        return
    if any(weight.dtype is not torch.bfloat16 or cuda_device(weight) is None for weight in weights):
        return
    # Two weights that are one stay so; those that lie together stay where they are.
    if len({weight.data_ptr() for weight in weights}) < len(weights):
        return
    if len({weight.untyped_storage().data_ptr() for weight in weights}) == 1:
        return
    kinds, mode = len(module._all_weights[0]), MODES[BY_MODE[module.mode].name]
    with torch.cuda.device(weights[0].device), torch.no_grad():
        torch._cudnn_rnn_flatten_weight(
            weights, kinds, module.input_size, mode, module.hidden_size, module.proj_size, module.num_layers,
            module.batch_first, module.bidirectional,
        )  # fmt: skip
