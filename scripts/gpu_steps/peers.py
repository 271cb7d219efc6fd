#!/usr/bin/env python3
"""Times PyTorch on the ops and the denoise steps that `gpu-check` times, on the same card.

    python peers.py perf OUT.json [--small] [--compile]
    python peers.py step sd15|sd3m MODEL OUT.json [--small] [--limit 90] [--peer plain|diffusers]

OUT.json holds at any time what has been measured so far; `-` is standard output, written to at the end.

perf takes the shapes of shapes.json: 20 launches in a CUDA graph, the median of 10 replays, on normal
values in bf16. Each op is in the layout that PyTorch is fastest in. PyTorch has no kernel for a norm
with SiLU or modulation, nor for GEGLU: these take several launches; --compile adds `compiled_ms`.

    {"measured", "device", "torch", "entries": [{"name", "op", "ms", "compiled_ms"?, "note"?}]}

step takes one forward of the denoiser for both prompts of one picture in bf16 (512 px for sd15, 1024 px
for sd3m), eager and compiled, each call by call and as a CUDA graph. The net is diffusers' where that
can be imported, and otherwise that of nets.py, which gave diffusers' bits in float32. Compiling happens
in a process of its own, which is ended when --limit seconds have gone by since this script began.

    {"measured", "device", "torch", "peer", "eager_ms", "eager_graph_ms", "compiled_ms",
     "compiled_graph_ms", "peak_bytes", "note"}

Without CUDA nothing is measured: --small runs toy shapes on the CPU, to show that the script works, and
"measured" is false. A time that is missing is null, and the note says why.
"""

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from torch.nn import functional as F

from files import read_tensors, write_json
from nets import NETS

STARTED = time.monotonic()
HAS_CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if HAS_CUDA else "cpu")
DTYPE = torch.bfloat16
LAUNCHES, REPLAYS, WARM_UPS = 20, 10, 3
SHAPES = Path(__file__).with_name("shapes.json")


def about(args):
    name = torch.cuda.get_device_name() if HAS_CUDA else "cpu"
    return dict(measured=HAS_CUDA and not args.small, device=name, torch=torch.__version__)


def save(args, report, is_complete=False):
    if str(args.out) != "-":
        write_json(args.out, report)
    elif is_complete:
        print(json.dumps(report, indent=1))


def normal(*shape):
    return torch.randn(shape, device=DEVICE, dtype=DTYPE)


def copy(n_bytes):
    x, out = normal(n_bytes // DTYPE.itemsize), normal(n_bytes // DTYPE.itemsize)
    return lambda: out.copy_(x)


def linear(m, n, k):
    x, weight, bias = normal(m, k), normal(n, k), normal(n)
    return lambda: F.linear(x, weight, bias)


def attention(batch, n_queries, n_keys, n_heads, head_dim):
    def heads(n_tokens):
        return normal(batch, n_tokens, n_heads, head_dim).transpose(1, 2)

    q, k, v = heads(n_queries), heads(n_keys), heads(n_keys)
    return lambda: F.scaled_dot_product_attention(q, k, v)


def conv2d(batch, height, width, c_in, c_out):
    x = normal(batch, c_in, height, width).to(memory_format=torch.channels_last)
    weight = normal(c_out, c_in, 3, 3).to(memory_format=torch.channels_last)
    bias = normal(c_out)
    return lambda: F.conv2d(x, weight, bias, padding=1)


def group_norm_silu(batch, height, width, channels, groups):
    x, weight, bias = normal(batch, channels, height, width), normal(channels), normal(channels)
    return lambda: F.silu(F.group_norm(x, groups, weight, bias, 1e-5))


def layer_norm_modulated(batch, rows, cols):
    x, scale, shift = normal(batch, rows, cols), normal(batch, 1, cols), normal(batch, 1, cols)
    return lambda: F.layer_norm(x, (cols,), eps=1e-6) * (1 + scale) + shift


def geglu(batch, rows, cols):
    x = normal(batch, rows, 2 * cols)

    def run():
        out, gate = x.chunk(2, dim=-1)
        return out * F.gelu(gate)

    return run


OPS = dict(
    copy=copy,
    linear=linear,
    attention=attention,
    conv2d=conv2d,
    group_norm_silu=group_norm_silu,
    layer_norm_modulated=layer_norm_modulated,
    geglu=geglu,
)
UNFUSED = ("group_norm_silu", "layer_norm_modulated", "geglu")


def graph_ms(run, n_launches):
    """Median over replays of a CUDA graph of launches, per launch; on the CPU of plain calls."""
    if not HAS_CUDA:
        return call_ms(run, 2)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(WARM_UPS):
            run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(n_launches):
            run()
    for _ in range(WARM_UPS):
        graph.replay()
    times = []
    for _ in range(REPLAYS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / n_launches)
    return statistics.median(times)


def call_ms(run, n_calls=REPLAYS):
    """Median of single calls by the host's clock, each waited for."""
    wait = torch.cuda.synchronize if HAS_CUDA else lambda: None
    for _ in range(WARM_UPS if HAS_CUDA else 1):
        run()
    times = []
    for _ in range(n_calls):
        wait()
        start = time.perf_counter()
        run()
        wait()
        times.append((time.perf_counter() - start) * 1e3)
    return statistics.median(times)


def attempt(document, key, measure):
    """`document[key]`, or null and a note: one failure must not take the other figures along."""
    try:
        document[key] = measure()
    except Exception as error:  # noqa: BLE001, whatever PyTorch raises.
        add_note(document, f"{key}: {type(error).__name__}: {str(error)[:300]}")


def add_note(document, note):
    document["note"] = "; ".join(filter(None, [document.get("note"), note]))


def perf(args):
    report = dict(about(args), entries=[])
    if not HAS_CUDA and not args.small:
        add_note(report, "no CUDA device")
        save(args, report, is_complete=True)
        return
    for shape in json.loads(SHAPES.read_text()):
        entry = dict(name=shape["name"], op=shape["op"], ms=None)
        report["entries"].append(entry)
        attempt(entry, "ms", lambda: graph_ms(op_of(shape, args.small), LAUNCHES))
        if args.compile and shape["op"] in UNFUSED:
            entry["compiled_ms"] = None
            torch.compiler.reset()  # Else the second shape of an op might be compiled for any.
            attempt(
                entry,
                "compiled_ms",
                lambda: graph_ms(torch.compile(op_of(shape, args.small), dynamic=False), LAUNCHES),
            )
        save(args, report)
    save(args, report, is_complete=True)


def op_of(shape, is_small):
    return OPS[shape["op"]](**shape["small" if is_small else "dims"])


def load_net(args):
    """(the net, who made it, its config)."""
    folder = args.model / {"sd15": "unet", "sd3m": "transformer"}[args.kind]
    config = json.loads((folder / "config.json").read_text())
    weights = read_tensors(folder / "diffusion_pytorch_model.safetensors")
    peer, build = "nets.py", NETS[args.kind]
    if args.peer != "plain":
        try:
            import diffusers

            names = dict(sd15="UNet2DConditionModel", sd3m="SD3Transformer2DModel")
            build = getattr(diffusers, names[args.kind]).from_config
            peer = f"diffusers {diffusers.__version__}"
        except Exception:  # noqa: BLE001, an installation may be broken in many ways.
            if args.peer == "diffusers":
                raise
    with torch.device("meta"):
        net = build(config)
    net.load_state_dict(weights, assign=True)
    net = net.to(DEVICE, DTYPE).requires_grad_(False).eval()
    if args.kind == "sd15":
        net = net.to(memory_format=torch.channels_last)
    return net, peer, config


def inputs_of(args, config):
    """The arguments of one step by diffusers' names: both prompts of one picture."""
    side = 16 if args.small else config["sample_size"]
    latents = normal(2, config["in_channels"], side, side)
    times = torch.full((2,), 500.0, device=DEVICE)
    if args.kind == "sd15":
        text = normal(2, 77, config["cross_attention_dim"])
        return latents.to(memory_format=torch.channels_last), times, text
    text = normal(2, 77 + 256, config["joint_attention_dim"])
    return latents, times, text, normal(2, config["pooled_projection_dim"])


def step_of(args):
    """(one step of the net, the net, who made it)."""
    net, peer, config = load_net(args)
    inputs = inputs_of(args, config)
    if peer == "nets.py":
        return (lambda net: net(*inputs)), net, peer
    if args.kind == "sd15":
        return (lambda net: net(*inputs, return_dict=False)[0]), net, peer
    names = ("hidden_states", "timestep", "encoder_hidden_states", "pooled_projections")
    by_name = dict(zip(names, inputs))
    return (lambda net: net(**by_name, return_dict=False)[0]), net, peer


def step(args):
    report = dict(about(args), peer=None)
    ways = ("eager", "compiled")
    report |= {f"{way}{how}_ms": None for way in ways for how in ("", "_graph")}
    report |= dict(peak_bytes=None, note="")
    save(args, dict(report, measured=False, note="did not finish"))
    if not HAS_CUDA and not args.small:
        add_note(report, "no CUDA device")
    else:
        try:
            run, net, report["peer"] = step_of(args)
        except Exception as error:
            add_note(report, f"no net: {error}")
            save(args, dict(report, measured=False), is_complete=True)
            raise
        attempt(report, "eager_ms", lambda: call_ms(lambda: run(net)))
        report["measured"] &= report["eager_ms"] is not None
        if HAS_CUDA:
            attempt(report, "peak_bytes", lambda: peak_bytes(lambda: run(net)))
        attempt(report, "eager_graph_ms", lambda: graph_ms(lambda: run(net), 1))
        save(args, dict(report, note="compiled: did not finish"))
        del run, net
        if HAS_CUDA:
            torch.cuda.empty_cache()
        with tempfile.TemporaryDirectory() as scratch:
            add_compiled(args, report, Path(scratch) / "compiled.json")
    save(args, report, is_complete=True)


def peak_bytes(run):
    """Of one step and the weights, without what choosing convolutions took before."""
    torch.cuda.reset_peak_memory_stats()
    run()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated()


def add_compiled(args, report, part):
    """Compiling may hang or take minutes, and starts processes: it has a process group of its own,
    which ends with this process unless that is killed outright."""
    if args.limit <= 0:
        add_note(report, "compiled: not asked for")
        return
    seconds_left = max(args.limit - (time.monotonic() - STARTED), 0)
    command = [sys.executable, __file__, *sys.argv[1:], "--compiled-into", str(part)]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    child = subprocess.Popen(command, stdout=sys.stderr, start_new_session=True)
    try:
        if child.wait(seconds_left):
            add_note(report, f"compiled: exit status {child.returncode}")
    except subprocess.TimeoutExpired:
        add_note(report, f"compiled: not within {seconds_left:.0f} s")
    finally:
        try:
            os.killpg(child.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        child.wait()
    if part.exists():
        found = json.loads(part.read_text())
        add_note(report, found.pop("note", ""))
        report |= found


def step_compiled(args):
    found = {}
    run, net, _ = step_of(args)
    compiled = torch.compile(net, mode=args.mode, dynamic=False)
    attempt(found, "compiled_ms", lambda: call_ms(lambda: run(compiled)))
    write_json(args.compiled_into, found)
    if "compiled_ms" in found:
        attempt(found, "compiled_graph_ms", lambda: graph_ms(lambda: run(compiled), 1))
        write_json(args.compiled_into, found)


@torch.inference_mode()
def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    ops = commands.add_parser("perf", help="single ops")
    ops.add_argument("out", type=Path)
    ops.add_argument("--compile", action="store_true", help="also ops that PyTorch has to fuse")
    steps = commands.add_parser("step", help="denoise steps")
    steps.add_argument("kind", choices=NETS)
    steps.add_argument("model", type=Path, help="diffusers folder")
    steps.add_argument("out", type=Path)
    steps.add_argument("--limit", type=float, default=90, help="seconds in all; 0: do not compile")
    steps.add_argument("--mode", default="default", help="torch.compile's (default: %(default)s)")
    steps.add_argument("--peer", choices=["plain", "diffusers"], help="default: diffusers if found")
    steps.add_argument("--compiled-into", type=Path, help=argparse.SUPPRESS)
    for command in (ops, steps):
        command.add_argument("--small", action="store_true", help="toy shapes; nothing is measured")
    args = parser.parse_args()
    torch.manual_seed(0)
    torch.backends.cudnn.benchmark = True
    if args.command == "perf":
        perf(args)
    elif args.compiled_into:
        step_compiled(args)
    else:
        step(args)


if __name__ == "__main__":
    main()
