"""NTC: time spent outside the Tensor Cores.

Two causes have no rule. cuDNN's autotuning (``torch.backends.cudnn.benchmark``): on an H200 with cuDNN 9.19
it changed the time of 66 convolution passes by a factor of 1.00 in the median, 0.97 to 1.12 between the tenth
and the ninetieth percentile (``benchmarks/autotuning.py``), so there is no gain to promise. The share of the
step outside the Tensor Cores is no cause in itself: NTC001 states it, with what fusing would save.
"""
