"""From a target to a plan over many GPUs: captured with few layers, split, priced, ranked."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field, replace

from tilefit.capture.cache import versions
from tilefit.capture.child import capture_in_child
from tilefit.cost.links import Fabric, Network
from tilefit.cost.priced import PricedGpu
from tilefit.errors import UsageError
from tilefit.measure.store import Store
from tilefit.ops import Step
from tilefit.options import MOST_LINKED, AnyOptions, ProgramOptions
from tilefit.parallel.blocks import Model
from tilefit.parallel.choices import TrainingSplit
from tilefit.parallel.memory_choices import require_choices, said_of
from tilefit.parallel.offers import offers
from tilefit.parallel.planning import KEPT, SLOW_HOST, UNEVEN, Job, Planner, Priced, precision_of, tokens_of
from tilefit.report.split_plans import Choice, SplitPlan
from tilefit.session.fleet import Fleet
from tilefit.units import counted

#: Layers that a model of many equal ones is captured with.
FEW_LAYERS = 2
#: Samples of the capture: a batch of one spares copies that every larger one needs.
_SAMPLES = 2
#: The parts of tilefit that the best splits are found by.
_ROOMS = ("capture", "cost", "gpus", "ops", "parallel")

_PREDICTED = "Predicted, not measured; docs/plan.md tells how far off such predictions were."
#: Samples of a step of models.
_BATCH = 1024
#: Optimizers of models that update in one kernel, as those of torchtitan, Megatron-LM and DeepSpeed do.
_FUSED = ("adamw", "adam", "sgd")


@dataclass(frozen=True, slots=True)
class Cluster:
    """What is to be rented.

    Attributes:
        gpus: How many GPUs.
        machines: In how many machines; 0 for as few as there can be.
        network: What joins them.
        prices: Of a GPU for an hour, by name; "" stands for all others.
    """

    gpus: int
    machines: int
    network: Network
    prices: dict[str, float]

    @property
    def per_machine(self) -> int:
        """GPUs of a machine."""
        return self.gpus // self.machines if self.machines else min(self.gpus, MOST_LINKED)

    def check(self) -> None:
        """Refuse what is no cluster.

        Raises:
            UsageError: there are no GPUs, or the machines cannot share them.
        """
        if self.gpus < 1:
            raise UsageError(f"a plan over {self.gpus} GPUs", where="--gpus", hint="Take one GPU or more.")
        if self.machines < 0:
            raise UsageError(f"{self.machines} machines", where="--nodes", hint="Take one machine or more.")
        if not self.machines and self.gpus % self.per_machine:
            raise UsageError(
                f"{self.gpus} GPUs do not fill machines of {self.per_machine}",
                where="--gpus",
                hint=f"Take a multiple of {self.per_machine}, or say in how many machines they are: --nodes.",
            )
        if self.machines and self.gpus % self.machines:
            raise UsageError(
                f"{self.machines} machines do not share {self.gpus} GPUs evenly",
                where="--nodes",
                hint="Take a number of machines that divides the number of GPUs.",
            )
        if self.per_machine > MOST_LINKED:
            raise UsageError(
                f"{self.per_machine} GPUs in a machine",
                where="--nodes",
                hint=f"A machine has {MOST_LINKED} at most.",
            )

    def fabric(self, gpu: PricedGpu) -> Fabric:
        """The machines with one kind of GPU."""
        several = self.gpus > self.per_machine
        return Fabric(gpu, self.per_machine, self.network if several else None)


@dataclass
class PlanSession:
    """One plan of a target.

    Attributes:
        target: What is trained.
        options: How its step is captured.
        gpus: Kinds of GPU to compare.
        cluster: How many, and what joins them.
        batch: Samples of a step, over all GPUs; None for 1024, or for those of a program's step: of one whose
            model is in ``DistributedDataParallel`` on each GPU.
        layers: Of the model, where it is built with fewer; 0: as many as it is built with.
        epoch: Samples of an epoch; 0 where unknown.
        choices: Names of what it holds less by, of :data:`tilefit.parallel.memory_choices.CHOICES`.
        timeout_s: How long a capture may take.
        fresh: Capture again, although the target is unchanged.
        tell: Is told what goes on.
        fleet: The cluster that searches; None for this machine.
        store: Where the best splits over each number of GPUs are kept, so that a plan that was interrupted
            goes on where it stopped; None for nowhere.
        known: Of the numbers of GPUs of the last plan, how many were from there.
    """

    target: str
    options: AnyOptions
    gpus: Sequence[PricedGpu]
    cluster: Cluster
    batch: int | None = None
    layers: int = 0
    epoch: int = 0
    choices: tuple[str, ...] = ()
    timeout_s: float = 300.0
    fresh: bool = False
    tell: Callable[[str], None] = lambda text: None
    fleet: Fleet | None = None
    store: Store | None = None
    known: int = field(default=0, init=False)

    def model(self) -> tuple[Model, tuple[str, ...]]:
        """The captured step, and what is to be said of it.

        Raises:
            TilefitError: it cannot be captured, or has no layers.
        """
        if isinstance(self.options, ProgramOptions):
            gpu = self.gpus[0].name
            step = capture_in_child(self.target, self.options, self.timeout_s, gpu=gpu, told=self.tell)
            return Model(_of_one_gpu(step), self.layers), (*step.notes, *_assumed(step))
        options = self.options
        if options.optimizer in _FUSED:
            options = replace(options, fused_optimizer=True)
        if not options.autocast:
            options = replace(options, weights="bf16")
        name, layers = "", 0
        if self.target.startswith("hf:"):
            options = replace(options, batch=_SAMPLES)
            from tilefit.capture.targets.kinds.hf import repeated_layers
            from tilefit.capture.torchvision_import import tolerated

            with tolerated():
                name, layers = repeated_layers(self.target.removeprefix("hf:"), options.arguments)
        if layers > FEW_LAYERS:
            arguments = {**options.arguments, name: FEW_LAYERS}
            few = replace(options, arguments=arguments)
            step = capture_in_child(self.target, few, self.timeout_s, fresh=self.fresh)
            layers = self.layers or layers
            notes = (f"Captured with {FEW_LAYERS} of its {layers} layers, which are alike.",)
            return Model(step, layers), (*notes, *step.notes)
        step = capture_in_child(self.target, options, self.timeout_s, fresh=self.fresh)
        return Model(step, self.layers), step.notes

    def plan(self) -> SplitPlan:
        """The best splits over each kind of GPU.

        Raises:
            TilefitError: the target cannot be captured, or no kind of GPU can share the batch.
        """
        if self.batch is not None and self.batch < 1:
            raise UsageError(
                f"a global batch of {self.batch}", where="--global-batch", hint="Take 1 or more."
            )
        require_choices(self.choices, "--memory")
        self.cluster.check()
        model, notes = self.model()
        own = model.step.batch * (self.cluster.gpus if _is_replicated(model.step) else 1)
        batch = self.batch or (own if model.step.program else _BATCH)
        made = self._choices(model, batch)
        return SplitPlan(
            self.target,
            self.cluster.gpus,
            batch,
            tokens_of(model.step),
            model.parameters,
            model.flop,
            made,
            self.epoch,
            (*notes, *_without_bf16(model.step, self.gpus), *said_of(self.choices), _PREDICTED),
        )

    def _choices(self, model: Model, batch: int) -> tuple[Choice, ...]:
        precision, most = precision_of(model.step), self.cluster.gpus
        planners = [
            Planner(model, self.cluster.fabric(gpu), Job(batch, precision, choices=self.choices))
            for gpu in self.gpus
        ]
        work = [
            (place, count)
            for place, planner in enumerate(planners)
            for count in sorted({*planner.counts(most), most}, reverse=True)
        ]
        kept = _Kept(self.store, model, planners, most)
        found: dict[tuple[int, int], list[Priced] | UsageError] = {} if self.fresh else kept.among(work)
        self.known = len(found)
        work = [item for item in work if item not in found]
        done = (
            self.fleet.map(_best, (planners, most), work)
            if self.fleet
            else ((place, _best((planners, most), item)) for place, item in enumerate(work))
        )
        with closing(done):
            for place, best in done:
                gpu, count = work[place]
                self.tell(f"{self.gpus[gpu].title}, {counted(count, 'GPU')}")
                found[work[place]] = best
                kept.put(work[place], best)
                if isinstance(best, UsageError) and count == most and len(self.gpus) == 1:
                    raise best
        return tuple(
            self._choice(planner, {count: best for (gpu, count), best in found.items() if gpu == place})
            for place, planner in enumerate(planners)
        )

    def _choice(self, planner: Planner, found: dict[int, list[Priced] | UsageError]) -> Choice:
        """Of the best splits over each number of GPUs, or why there are none."""
        gpu, precision = planner.fabric.gpu, planner.job.precision
        price = self.cluster.prices.get(gpu.name, self.cluster.prices.get(""))
        peak = gpu.peak_flop_per_s(
            (planner.model.step.settings.amp or "bf16") if precision.work == 2 else "tf32"
        )
        ranked = found[self.cluster.gpus]
        if isinstance(ranked, UsageError):
            return Choice(planner.fabric, (), (), price, peak, ranked.what)
        offered = offers(planner, self.cluster.gpus, ranked[0] if ranked else None)
        if not ranked:
            return Choice(
                planner.fabric, (), (), price, peak, "No split fits into the memory.", offers=offered
            )
        frontier = tuple((n, best[0]) for n, best in sorted(found.items()) if isinstance(best, list) and best)
        best = ranked[0].split
        usual, uneven_s = planner.job.framework, 0.0
        slow_s = planner.step_s(best, replace(usual, host=SLOW_HOST))
        if best.experts > 1:
            uneven_s = planner.step_s(best, replace(usual, imbalance=UNEVEN))
        return Choice(
            planner.fabric, tuple(ranked), frontier, price, peak, "", slow_s, uneven_s, offers=offered
        )


def _of_one_gpu(step: Step) -> Step:
    """The step of a program, if it is what every rank of a plan would do on its own samples.

    Raises:
        UsageError: it is not.
    """
    program = step.program
    why, hint = "", ""
    if not step.settings.training or not program.updates:
        why, hint = "trains nothing", "A plan is made for what trains."
    elif not program.optimizers:
        why, hint = "changes its parameters without an optimizer", "A plan knows those of torch.optim."
    elif program.ranks > 1 or program.exchanges:
        why = f"is one of {program.ranks} ranks already"
        hint = "Run it for one GPU: without WORLD_SIZE in the environment."
    elif len(program.optimizers) > 1:
        why = f"has several optimizers: {', '.join(dict.fromkeys(program.optimizers))}"
        hint = "A plan knows one model with one optimizer."
    elif program.micro_batches > 1:
        why = f"sums the gradients of {program.micro_batches} micro-batches"
        hint = "A plan chooses those itself: let it take one, by its own arguments, and say --global-batch."
    if why:
        raise UsageError(f"the step {why}", where=program.command, hint=hint)
    return step


def _is_replicated(step: Step) -> bool:
    """Whether a program has put its model into ``DistributedDataParallel``: its batch is one rank's."""
    return "DistributedDataParallel" in step.modules.values()


def _assumed(step: Step) -> tuple[str, ...]:
    """What is to be said of a program that is planned."""
    ran = f"{step.program.command} ran on one GPU ({step.program.step})"
    notes = [f"{ran}; what its loop copies and waits for is left out."]
    if _is_replicated(step):
        notes.append("Its model is in DistributedDataParallel: every GPU is given that batch.")
    if step.settings.compiled:
        notes.append("Plans know no torch.compile: the step is priced without.")
    return tuple(notes)


def _without_bf16(step: Step, gpus: Sequence[PricedGpu]) -> Iterator[str]:
    """What is to be said of GPUs that have no Tensor Cores for the type that is trained in."""
    if "bf16" in {step.settings.amp, *(each.dtype for each in step.parameters.values())}:
        for gpu in gpus:
            if not gpu.supports("bf16"):
                other = "; --amp fp16 has some" * gpu.supports("fp16")
                yield f"{gpu.title} has no Tensor Cores for bf16: products take what fp32 takes{other}."


class _Kept:
    """The best splits over numbers of GPUs, in the store, from which they are priced anew."""

    def __init__(self, store: Store | None, model: Model, planners: Sequence[Planner], most: int) -> None:
        self._store, self._planners = store, planners
        step = hashlib.sha256(model.step.to_json().encode()).hexdigest() if store is not None else ""
        self._about = ["plan", versions(_ROOMS), step, model.layers, most]

    def among(self, work: Sequence[tuple[int, int]]) -> dict[tuple[int, int], list[Priced] | UsageError]:
        """What is known of it."""
        found: dict[tuple[int, int], list[Priced] | UsageError] = {}
        for item in work:
            if self._store is not None and (text := self._store.point(self._key(item))) is not None:
                priced = self._planners[item[0]].priced
                found[item] = [priced(TrainingSplit(**each)) for each in json.loads(text)]
        return found

    def put(self, item: tuple[int, int], best: list[Priced] | UsageError) -> None:
        """Keep what was found; why there is none is found as quickly again."""
        if self._store is not None and not isinstance(best, UsageError):
            self._store.keep_point(self._key(item), json.dumps([asdict(each.split) for each in best]))

    def _key(self, item: tuple[int, int]) -> str:
        planner = self._planners[item[0]]
        gpu, fabric = planner.fabric.gpu, planner.fabric
        calibration = getattr(gpu, "calibration", None)
        joined = [fabric.per_machine, fabric.network and asdict(fabric.network)]
        about = [
            *self._about,
            gpu.name,
            calibration and calibration.about,
            joined,
            asdict(planner.job),
            item[1],
        ]
        return hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()


def _best(common: tuple[Sequence[Planner], int], item: tuple[int, int]) -> list[Priced] | UsageError:
    """The best splits of one planner over so many GPUs, or why there are none."""
    (planners, most), (place, count) = common, item
    try:
        return planners[place].best(count, KEPT if count == most else 1)
    except UsageError as error:
        return error
