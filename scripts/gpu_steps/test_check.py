#!/usr/bin/env python3
"""Shows that check.py can fail: `test_check.py FOLDER` spoils a copy of sound results in one way at a time, and each must be found."""
import json, pathlib, shutil, subprocess, sys, tempfile

CHECK = pathlib.Path(__file__).resolve().parent / "check.py"


def at(document, path):
    for key in path[:-1]:
        document = document[key]
    return document, path[-1]


def put(*path):
    """Sets a field to the last argument."""
    def spoil(document):
        holder, key = at(document, path[:-1])
        holder[key] = path[-1]
    return spoil


def drop(*path):
    def spoil(document):
        holder, key = at(document, path)
        del holder[key]
    return spoil


def float_tensor(document):
    """The first tensor of floats of the first case."""
    return next(tensor for tensor in document["cases"][0]["report"]["tensors"] if tensor["error"] is not None)


NAN = float("nan")
SPOILT = [
    ("parity", put("ops", 3, "ok", False)), ("parity", put("ops", 3, "ok", None)), ("parity", drop("ops", 0)), ("parity", put("ops", [])),
    ("verify", lambda document: float_tensor(document).update(error=NAN)),
    ("verify", lambda document: float_tensor(document).update(error=None)),
    ("verify", lambda document: float_tensor(document).update(error=float_tensor(document)["limit"] * 1.01 + 1e-12)),
    ("verify", lambda document: float_tensor(document).update(limit=1e9)),
    ("verify", lambda document: float_tensor(document).update(problem="another shape")),
    ("verify", put("cases", [])), ("verify", put("cases", 0, "report", {})),
    ("host", put("checks", 1, "ok", False)), ("host", drop("checks", 0)), ("faults", put("checks", 0, "ok", "yes")), ("faults", put("checks", [])),
    ("perf", put("entries", 2, "ms", NAN)), ("perf", put("entries", 2, "ms", 0)), ("perf", drop("entries", 5)), ("perf", put("entries", 0, "problem", "x")),
    # Times of ours without PyTorch's beside them.
    ("perf", put("measured", True)),
    ("step_sd15", put("same_bits", False)), ("step_sd15", drop("repeatable")), ("step_sd3m", put("was_recorded", False)),
    ("step_sd3m", put("eager_ms", float("inf"))), ("step_sd3m", put("peak_bytes", True)),
    ("gpu", drop("description")), ("host", put("problem", "it ended with code 139")),
]


def verdict(folder):
    return subprocess.run([sys.executable, CHECK, folder], capture_output=True, text=True)


def main():
    sound = pathlib.Path(sys.argv[1])
    if verdict(sound).returncode:
        sys.exit(f"{sound} is not sound to begin with:\n{verdict(sound).stderr}")
    missed = []
    with tempfile.TemporaryDirectory() as place:
        spoilt = pathlib.Path(place) / "spoilt"
        for idx, (name, spoil) in enumerate(SPOILT):
            shutil.copytree(sound, spoilt)
            path = spoilt / f"{name}.json"
            document = json.loads(path.read_text())
            spoil(document)
            path.write_text(json.dumps(document))
            if verdict(spoilt).returncode == 0:
                missed.append(f"{idx}: {name}")
            shutil.rmtree(spoilt)
        for name in ("gpu", "parity", "verify", "host", "faults", "perf", "perf_peer", "step_sd15", "step_peer_sd3m"):
            shutil.copytree(sound, spoilt)
            (spoilt / f"{name}.json").unlink()
            if verdict(spoilt).returncode == 0:
                missed.append(f"{name} is absent")
            shutil.rmtree(spoilt)
    print(f"{len(SPOILT) + 9} ways to spoil results, {len(missed)} missed: {missed}")
    sys.exit(bool(missed))


if __name__ == "__main__":
    main()
