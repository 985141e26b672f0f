"""Models of libraries in a program's training loop: does each get through, and does it price as by a factory?

    python benchmarks/program_models.py                 # all
    python benchmarks/program_models.py hf:bert timm:   # those that begin so
    python benchmarks/program_models.py --draw 10 --seed 3   # ten of each library that are not listed
    (that of seed 20261123 is in results/program_models_drawn.json)
    python benchmarks/program_models.py --cost          # also the price against the target's own capture
    python benchmarks/program_models.py --rows rows.json    # keeps what came of each; goes on where it was

Each model trains in a process forked from one that has imported the libraries, on the emulated GPU, with
inputs made on the CPU. Without network and GPU; 200 models take some 15 minutes on two cores.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import select
import signal
import sys
import tempfile
import time
import warnings
from pathlib import Path

HF = """albert align altclip bart beit bert bert-generation big_bird bigbird_pegasus biogpt blenderbot bloom
bridgetower camembert canine clip clipseg codegen cohere convbert convnext convnextv2 ctrl cvt data2vec-audio
data2vec-text data2vec-vision deberta deberta-v2 deit detr dinov2 distilbert dpr dpt efficientnet electra
encodec ernie esm falcon fnet focalnet funnel gemma gemma2 glm glpn gpt2 gpt_bigcode gpt_neo gpt_neox gptj
granite hubert ibert layoutlm led levit lilt llama longformer longt5 luke m2m_100 mamba mamba2 marian mbart
megatron-bert mistral mixtral mobilebert mobilenet_v1 mobilenet_v2 mobilevit mpnet mpt mvp nystromformer olmo
opt pegasus perceiver persimmon phi phi3 phimoe plbart poolformer prophetnet pvt qwen2 qwen2_moe qwen3
recurrent_gemma regnet rembert resnet roberta roformer rwkv segformer sew siglip splinter squeezebert
stablelm starcoder2 swiftformer swin swinv2 t5 timesformer umt5 unispeech van videomae vilt vit vit_mae
vits wav2vec2 wavlm whisper xglm xlm xlm-roberta xlnet xmod yolos yoso zamba""".split()
TORCHVISION = """alexnet convnext_tiny convnext_base densenet121 densenet201 efficientnet_b0 efficientnet_v2_s
googlenet inception_v3 maxvit_t mnasnet0_5 mnasnet1_0 mobilenet_v2 mobilenet_v3_large mobilenet_v3_small
regnet_x_400mf regnet_y_400mf regnet_y_8gf resnet18 resnet50 resnet152 resnext50_32x4d shufflenet_v2_x1_0
squeezenet1_0 squeezenet1_1 swin_t swin_v2_t vgg11 vgg16_bn vit_b_16 wide_resnet50_2 fcn_resnet50
deeplabv3_resnet50 lraspp_mobilenet_v3_large r3d_18 mvit_v2_s swin3d_t s3d""".split()
TIMM = """beit_base_patch16_224 bat_resnext26ts botnet26t_256 cait_s24_224 coat_tiny coatnet_0_rw_224
convformer_s18 convit_small convmixer_768_32 convnext_tiny convnextv2_tiny crossvit_9_240 cspresnet50
davit_tiny deit3_small_patch16_224 densenet121 dla34 dm_nfnet_f0 dpn68 eca_nfnet_l0 edgenext_small
efficientformer_l1 efficientnet_b0 efficientvit_b0 eva02_tiny_patch14_224 fastvit_t8 focalnet_tiny_srf
gcvit_tiny gernet_s ghostnet_100 gmixer_24_224 halonet26t hardcorenas_a hgnet_tiny hrnet_w18 inception_v4
lambda_resnet26t levit_128 maxvit_tiny_tf_224 maxxvit_rmlp_nano_rw_256 mixer_b16_224 mobilenetv3_large_100
mobilevit_s mobilevitv2_050 mobileone_s0 mvitv2_tiny nasnetalarge nest_tiny nf_resnet50 pit_s_224
poolformer_s12 pvt_v2_b0 regnety_002 repvgg_a0 resmlp_12_224 resnest14d resnet50 resnetv2_50 rexnet_100
sebotnet33ts_256 sequencer2d_s skresnet18 swin_tiny_patch4_window7_224 swinv2_tiny_window8_256 tinynet_a
tnt_s_patch16_224 tresnet_m twins_svt_small vgg11 visformer_tiny vit_small_patch16_224 volo_d1_224
xception41 xcit_nano_12_p16_224""".split()
SECONDS = 240
#: Models that go through their tokens one by one in Python, and models that take no other number of them.
TOKENS = dict.fromkeys(("mamba", "mamba2", "recurrent_gemma", "rwkv", "zamba"), 64) | {"perceiver": 2048}

_PROGRAM = """
import torch
from tilefit.capture.inputs import make
from tilefit.capture.targets import load
from tilefit.options import TargetOptions
target = load({target!r}, TargetOptions(batch={batch}, seq={seq}, on_cpu=True))
device = "cuda" if torch.cuda.is_available() else "cpu"
model = target.model.to(device).train()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
for step in range(5):
    inputs = torch.utils._pytree.tree_map(
        lambda leaf: leaf.to(device) if isinstance(leaf, torch.Tensor) else leaf, target.inputs
    )
    output = model(**inputs) if isinstance(inputs, dict) else model(*inputs)
    from tilefit.capture.forward import loss_of_output
    loss, _ = loss_of_output(output, target.loss)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(step, loss.item())
"""


def program(target: str, batch: int, cost: bool, write: int) -> None:
    """Train in this process; what came of it is written as JSON."""
    from tilefit import gpus
    from tilefit.capture.program.run import capture_program
    from tilefit.errors import TilefitError
    from tilefit.options import ProgramOptions

    def answer(**values: object) -> None:
        os.write(write, json.dumps(values).encode())
        os._exit(0)

    start = time.perf_counter()
    path = Path(tempfile.mkdtemp()) / "train.py"
    path.write_text(_PROGRAM.format(target=target, batch=batch, seq=TOKENS.get(target.partition(":")[2])))

    def done(step: object) -> None:
        if isinstance(step, TilefitError):
            answer(error=str(step).splitlines()[0])
        found = {"ops": len(step.ops), "flop": step.flop, "events": len(step.program.events)}
        if cost:
            found["s"] = seconds(step)
        answer(took=time.perf_counter() - start, assumed=len(step.program.assumptions), **found)

    try:
        options = ProgramOptions(str(path))
        capture_program(options, gpus.get("h100-sxm"), path.parent, done, lambda _: None)
    except TilefitError as error:
        answer(error=str(error).splitlines()[0])


def seconds(step: object) -> float:
    """A step's price."""
    from tilefit.assessment import Assessment
    from tilefit.cost.priced import resolve

    return Assessment(step, resolve("h100-sxm")[0]).context.estimate.gpu_time_s


def by_target(target: str, batch: int, write: int) -> None:
    """The same by the target's own capture."""
    from tilefit.capture.child import capture_target
    from tilefit.options import TargetOptions

    try:
        step = capture_target(target, TargetOptions(batch=batch))
        os.write(write, json.dumps({"ops": len(step.ops), "flop": step.flop, "s": seconds(step)}).encode())
    except Exception as error:  # noqa: BLE001 - a line of the table
        os.write(write, json.dumps({"error": str(error).splitlines()[0]}).encode())
    os._exit(0)


def forked(work: object, *arguments: object) -> dict[str, object]:
    """What a forked process answers."""
    read, write = os.pipe()
    child = os.fork()
    if not child:
        sink = os.open(os.environ.get("PROGRAM_LOG", os.devnull), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(sink, 1), os.dup2(sink, 2)
        work(*arguments, write)
    os.close(write)
    ready, _, _ = select.select([read], [], [], SECONDS)
    text = os.read(read, 1 << 20) if ready else b""
    if not ready:
        os.kill(child, signal.SIGKILL)
    os.close(read)
    status = os.waitpid(child, 0)[1]
    return json.loads(text) if text else {"error": f"no answer ({'late' if not ready else status})"}


def drawn(count: int, seed: int) -> list[str]:
    """So many models of each library, none of those that are listed here."""
    import timm
    import torchvision
    import transformers

    auto = transformers.models.auto.modeling_auto
    kinds = ("CAUSAL_LM", "MASKED_LM", "SEQ_TO_SEQ_CAUSAL_LM", "IMAGE_CLASSIFICATION", "AUDIO_CLASSIFICATION")
    heads = {name for kind in kinds for name in getattr(auto, f"MODEL_FOR_{kind}_MAPPING_NAMES")}
    libraries = {"hf": (heads, HF), "torchvision": (torchvision.models.list_models(), TORCHVISION)}
    libraries["timm"] = (timm.list_models(), TIMM)
    values = random.Random(seed)
    return [
        f"{library}:{name}"
        for library, (names, known) in libraries.items()
        for name in values.sample(sorted({*names} - {*known}), count)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("only", nargs="*")
    parser.add_argument("--cost", action="store_true")
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--draw", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rows", type=Path)
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    import torch._dynamo  # noqa: F401 - once for all
    import transformers  # noqa: F401

    import tilefit.capture.program.run  # noqa: F401
    from tilefit.capture.torchvision_import import tolerated

    with tolerated():
        import timm  # noqa: F401
        import torchvision  # noqa: F401
    targets = [
        *(f"hf:{name}" for name in HF),
        *(f"torchvision:{name}" for name in TORCHVISION),
        *(f"timm:{name}" for name in TIMM),
    ]
    if arguments.draw:
        targets = drawn(arguments.draw, arguments.seed)
    if arguments.only:
        targets = [each for each in targets if each.startswith(tuple(arguments.only))]
    path = arguments.rows
    rows = json.loads(path.read_text()) if path is not None and path.exists() else {}
    passed = sum("error" not in rows[each] for each in targets if each in rows)
    for target in targets:
        if target in rows:
            continue
        found = forked(program, target, arguments.batch, arguments.cost)
        if arguments.cost and "error" not in found:
            own = forked(by_target, target, arguments.batch)
            if "s" in own:
                off = [f"{found[each] / own[each] - 1:+.2%}" for each in ("s", "flop")]
                found["against"] = f"{' '.join(off)} {found['ops']}/{own['ops']}"
        passed += "error" not in found
        rows[target] = found
        if path is not None:
            path.write_text(json.dumps(rows, indent=1) + "\n")
        print(f"{'ok  ' if 'error' not in found else 'FAIL'} {target:40} {found}", flush=True)
    print(f"{passed} of {len(targets)}")


if __name__ == "__main__":
    sys.exit(main())
