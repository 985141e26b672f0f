"""The facts of GPUs, each with its source, looked up by the names people and drivers use."""

from tilefit.gpus.gpu import Gpu
from tilefit.gpus.lookup import get, local, names, of_device, variants

__all__ = ["Gpu", "get", "local", "names", "of_device", "variants"]
