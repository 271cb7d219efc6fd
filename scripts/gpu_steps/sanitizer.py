"""Runs the tools of compute-sanitizer over random cases of every op; says so where the program is absent or does not work."""
import json, shutil, subprocess, sys

check = sys.argv[1]
tool = shutil.which("compute-sanitizer")
report = {"measured": tool is not None, "tools": []}
for name in ["memcheck", "racecheck", "synccheck", "initcheck"] if tool else []:
    try:
        done = subprocess.run([tool, "--tool", name, "--error-exitcode", "99", check, "parity", "--rounds", "1"], capture_output=True, text=True, timeout=24)
        text = done.stdout + done.stderr
        # Machines without access to the debugger's interface refuse the tools themselves.
        is_refused = "not supported" in text or "Failed to initialize" in text
        report["tools"].append({"tool": name, "ok": done.returncode == 0, "refused": is_refused, "summary": text.strip().splitlines()[-1:]})
    except subprocess.TimeoutExpired:
        report["tools"].append({"tool": name, "ok": None, "refused": False, "summary": ["ran past its limit"]})
json.dump(report, sys.stdout, indent=1)
