"""Lay out convolutions and their images in NHWC."""

from __future__ import annotations

from tilefit.fixes.changes.behaviour import behaves
from tilefit.fixes.changes.fix import Context, Found, Refusal, RefusedError, fix
from tilefit.fixes.changes.modules import submodule
from tilefit.fixes.kinds.padding.layers import InChannelsLast, in_channels_last, require_convolution
from tilefit.fixes.kinds.padding.tensors import REGION_S
from tilefit.rules.layout.channels_last import channels_last


@fix("channels-last", "LAY001")
def run_channels_last(context: Context) -> Found:
    """Runs convolutions on images in NHWC, as Tensor Cores read them.

    A convolution that is given an image in NCHW converts it, and PyTorch its filters. It then writes its
    image in NHWC; normalisation, pooling and elementwise functions keep it so, and the next convolution finds
    it as it is to be. Parameters, their gradients and what an optimizer keeps of them stay as they are, and
    so do the images that the model returns. Convolutions that are called outside a call of the model are
    plain.

    A model that takes apart images by ``view`` may need ``reshape`` instead: it fails when it is captured,
    and the fix is refused.

    Refused: convolutions whose weight is computed by something else.
    """
    step = context.step
    found: dict[str, None] = {}
    for path in dict.fromkeys(step.ops[index].site.module for index in channels_last(step, context.gpu)):
        try:
            module = submodule(context.run.model, path)
            require_convolution(module, path)
        except RefusedError as refused:
            yield Refusal((path,), refused.what)
        else:
            if not behaves(module, InChannelsLast):
                found[path] = None
    if found:
        yield in_channels_last(tuple(found), REGION_S * len(found))
