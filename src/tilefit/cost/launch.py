"""What the host spends to launch an operation.

The constants are seconds on one H200's host (PyTorch 2.11, 16 virtual cores). ``benchmarks/fit_launch.py``
fits them to what 19 eager training steps spent in their forward pass, backward pass and optimizer
(``benchmarks/results/launch_steps.json``), and prints how far off they are of a model left out of the fit. It
also tells what of it a forward pass alone takes, by 27 of these (``benchmarks/results/
whole_steps_inference.json``).
Another host moves them all together: two of the same kind differed by up to a factor of two. ``tilefit
calibrate`` measures that factor. That views, calls of modules and of Python functions, nodes of autograd or
kinds of operations were told apart as well made no better predictions of 45 models (``benchmarks/
fit_host_parts.py``). A step that the GPU bounds does not depend on any of it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

from tilefit.cost.kinds import ByKind
from tilefit.gpus import Gpu
from tilefit.ops import FORWARD, OPTIMIZER, Attention, Conv, Settings, Step, StepOp, Streaming
from tilefit.ops.streaming import CONTIGUOUS

#: The training step of :func:`tilefit.measure.launch.reference_step` on such a host. Measured beside the 20
#: steps of ``benchmarks/results/whole_steps.json`` it was 9.6 ms, the median of its fastest turns; the model
#: states 11.1 ms of it. Training steps on three further hosts took 0.93, 0.87 and 0.85 of what that would
#: make of them (``benchmarks/whole_steps.py``, ``fit_host_parts.py``): this is the middle of all four.
REFERENCE_STEP_S = 10.5e-3
#: What a host takes may be so many times as much as predicted, or as little, in 80 % of cases: one that was
#: measured, and one that was not. Set to the steps of ``benchmarks/results`` that the host limits.
KNOWN_HOST, UNKNOWN_HOST = 1.3, 1.6
#: A whole program's by so much more: what it does beside its operations is seen in part. Set to ten programs
#: on one host (``benchmarks/fit_host_parts.py --programs``).
PROGRAM_HOST = 1.15
#: One operation of the forward pass or of the backward pass, with the views that go with it; and of a forward
#: pass alone: 22.3 us where the reference step takes 9.6 ms.
FORWARD_S = 22e-6
BACKWARD_S = 17.5e-6
ALONE_S = 24e-6
#: A forward operation of a training step of another module than the one before. Forward passes alone, fitted
#: with both constants, take nothing for a module. So it does not stand for the Python of the modules, but for
#: what comes with them in training alone: a ResNet-50's forward pass, whose norms then make statistics and
#: count batches, takes the host about twice as long as in inference.
MODULE_S = 14e-6
#: A parameter in the backward pass, where its gradient is accumulated; and in the optimizer, with what
#: ``zero_grad`` takes: in all the steps the multi-tensor AdamW, which counts the steps of each on the CPU. A
#: fused one, and SGD with momentum, took 3.6 and 4.1 us for each of 192 parameters more where that took 12.5,
#: ``zero_grad`` 0.7 (``benchmarks/compiled_calls.py``, an H100).
GRADIENT_S = 27e-6
UPDATE_S = 15e-6
FUSED_UPDATE_S = 4.4e-6
PLAIN_UPDATE_S = 5e-6
#: One further kernel of the same operation: of the recommender's backward pass, which has 754 of them
#: (``benchmarks/results/whole_steps.json``; a disturbed host took 6.8 us).
KERNEL_S = 4e-6
#: Before the first operation of the forward pass, of the backward pass, and of the optimizer, in a training
#: step. The steps do not settle that of the forward pass: fitted without it (leave it out of ``PARTS`` in
#: ``benchmarks/fit_launch.py``), those of a model left out are 7 % off in the median, with it 9 %. So a
#: forward pass alone, which has no loss, gets none.
FIXED_S = {"forward": 0.15e-3, "backward": 0.99e-3, "optimizer": 0.16e-3}
#: A multi-tensor operation of an optimizer: AdamW's eight, over 10 tensors, took 99 us more than the fused
#: one (``benchmarks/collect_h200.py --part launch``, on the faster host).
OPTIMIZER_S = 24e-6
#: One kernel that the compiler wrote, and one call of a library by its kind (one that is not listed: an
#: operation that is left to ATen), launched from the Python that the compiler generates, without CUDA graphs;
#: one tensor that the backward graph is given: allocated, saved, unpacked, checked and freed where the
#: forward pass made it, only checked where it is a parameter or an input; one parameter: its guard, and its
#: gradient's way back to it (taken to be the same where CUDA graphs replay); what each of the two graphs
#: takes besides: guards, AOTAutograd's wrapper, the thread of the backward pass; and one with convolutions
#: beside each of these.
#: ``benchmarks/fit_compiled.py`` finds about these, of steps in turn with the reference step on H100s, of
#: older ones on an H200, and of tiny ones that differ in one thing each. Of the tiny ones
#: (``benchmarks/compiled_host.py``, which reads the clock in the running step) both graphs take 0.45 ms when
#: steps follow each other; after something else, which left nothing of it in the caches, 0.7 ms, as much as
#: where all caches are overwritten. Kernels take 11 to 13 us, products 13, a convolution and its gradients 37
#: and 62, attention 60, a tensor that is saved 8 and one that is read 5, a parameter 8 beside the optimizer:
#: in real models, whose kernels and layers are all different, attention and what is saved take more. That a
#: step takes longer with convolutions, however many, is of real models alone, and not explained.
COMPILED_KERNEL_S = 12e-6
COMPILED_CALL_S = {"gemm": 10.5e-6, "conv": 37e-6, "attention": 80e-6}
COMPILED_OTHER_S = 26e-6
SAVED_S, READ_S = 17e-6, 6.5e-6
GRAPH_PARAMETER_S = 14e-6
GRAPH_S = 0.26e-3
CUDNN_S = 0.2e-3
#: One layer that the compiler compiles for itself, in a forward pass that it splits: the guards of such
#: layers are tried at each of them, and those beyond the eighth run as they are. ``benchmarks/fit_launch.py``
#: fits it to the two such steps of ``benchmarks/results/whole_steps_compiled.json``, OPT and Whisper. A split
#: alone is not priced: BART's forward pass reads 24 values, and its step takes no longer than its launches.
RECOMPILED_S = 1.5e-3
#: A collective: 35 to 40 us a call in all (torch 2.11, eager all-reduces of 4 MiB and less, back to back, on
#: 2 and 4 H200).
COLLECTIVE_S = 30e-6
#: A product or a collective of DTensors, beside that (four layers of Llama-8B in two tensor-parallel ranks,
#: 2 H200: ``benchmarks/several_gpus.py``).
DTENSOR_S = 0.3e-3
#: A collective of ``fully_shard`` with its copies and hooks, and more for each parameter: in that proportion
#: on a CPU with nothing to send (one of 1 to 24 parameters: 0.88 + 0.063 ms each for a layer's three, within
#: 4 %; PyTorch 2.13), as long as the host-limited steps of BERT, GPT-2-XL and Llama take on 2 H100.
FSDP_S = 0.5e-3
FSDP_PARAMETER_S = 35.5e-6
#: One operation that is replayed from a CUDA graph: how much longer a replay takes than its kernels, in the
#: median over 238 operations of one kernel (``benchmarks/collect_h200.py --part method``).
GRAPHED_S = 0.35e-6
#: The GPU idles between an eager kernel and the next, however far the host is ahead: 1.0 us for each kernel,
#: 1.3 for each that is counted here, in the median of the nine training steps on an H200 whose host is ahead
#: (steps back to back less the sum of their kernels, ``benchmarks/results/whole_steps.json``). Of 19 steps on
#: the third H100, which set nothing, the measured sum is 3.6 % short in the median, with this 1.2 %.
IDLE_S = 1.3e-6

#: ``(op, phase, gpu, compiled) -> (kernels, host time or None for what a call takes)`` of kinds that differ.
launches = ByKind(lambda op, *_: (op.kernels, None))


#: ``(op, gpu, entry) -> kernels`` of kinds with more than what the price of a launch was fitted with.
counts = ByKind(lambda op, *_: op.kernels)


def launched(entry: StepOp, gpu: Gpu) -> int:
    """Kernels, and copies within the GPU, that an operation of an eager step launches.

    The price of a launch was fitted with ``Op.kernels``, of which the small ones within some functions are
    left out.
    """
    return int(counts[type(entry.op)](entry.op, gpu, entry))


class Launch(NamedTuple):
    """GPU kernels that an operation launches, and the host's time for that."""

    kernels: int
    host_s: float


def launch(entry: StepOp, gpu: Gpu, settings: Settings) -> Launch:
    """What it takes to launch an operation."""
    op, phase, compiled = entry.op, entry.phase, settings.compiled and not entry.eager
    kernels, host_s = launches[type(op)](op, phase, gpu, compiled)
    if host_s is not None or phase == OPTIMIZER:
        return Launch(kernels, OPTIMIZER_S if host_s is None else host_s)
    if compiled:
        # What PyTorch prepares before attention, the compiler makes part of its kernels.
        within = kernels if isinstance(op, Attention) else launched(entry, gpu)
        return Launch(kernels, COMPILED_CALL_S.get(op.kind, COMPILED_OTHER_S) + KERNEL_S * (within - 1))
    if isinstance(op, Streaming) and op.function == CONTIGUOUS:  # within the call of another
        return Launch(kernels, KERNEL_S * kernels)
    # All kinds alike: a call alone takes nearly the same time, whatever it calls.
    forward_s = FORWARD_S if settings.training else ALONE_S
    call_s = BACKWARD_S if phase.startswith("backward") else forward_s
    return Launch(kernels, call_s + KERNEL_S * (kernels - 1))


def fsdp_s(parameters: int = 10) -> float:
    """What the host takes for a collective of ``fully_shard`` over so many parameters; those of a
    Transformer's layer where nobody counts them."""
    return FSDP_S + FSDP_PARAMETER_S * parameters


def begin_s(part: str, step: Step) -> float:
    """Host time before the first operation of the forward pass, the backward pass or the optimizer; of a
    forward pass alone none."""
    if not step.settings.training:
        return 0.0
    # A graph, the compiler's or CUDA's, hands over all gradients when it is done.
    handed_over = part == OPTIMIZER and (step.settings.compiled or step.settings.cuda_graph)
    if step.settings.compiled and part != OPTIMIZER:
        # Replayed from CUDA graphs, tensors lie where they did, and cuDNN is not called.
        return GRAPH_S + (0.0 if step.settings.cuda_graph else _beside_s(part, step))
    return FIXED_S.get(part, 0.0) + GRAPH_PARAMETER_S * handed_over * len(_trained(step))


def around_s(step: Step) -> Iterator[float]:
    """Host time around each operation, beside its launch.

    In the forward pass of a training step, for the modules that are left and entered before it; in the
    backward pass, for the gradients of its module's parameters, which are accumulated when it gets there; in
    the optimizer, for an equal share of the parameters. A graph, the compiler's or CUDA's, knows neither
    modules nor parameters, nor does what is replayed. Layers that are compiled each for itself are shared by
    the forward operations.
    """
    in_graph = step.settings.compiled or step.settings.cuda_graph
    trained = _trained(step)
    # Those that divide by a mean of squares count steps, too.
    steps_count = any("addcdiv" in entry.name for entry in step.ops if entry.phase == OPTIMIZER)
    update_s = UPDATE_S if steps_count else PLAIN_UPDATE_S
    update_s = FUSED_UPDATE_S if step.settings.fused_optimizer else update_s
    gradients = Counter(name.rpartition(".")[0] for name in trained)
    operations = Counter(entry.phase for entry in step.ops)
    module = None
    for entry in step.ops:
        around, eager = 0.0, entry.eager or not in_graph
        if entry.replayed:
            pass
        elif entry.phase == OPTIMIZER:
            around = update_s * len(trained) / operations[OPTIMIZER]
        elif eager and entry.phase == FORWARD:
            around = MODULE_S * (step.settings.training and entry.site.module != module)
            module = entry.site.module
        elif entry.phase == FORWARD:
            around = RECOMPILED_S * step.settings.recompiled / operations[FORWARD]
        elif eager:
            around = GRADIENT_S * gradients.pop(entry.site.module, 0)
        yield around


def _beside_s(part: str, step: Step) -> float:
    """What a compiled graph takes beside its calls: for cuDNN, and for what the backward graph is given."""
    ops = [entry for entry in step.ops if entry.phase.partition("-")[0] == part and not entry.eager]
    cudnn_s = CUDNN_S * any(isinstance(entry.op, Conv) for entry in ops)
    before = {ref.id for entry in step.ops if entry.phase == FORWARD for ref in entry.outputs}
    given, made = set[int](), set[int]()
    for entry in ops:
        given |= {ref.id for ref in entry.inputs} - made
        made |= {ref.id for ref in entry.outputs}
    given_s = SAVED_S * len(given & before) + READ_S * len(given - before)
    return cudnn_s + given_s * (part != FORWARD)


def _trained(step: Step) -> list[str]:
    """The parameters that have a gradient."""
    return [name for name, parameter in step.parameters.items() if parameter.trainable]
