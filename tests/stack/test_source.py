"""A profile that is built from source may carry what compiled parts are built from."""

import ctypes
import zipfile
from pathlib import Path

import pytest

from moetier_stack.build import build_patched_wheel
from moetier_stack.errors import StackError
from moetier_stack.verify import verify
from tests.stack.project import FILES, Demo, Release, patch_bytes, replacing, serving

NATIVE = {
    **FILES,
    "demo/native.cpp": 'extern "C" int one() { return 1; }\n',
    "CMakeLists.txt": (
        "cmake_minimum_required(VERSION 3.18)\nproject(demo LANGUAGES CXX)\n"
        "add_library(native MODULE demo/native.cpp)\n"
        'set_target_properties(native PROPERTIES PREFIX "" SUFFIX ".so")\ninstall(TARGETS native DESTINATION demo)\n'
    ),
    "pyproject.toml": (
        '[build-system]\nrequires = ["scikit-build-core"]\nbuild-backend = "scikit_build_core.build"\n\n'
        '[project]\nname = "demo"\nversion = "1.0"\n'
    ),
}
TWO = replacing("demo/native.cpp", "return 1", "return 2")
BROKEN = replacing("demo/native.cpp", "return 1", "return one")
IN_WHEEL = {name: text for name, text in FILES.items() if not name.endswith(".cpp")}


@pytest.fixture
def made(tmp_path):
    """A stack whose one carry changes C++, in a profile that is built from source."""
    release = Release()
    release.add("1.0", NATIVE, IN_WHEEL)

    def carrying(edit) -> Demo:
        demo = Demo(tmp_path, release, index)
        demo.write(("two", patch_bytes(tmp_path / "repo", NATIVE, edit(NATIVE))), more='build = "source"')
        demo.lock()
        return demo

    with serving(release) as index:
        yield carrying


def loaded(wheel: Path, folder: Path) -> ctypes.CDLL:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return ctypes.CDLL(str(folder / "demo" / "native.so"))


def test_a_carry_in_compiled_code_is_built_from_source_and_runs(made, tmp_path):
    space = made(TWO).space
    assert [str(one) for one in verify(space) if "built from source" not in str(one)] == []
    one, two = (build_patched_wheel(space, "patched", tmp_path / name) for name in "ab")
    assert one.name.startswith("demo-1.0+moetier.patched-")
    assert one.read_bytes() == two.read_bytes()
    assert loaded(one, tmp_path / "site").one() == 2


def test_code_that_does_not_compile_is_one_error_with_the_compilers_words(made, tmp_path):
    space = made(BROKEN).space
    with pytest.raises(StackError, match=r"(?s)pip cannot build it from source.*native\.cpp"):
        build_patched_wheel(space, "patched", tmp_path / "dist")
    assert not (tmp_path / "dist").exists() or not any((tmp_path / "dist").iterdir())


def test_a_source_that_is_not_the_locked_one_is_not_built(made, tmp_path):
    demo = made(TWO)
    patch = demo.folder / "stack" / "carries" / "demo" / "two.patch"
    patch.write_bytes(patch.read_bytes().replace(b"return 2", b"return 3"))
    with pytest.raises(StackError, match="not the locked one"):
        build_patched_wheel(demo.space, "patched", tmp_path / "dist")


def test_the_same_carry_in_a_profile_of_the_wheel_is_refused(made):
    demo = made(TWO)
    demo.edit_toml('build = "source"', "")
    with pytest.raises(StackError, match=r"native\.cpp is not in demo-1\.0-py3"):
        demo.lock()
