"""What pyproject.toml cannot say: the C++ extension, and that cdrmix.kernels lives in kernels/."""

from pybind11.setup_helpers import Pybind11Extension, build_ext
from setuptools import setup

setup(
    packages=[
        "cdrmix",
        "cdrmix.config",
        "cdrmix.data",
        "cdrmix.eval",
        "cdrmix.hf",
        "cdrmix.kernels",
        "cdrmix.model",
        "cdrmix.ops",
        "cdrmix.train",
    ],
    # kernels/ has no __init__.py, so that it can never be taken for the PyPI package of that name. The symlink
    # cdrmix/kernels serves editors, type checkers and editable installs; wheels need only this mapping.
    package_dir={"cdrmix.kernels": "kernels"},
    package_data={"cdrmix": ["py.typed", "*.pyi"]},
    ext_modules=[
        Pybind11Extension(
            "cdrmix._dedup",
            ["csrc/bindings.cpp"],
            depends=["csrc/simhash.hpp"],
            include_dirs=["csrc"],
            cxx_std=17,
            extra_compile_args=["-O3", "-pthread", "-Wall", "-Wextra"],
            extra_link_args=["-pthread"],
        )
    ],
    cmdclass={"build_ext": build_ext},
    zip_safe=False,
)
