"""Recurrent layers as functions of their weights."""

from tilefit.rnn.functional import gru, lstm, rnn

__all__ = ["gru", "lstm", "rnn"]
