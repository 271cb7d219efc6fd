"""Adds to `gpu-check info` (standard input) what nvidia-smi tells, where there is one."""
import json, shutil, subprocess, sys

info = json.load(sys.stdin)
info["measured"] = shutil.which("nvidia-smi") is not None and "stand-in" not in info["description"]
if info["measured"]:
    fields = ["name", "driver_version", "memory.total", "clocks.sm", "clocks.max.sm", "power.limit"]
    done = subprocess.run(["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader"], capture_output=True, text=True)
    info["card"] = dict(zip(fields, [value.strip() for value in done.stdout.splitlines()[0].split(",")])) if done.stdout else {}
json.dump(info, sys.stdout, indent=1)
