"""The parts of the build that pyproject.toml cannot express: the C++ extensions, and cdrmix.kernels from kernels/."""

from glob import glob

from pybind11.setup_helpers import Pybind11Extension, build_ext
from setuptools import find_packages, setup

HEADERS = sorted(glob("csrc/*.hpp"))


def extension(name: str, source: str) -> Pybind11Extension:
    """The module cdrmix.<name>, compiled from csrc/<source> and the headers."""
    return Pybind11Extension(
        f"cdrmix.{name}",
        [f"csrc/{source}"],
        depends=HEADERS,
        include_dirs=["csrc"],
        cxx_std=17,
        extra_compile_args=["-O3", "-pthread", "-Wall", "-Wextra"],
        extra_link_args=["-pthread"],
    )


setup(
    packages=[
        *find_packages(include=["cdrmix", "cdrmix.*"]),
        "cdrmix.kernels",
        *(f"cdrmix.kernels.{name}" for name in find_packages("kernels")),
    ],
    # kernels/ has no __init__.py, so that it is never taken for the PyPI package of that name. The symlink
    # cdrmix/kernels serves editors, type checkers and editable installs; wheels need only this mapping.
    package_dir={"cdrmix.kernels": "kernels"},
    package_data={"cdrmix": ["py.typed", "*.pyi"]},
    ext_modules=[extension("_dedup", "bindings.cpp"), extension("_text", "text_bindings.cpp")],
    cmdclass={"build_ext": build_ext},
    zip_safe=False,
)
