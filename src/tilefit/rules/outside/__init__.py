"""NTC: time spent outside the Tensor Cores.

Two causes have no rule. cuDNN's autotuning (``torch.backends.cudnn.benchmark``): the cost model predicts the
algorithm that autotuning finds and does not know how much worse the untuned choice is, so no gain can be
stated. The share of the step outside the Tensor Cores is no cause in itself: NTC001 states it, with what
fusing would save.
"""
