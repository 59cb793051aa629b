#!/usr/bin/env bash
# Collects what a bare GPU machine needs for benchmarks/gpu.sh: wheels for its Python, and the commit that rows name.
#
#   gpu_wheels.sh [FOLDER]
#
# FOLDER (default .whl in the repository's root, which git ignores) is created anew and has at most 64 MiB. Versions are those of
# constraints.txt. The machine has PyTorch, Triton, NumPy and Numba. Variables:
#   PYTHON          interpreter whose pip downloads and builds (default .venv/bin/python)
#   GPU_PYTHON      version of the machine's Python (default 3.12)
#   CDRMIX_PYTHON   an interpreter of that version with its headers: with it, cdrmix's C++ extension is built too
# Exit code: 1 if a wheel is not available, or all of them take more than 64 MiB.
set -euo pipefail

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
folder=${1:-$ROOT/.whl}
PYTHON=${PYTHON:-$ROOT/.venv/bin/python}
GPU_PYTHON=${GPU_PYTHON:-3.12}
LIMIT=$((64 * 1024 * 1024))

# What the trainer and its tests import, and what those import.
TRAINER=(pydantic pydantic_core annotated-types typing-inspection typing_extensions zstandard tokenizers safetensors
    publicsuffixlist resiliparse idna Jinja2 MarkupSafe
    PyYAML rich markdown-it-py mdurl Pygments hjson msgpack einops py-cpuinfo psutil ninja tqdm packaging)
# What runs the tests, in many processes: compiling takes most of their time. The pytest configuration names
# pytest-timeout; tests/conftest.py imports Hypothesis.
TESTS=(pytest iniconfig pluggy pytest-timeout pytest-xdist execnet hypothesis sortedcontainers)
# Peers of the kernels, by exact version where constraints.txt has none; ScatterMoE is in axolotl.
PEERS=(fla-core rwkv-ops keras namex optree absl-py h5py ml_dtypes liger-kernel==0.8.5 axolotl==0.21.0)

pip() { "$PYTHON" -m pip --disable-pip-version-check "$@"; }

temporary=$(mktemp -d)
trap 'rm -rf "$temporary"' EXIT
# pip matches the platforms' numbers exactly.
platforms=()
for number in 2_39 2_35 2_34 2_31 2_28 2_27 2_26 2_24 2_17 2_12 2_5; do platforms+=(--platform "manylinux_${number}_x86_64"); done
platforms+=(--platform manylinux2014_x86_64 --platform manylinux2010_x86_64 --platform manylinux1_x86_64)
echo "Downloading wheels for Python $GPU_PYTHON ..."
pip download --quiet --no-deps --only-binary=:all: --python-version "$GPU_PYTHON" --implementation cp "${platforms[@]}" \
    --constraint "$ROOT/constraints.txt" --dest "$temporary" "${TRAINER[@]}" "${TESTS[@]}" "${PEERS[@]}"

# DeepSpeed comes as source. Its wheel holds no compiled operator: training uses none.
echo 'Building DeepSpeed ...'
DS_BUILD_OPS=0 DS_ACCELERATOR=cpu pip wheel --quiet --no-deps --no-build-isolation --constraint "$ROOT/constraints.txt" \
    --wheel-dir "$temporary" deepspeed

if [ -n "${CDRMIX_PYTHON:-}" ]; then
    echo "Building the C++ extension for $("$CDRMIX_PYTHON" -VV | head -n 1) ..."
    "$CDRMIX_PYTHON" -m venv "$temporary/venv"
    "$temporary/venv/bin/python" -m pip --disable-pip-version-check install --quiet --constraint "$ROOT/constraints.txt" \
        setuptools pybind11
    # Compiled in the temporary folder, so that the working tree's own extension stays.
    (cd "$ROOT" && "$temporary/venv/bin/python" setup.py --quiet build_ext --build-temp "$temporary/build" \
        --build-lib "$temporary/lib")
    cp "$temporary"/lib/cdrmix/*.so "$temporary"
fi

(git -C "$ROOT" describe --always --dirty=+changes --abbrev=12 2>/dev/null || echo unknown) >"$temporary/commit"
rm -rf "$folder"
mkdir -p "$folder"
shopt -s nullglob
mv "$temporary"/*.whl "$temporary"/*.so "$temporary/commit" "$folder"
cd "$folder"
du --bytes ./*.whl ./*.so | sort -rn | awk '{printf "%8.2f MiB  %s\n", $1 / 1048576, substr($2, 3)}'
total=$(cat ./*.whl ./*.so | wc -c)
awk -v total="$total" -v folder="$folder" 'BEGIN {printf "%8.2f MiB in %s, of 64\n", total / 1048576, folder}'
if [ "$total" -gt $LIMIT ]; then
    echo "gpu_wheels.sh: more than 64 MiB: leave out peers (PEERS in this script)" >&2
    exit 1
fi
