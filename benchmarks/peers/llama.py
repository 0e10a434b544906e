"""llama.cpp's own layer, built from the llama-cpp-python source distribution (pinned below) without its Python part."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import numpy as np

from benchmarks.peers.base import PeerAbsentError, Step
from moetier.contract import LayerGeometry

VERSION = "0.3.36"
HARNESS = Path(__file__).with_name("llama_layer.c")


def build(cache: Path) -> Path:
    """The harness as a shared library in `cache`, with ggml beside it. Downloads and compiles once."""
    library = cache / f"llama-{VERSION}" / "liblayer.so"
    if library.exists() and library.stat().st_mtime > HARNESS.stat().st_mtime:
        return library
    folder = library.parent
    folder.mkdir(parents=True, exist_ok=True)
    try:
        _fetch(folder)
        _build_ggml(folder)
        _build_harness(folder, library)
    except subprocess.CalledProcessError as error:
        raise PeerAbsentError(f"llama.cpp does not build: {error.stderr[-2000:] if error.stderr else error}") from None
    return library


def _run(*command: str | Path) -> None:
    subprocess.run([str(part) for part in command], check=True, capture_output=True, text=True)


def _fetch(folder: Path) -> None:
    if (folder / "source").exists():
        return
    pip = (sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--no-binary", ":all:", "--no-build-isolation")
    _run(*pip, "-d", folder, f"llama-cpp-python=={VERSION}")
    archive = next(folder.glob("llama_cpp_python-*.tar.gz"))
    with tarfile.open(archive) as tar:
        tar.extractall(folder / "unpacked", filter="data")
    next((folder / "unpacked").iterdir()).joinpath("vendor/llama.cpp").rename(folder / "source")
    shutil.rmtree(folder / "unpacked")
    archive.unlink()


def _build_ggml(folder: Path) -> None:
    off = [f"-DLLAMA_{part}=OFF" for part in ("CURL", "BUILD_TESTS", "BUILD_TOOLS", "BUILD_EXAMPLES", "BUILD_COMMON")]
    _run(
        "cmake", "-S", folder / "source", "-B", folder / "build", "-DCMAKE_BUILD_TYPE=Release", "-DGGML_NATIVE=ON",
        "-DGGML_OPENMP=OFF", *off,
    )  # fmt: skip
    _run("cmake", "--build", folder / "build", "--target", "ggml", "-j", "2")


def _build_harness(folder: Path, library: Path) -> None:
    bin_folder = folder / "build" / "bin"
    _run(
        "cc", "-O2", "-shared", "-fPIC", "-I", folder / "source/ggml/include", HARNESS, "-o", library,
        "-L", bin_folder, "-lggml", "-lggml-base", "-lggml-cpu", f"-Wl,-rpath,{bin_folder}",
    )  # fmt: skip


class Llama:
    """mul_mat_id on MXFP4 or Q4_K weights, repacked where ggml does that for this processor."""

    def __init__(self, geometry: LayerGeometry, threads: int, form: str, cache: Path) -> None:
        self.library = ctypes.CDLL(str(build(cache)))
        self.library.layer_new.restype = ctypes.c_void_p
        sizes = (geometry.hidden, geometry.intermediate, geometry.experts, geometry.top_k)
        self.layer = ctypes.c_void_p(self.library.layer_new(*sizes, form.encode(), threads))
        self.name = f"llama.cpp {form}{' repacked' if self.library.layer_repacked(self.layer) else ''}"

    def run(self, step: Step) -> None:
        out = np.empty_like(step.x)
        pointers = (ctypes.c_void_p(array.ctypes.data) for array in (step.x, step.ids, step.weights, out))
        if self.library.layer_run(self.layer, step.x.shape[0], *pointers):
            raise RuntimeError("llama.cpp's graph failed")
