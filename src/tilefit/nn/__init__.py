"""Recurrent layers that take the place of ``torch.nn``'s and keep their weights on chip where it is faster.

    >>> import tilefit
    >>> model = tilefit.nn.convert(model)  # every torch.nn.LSTM, GRU and RNN in it, in place
    >>> print(tilefit.nn.explain(model, batch))

See docs/recurrent.md.
"""

from tilefit.nn import functional
from tilefit.rnn.convert import convert
from tilefit.rnn.modules import GRU, LSTM, RNN, explain

__all__ = ["GRU", "LSTM", "RNN", "convert", "explain", "functional"]
