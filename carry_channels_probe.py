import sys, time, copy, statistics, json
sys.path.insert(0, "src"); sys.path.insert(0, "examples")
import torch
from torch import nn
from models import odd_cnn
import tilefit.capture.torchvision_import as ti
with ti.tolerated():
    import torchvision
from tilefit.fixes.run import Run
from tilefit.fixes.channels import PaddedChannels
from tilefit.fixes.channels_last import InChannelsLast
from tilefit.fixes.channel_paths import paddings

dev = "cuda" if torch.cuda.is_available() else "cpu"
def pad(m, sizes, inputs):
    ps = paddings(m, sizes, inputs)
    PaddedChannels(tuple(p.path for p in ps), tuple(sizes.items()), tuple(ps)).apply(Run(m))
def cl(m):
    mods = tuple(n for n, x in m.named_modules() if isinstance(x, nn.Conv2d))
    InChannelsLast(mods, mods[:1]).apply(Run(m))
def odd_wide(sizes):
    f = lambda c: sizes.get(c, c)
    layers = []
    for i, o in ((3, 60), (60, 60), (60, 90), (90, 90), (90, 150), (150, 150)):
        layers += [nn.Conv2d(f(i), f(o), 3, padding=1), nn.BatchNorm2d(f(o)), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(f(150), 100))
S8 = {60: 64, 90: 96, 150: 152}; S32 = {60: 64, 90: 96, 150: 160}; S64 = {60: 64, 90: 128, 150: 192}
def odd(f=None):
    def make():
        m = odd_cnn()[0]
        if f: f(m)
        return m
    return make
small = dev == "cpu"
B = 2 if small else 64
I = 16 if small else 64
groups = {
 "odd": (lambda: torch.randn(B, 3, I, I), {
   "orig": odd(), "orig cl": odd(cl),
   "pad8 nchw": odd(lambda m: pad(m, S8, {})),
   "pad8 cl": odd(lambda m: (cl(m), pad(m, S8, {}))),
   "pad32 cl": odd(lambda m: (cl(m), pad(m, S32, {}))),
   "pad64 cl": odd(lambda m: (cl(m), pad(m, S64, {}))),
   "pad32+3to8 cl": odd(lambda m: (cl(m), pad(m, S32, {3: 8}))),
   "hand32 nchw": lambda: odd_wide(S32),
   "hand8 cl": lambda: (lambda m: (cl(m), m)[1])(odd_wide(S8)),
   "hand32 cl": lambda: (lambda m: (cl(m), m)[1])(odd_wide(S32)),
   "hand64 cl": lambda: (lambda m: (cl(m), m)[1])(odd_wide(S64)),
   "orig compiled": lambda: torch.compile(odd_cnn()[0]),
   "pad32 cl compiled": lambda: torch.compile(odd(lambda m: (cl(m), pad(m, S32, {})))()),
 }),
 "odd b4": (lambda: torch.randn(4, 3, 32, 32), {
   "orig": odd(), "pad32 cl": odd(lambda m: (cl(m), pad(m, S32, {}))), "hand32 cl": lambda: (lambda m: (cl(m), m)[1])(odd_wide(S32)),
 }),
}
def tv(n, f=None):
    def make():
        m = getattr(torchvision.models, n)()
        if f: f(m)
        return m
    return make
if not small:
    for n in ("resnet50", "mobilenet_v3_large", "shufflenet_v2_x1_0"):
        groups[n] = (lambda: torch.randn(128, 3, 224, 224), {
            "orig": tv(n), "cl": tv(n, cl), "cl 3to8": tv(n, lambda m: (cl(m), pad(m, {}, {3: 8}))), "cl 3to4": tv(n, lambda m: (cl(m), pad(m, {}, {3: 4})))})
    groups["shufflenet_v2_x1_0"][1]["cl pad"] = tv("shufflenet_v2_x1_0", lambda m: (cl(m), pad(m, {58: 64, 116: 128}, {58: 64, 116: 128})))
out = {}
for gname, (data, variants) in groups.items():
    x = data().to(dev)
    steps = {}
    for name, make in variants.items():
        torch.manual_seed(0)
        m = make().to(dev).train()
        opt = torch.optim.AdamW(m.parameters(), lr=1e-4)
        def step(m=m, opt=opt):
            with torch.autocast(dev, dtype=torch.bfloat16):
                loss = m(x).float().square().mean()
            loss.backward(); opt.step(); opt.zero_grad(); return loss.detach()
        try:
            ls = [float(step()) for _ in range(3)]
            steps[name] = step
        except Exception as e:
            print(gname, name, "FAILED", repr(e)[:300]); continue
        torch.cuda.synchronize() if dev == "cuda" else None
    t = {n: [] for n in steps}
    for r in range(5):
        for n in (list(steps) if r % 2 == 0 else list(steps)[::-1]):
            steps[n]()
            torch.cuda.synchronize() if dev == "cuda" else None
            a = time.perf_counter(); k = 6
            for _ in range(k): steps[n]()
            torch.cuda.synchronize() if dev == "cuda" else None
            t[n].append((time.perf_counter() - a) / k)
    base = None
    for n in steps:
        wall = statistics.median(t[n]) * 1e3
        base = base or wall
        gpu = 0
        if dev == "cuda":
            from torch.profiler import profile, ProfilerActivity
            with profile(activities=[ProfilerActivity.CUDA]) as p:
                steps[n](); torch.cuda.synchronize()
            ev = [e for e in p.events() if e.device_type == torch.autograd.DeviceType.CUDA]
            gpu = sum(e.time_range.elapsed_us() for e in ev) / 1e3
            nk = len(ev)
        else: nk = 0
        torch.cuda.reset_peak_memory_stats() if dev == "cuda" else None
        print(f"{gname:20s} {n:22s} wall {wall:8.3f} ms  x{base/wall:5.2f}  gpu {gpu:8.3f} ms kernels {nk}", flush=True)
    del steps
    if dev == "cuda": torch.cuda.empty_cache()
