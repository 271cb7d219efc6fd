#!/usr/bin/env python3
"""Judges what scripts/gpu wrote, from a GPU or from the stand-in: `check.py FOLDER`; exit 1 and a list of what is wrong otherwise.

Missing files, missing fields and numbers that are not finite are wrong. Times are judged only where they were measured; how far PyTorch
is ahead or behind is printed, and is wrong only where it is absurd.
"""
import json, math, pathlib, sys

STEPS = pathlib.Path(__file__).resolve().parent
# At less than this share of PyTorch's speed a kernel is taken for broken rather than slow.
LEAST_RATIO = 0.1
# A recording that is slower than op by op by more than noise is no recording.
MOST_RECORDED = 1.1


class Report:
    def __init__(self, folder):
        self.folder, self.problems, self.lines = pathlib.Path(folder), [], []

    def wrong(self, text):
        self.problems.append(text)

    def read(self, name):
        """The document, or None after noting why there is none."""
        try:
            document = json.loads((self.folder / f"{name}.json").read_text())
        except (OSError, ValueError) as error:
            return self.wrong(f"{name}.json: {error}")
        if document.get("problem"):
            return self.wrong(f"{name}: {document['problem']}")
        return document

    def number(self, where, document, key):
        """A finite number above zero."""
        value = document.get(key)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value) or value <= 0:
            self.wrong(f"{where}: {key} is {value!r}")
            return math.nan
        return value

    def holds(self, where, document, key):
        if document.get(key) is not True:
            self.wrong(f"{where}: {key} is {document.get(key)!r}")


def parity(report):
    document = report.read("parity")
    if document is None:
        return
    ops = document.get("ops", [])
    by_dtype = {dtype: {entry.get("op") for entry in ops if entry.get("dtype") == dtype} for dtype in ("f32", "bf16", "f16")}
    if len(set(map(frozenset, by_dtype.values()))) != 1 or len(by_dtype["f32"]) < 25:
        report.wrong(f"parity: {[len(names) for names in by_dtype.values()]} ops in three dtypes, at least 25 in each are expected")
    for entry in ops:
        if entry.get("ok") is not True:
            report.wrong(f"parity: {entry.get('op')} {entry.get('dtype')}: {entry.get('problem')}")


def verify(report):
    document = report.read("verify")
    if document is None:
        return
    cases = document.get("cases", [])
    if not {"f32", "bf16"} <= {case.get("dtype") for case in cases}:
        report.wrong("verify: no case in f32 and bf16")
    for case in cases:
        where = f"verify {case.get('case')} {case.get('dtype')}"
        tensors = [tensor for rank in case.get("report", {}).get("ranks", []) for tensor in rank.get("tensors", [])] or case.get("report", {}).get("tensors", [])
        if not tensors:
            report.wrong(f"{where}: no tensors: {json.dumps(case.get('report'))[:200]}")
        for tensor in tensors:
            error, limit = tensor.get("error"), tensor.get("limit")
            if tensor.get("problem") is not None:
                report.wrong(f"{where}: {tensor.get('name')}: {tensor['problem']}")
            # Whole numbers are equal or a problem.
            if error is None and limit == 0 and str(tensor.get("name")).startswith("token_ids"):
                continue
            is_number = lambda x: isinstance(x, (int, float)) and not isinstance(x, bool) and math.isfinite(x)
            if not is_number(error) or not is_number(limit) or error > limit or limit > 1:
                report.wrong(f"{where}: {tensor.get('name')} is {error!r} off, limit {limit!r}")


def checks(report, name, least):
    document = report.read(name)
    if document is None:
        return
    entries = document.get("checks", [])
    if len(entries) < least:
        report.wrong(f"{name}: {len(entries)} checks, at least {least} are expected")
    for entry in entries:
        if entry.get("ok") is not True:
            report.wrong(f"{name}: {entry.get('name')}: {entry.get('detail')}")


def perf(report):
    own, peer = report.read("perf"), report.read("perf_peer")
    if own is None or peer is None:
        return
    if not peer.get("measured") and not own.get("measured") and peer.get("note"):
        peer = None
    names = [shape["name"] for shape in json.loads((STEPS / "shapes.json").read_text())]
    times = {}
    for which, document in [("perf", own)] + ([("perf_peer", peer)] if peer else []):
        entries = {entry.get("name"): entry for entry in document.get("entries", [])}
        for name in names:
            entry = entries.get(name)
            if entry is None or entry.get("problem"):
                report.wrong(f"{which}: {name}: {entry and entry.get('problem')}")
                continue
            times[which, name] = report.number(f"{which}: {name}", entry, "ms")
            if which == "perf":
                report.number(f"perf: {name}", entry, "of_ceiling")
    if not own.get("measured"):
        return
    if not (peer and peer.get("measured")):
        return report.wrong("perf_peer: times of ours were measured, PyTorch's were not")
    for name in names:
        ratio = times.get(("perf_peer", name), math.nan) / times.get(("perf", name), math.nan)
        report.lines.append(f"{name:<40} {times.get(('perf', name), math.nan):9.3f} ms, {ratio:5.2f} times PyTorch's speed")
        if not ratio >= LEAST_RATIO:
            report.wrong(f"perf: {name} is at {ratio:.2f} of PyTorch's speed")


def step(report, kind):
    own, peer = report.read(f"step_{kind}"), report.read(f"step_peer_{kind}")
    if own is None or peer is None:
        return
    where = f"step_{kind}"
    for key in ("eager_ms", "recorded_ms", "peak_bytes"):
        report.number(where, own, key)
    for key in ("was_recorded", "same_bits", "repeatable"):
        report.holds(where, own, key)
    if own.get("measured") and not own["recorded_ms"] <= MOST_RECORDED * own["eager_ms"]:
        report.wrong(f"{where}: recorded {own['recorded_ms']} ms, op by op {own['eager_ms']} ms")
    if not peer.get("measured"):
        if not peer.get("note") and own.get("measured"):
            report.wrong(f"step_peer_{kind}: not measured, and no note says why")
        return
    eager = report.number(f"step_peer_{kind}", peer, "eager_ms")
    compiled = peer.get("compiled_ms")
    text = f"{kind}: op by op {own['eager_ms']:.2f} ms, recorded {own['recorded_ms']:.2f} ms; PyTorch {eager:.2f} ms"
    report.lines.append(text + (f", compiled {compiled:.2f} ms" if compiled else ", not compiled"))


def sanitizer(report, is_gpu):
    if not is_gpu:
        return
    document = report.read("sanitizer")
    for tool in (document or {}).get("tools", []):
        if tool.get("ok") is False and not tool.get("refused"):
            report.wrong(f"sanitizer: {tool.get('tool')}: {tool.get('summary')}")


def main():
    report = Report(sys.argv[1])
    gpu = report.read("gpu") or {}
    if not gpu.get("description"):
        report.wrong("gpu: no description of the device")
    parity(report)
    verify(report)
    checks(report, "host", 6)
    checks(report, "faults", 6)
    perf(report)
    for kind in ("sd15", "sd3m"):
        step(report, kind)
    sanitizer(report, gpu.get("measured") is True)
    for line in report.lines:
        print(line)
    for problem in report.problems:
        print(f"wrong: {problem}", file=sys.stderr)
    print(f"{gpu.get('description', 'unknown device')}: {len(report.problems)} problems")
    sys.exit(bool(report.problems))


if __name__ == "__main__":
    main()
