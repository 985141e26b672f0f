"""Pad the vocabulary of a language model's head."""

from __future__ import annotations

from collections.abc import Iterable

from tilefit.fixes.fix import ChangeSet, Context, Fix, Refusal
from tilefit.fixes.linear import paddings
from tilefit.rules.alignment.features import groups


class PadVocabulary(Fix):
    """Pads the product that scores every token of a vocabulary of 50257, 30522 or 32001.

    As ``pad-linear`` does for other layers. Only the head's product is padded, since looking up rows of the
    embedding does not mind their number: the table keeps its rows, tied weights stay one parameter, and the
    logits have as many columns as before, so that losses, sampling and ``generate`` notice nothing. They
    are copied out of the product, which is part of the price.
    """

    name = "pad-vocabulary"
    rules = ("ALN002",)

    def find(self, context: Context) -> Iterable[ChangeSet | Refusal]:
        for group in groups(context.step):
            if group.vocabularies:
                yield from paddings(context, group)
