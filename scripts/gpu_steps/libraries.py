"""Prints the folders with cuBLASLt and NVRTC, as LD_LIBRARY_PATH takes them: PyTorch brings both where the loader does not look."""
import glob, sys

PACKAGES = [f"{path}/nvidia/*/lib" for path in sys.path if path.endswith("-packages")]
TOOLKITS = ["/usr/local/cuda/lib64", "/usr/local/cuda-1[23]*/lib64"]
folders = []
for library in ("libcublasLt.so", "libnvrtc.so"):
    found = [path.rsplit("/", 1)[0] for place in PACKAGES + TOOLKITS for path in sorted(glob.glob(f"{place}/{library}*"))]
    if found and found[0] not in folders:
        folders.append(found[0])
print(":".join(folders))
