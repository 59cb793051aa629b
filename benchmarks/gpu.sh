#!/usr/bin/env bash
# Tests, memory checks and benchmarks on a bare GPU machine, the most valuable first, within a time limit.
#
#   gpu.sh [--dry] MINUTES [OUT_FOLDER [STEP ...]]
#
# The machine needs PyTorch, Triton, PyYAML, Rich, pytest and hypothesis; it needs no network and no installation of
# cdrmix. The steps on the trainer also need what `make gpu-wheels` collects.
# STEP: names of steps in the plan, default all. A step begins only if half of its limit is left of MINUTES; the others
# are listed at the end, for the next call. --dry prints the plan and stops: every step with its limit, the minutes until
# it ends, and the number of the call of MINUTES in which it runs; exit code 1 if the steps before `later` take more than
# 45 minutes, or do not fit calls of MINUTES. Variables:
#   WHEELS          folder of wheels to use in addition to installed packages (default .whl in the repository's root),
#                   and of cdrmix's compiled extensions, which are copied to cdrmix/
#   SITE            folder in which they are unpacked (default a new one, removed at the end)
#   PYTHON          interpreter (default python3)
#   CDRMIX_COMMIT   what rows name as their commit where git cannot tell (default: the file WHEELS/commit)
# OUT_FOLDER (default experiments/gpu) gets log.txt, steps.jsonl (outcome and seconds of every step, as it ends) and the
# suites' rows, each written when its case ends. Exit code: 0 nothing failed, 1 a step failed or missed a target, 2
# usage, or no GPU. Steps for which no time was left are listed and are no failure.
# shellcheck disable=SC2016 # in the plan, $PYTHON is for the shell that runs the step
set -uo pipefail

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
PYTHON=${PYTHON:-python3}
WHEELS=${WHEELS:-$ROOT/.whl}

usage() {
    sed -n 's/^# \{0,1\}//; 2,4p' "${BASH_SOURCE[0]}" >&2
    exit 2
}

dry=false
if [ "${1:-}" = --dry ]; then
    dry=true
    shift
fi
[[ ${1:-} =~ ^[0-9]+$ ]] || usage
end=$((SECONDS + $1 * 60))
out=${2:-$ROOT/experiments/gpu}
wanted=("${@:3}")

# The plan: name, most seconds, command. A name suite/case without a command is a case of run.py, whose peers get
# half of its time for compiling and tuning; it is repeated without them if it leaves no row. Steps before `later` come first.
names=() limits=() commands=()
plan() {
    names+=("$1") limits+=("$2") commands+=("${3:-}")
}
# Collected by path: tests that need an absent package are skipped by name. Compiling takes most of their time: on an H200
# 226 took 62 s in 12 processes, and more than 230 s in 9 with no kernel in Triton's cache.
tests='CUBLAS_WORKSPACE_CONFIG=:4096:8 "$PYTHON" -m pytest -m gpu -v -p no:cacheprovider -W default'
tests+=' --continue-on-collection-errors'
tests+=' $("$PYTHON" -c "import xdist" 2>/dev/null && echo --numprocesses=$(($(nproc) < 12 ? $(nproc) : 12)))'
check='PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck --error-exitcode 9 "$PYTHON" benchmarks/smallest.py --suite'
race='compute-sanitizer --tool racecheck --error-exitcode 9 "$PYTHON" benchmarks/smallest.py --suite'
# A step of training end to end with these flags; after exit code 8, out of memory as on a card of 80 GB, half the model.
end_to_end() {
    local run="\"\$PYTHON\" benchmarks/train_gpu.py $1 --results \"\$OUT\""
    echo "$run --case core-1b; status=\$?; if [ \$status = 8 ]; then $run --case core-1b-12; else exit \$status; fi"
}
# One process for each family compiles the kernels of the rows, on all cores, while the machine's facts are collected.
plan smoke 60 '"$PYTHON" benchmarks/smoke.py & smoke=$!; nvidia-smi; "$PYTHON" -VV; "$PYTHON" benchmarks/gpu_facts.py; facts=$?; wait $smoke && exit $facts'
plan wkv7/h32_k64_training 200
plan moe/swiglu_training 270
plan moe/relu2_training 150
plan train/core_1b 270 "$(end_to_end '')"
plan train/core_tiny 100 '"$PYTHON" benchmarks/train_gpu.py --case core-tiny --results "$OUT"'
plan train/dense_1b 180 '"$PYTHON" benchmarks/train_gpu.py --case dense-1b --results "$OUT"; status=$?; if [ $status = 8 ]; then "$PYTHON" benchmarks/train_gpu.py --case dense-1b --micro-batch-rows 4 --results "$OUT"; else exit $status; fi'
plan tests 350 "$tests tests/kernels"
plan trainer_tests 210 "$tests tests/training tests/model"
plan ce/v50k_training 160
plan scan/h32_k64_training 160
plan memcheck 150 "$check wkv7 --shapes 1 --dtype bfloat16"
plan moe_memcheck 150 "$check moe --shapes 2 --dtype bfloat16"
later=${#names[@]}
plan train/reference_1b 300 'CDRMIX_BACKEND=reference "$PYTHON" benchmarks/train_gpu.py --case core-1b-12 --micro-batch-rows 1 --updates 1 --results "$OUT"'
plan train/compiled_1b 300 "$(end_to_end train.compile=true)"
plan train/loose_1b 240 "$(end_to_end --no-determinism)"
plan smallest 150 '"$PYTHON" benchmarks/smallest.py --suite wkv7'
plan moe_smallest 200 '"$PYTHON" benchmarks/smallest.py --suite moe'
plan ce_smallest 100 '"$PYTHON" benchmarks/smallest.py --suite ce'
plan plastic_smallest 100 '"$PYTHON" benchmarks/smallest.py --suite plastic'
plan plastic/narrow_training 150
plan plastic/wide_training 150
plan reason_tests 200 "$tests tests/reason"
plan rl/adapters 120
plan rl/graphs 150
plan scan_smallest 100 '"$PYTHON" benchmarks/smallest.py --suite scan'
plan scan/h32_k16_training 150
plan scan/mamba_training 150
plan ce/v128k_training 240
plan moe/swiglu_forward 240
plan moe/d4096_training 400
plan wkv7/packed_training 240
plan moe/e16_training 300
plan moe/skewed_training 300
plan moe/empty_training 300
plan wkv7/h32_k64_forward 180
plan ce_memcheck 200 "$check ce"
plan ce_racecheck 200 "$race ce --shapes 2"
plan plastic_memcheck 200 "$check plastic"
plan plastic_racecheck 200 "$race plastic --shapes 2"
plan plastic/branches_training 150
plan plastic/long_training 200
plan plastic/narrow_layer_training 150
plan plastic/narrow_hebb_training 150
plan moe_racecheck 300 "$race moe --shapes 1"
plan racecheck 240 "$race wkv7 --shapes 1"
plan scan_memcheck 200 "$check scan"
plan scan/packed_training 150
plan scan/retention_training 150
plan scan/long_training 150
plan wkv7/h16_k128_training 240
plan wkv7/long_training 240
plan wkv7/short_training 180
plan moe/d4096_forward 300
plan moe/relu2_forward 240
plan moe/e16_forward 240
plan moe/skewed_forward 240
plan moe/empty_forward 240
plan scan/h32_k64_forward 120
plan scan/h32_k16_forward 100
plan scan/mamba_forward 100
plan scan/packed_forward 100
plan scan/retention_forward 100
plan scan/long_forward 100
plan wkv7/packed_forward 150
plan wkv7/h16_k128_forward 150
plan wkv7/long_forward 150
plan wkv7/short_forward 120
plan ce/odd_training 150
plan ce/v50k_forward 120
plan ce/v128k_forward 150
plan ce/odd_forward 120
plan plastic/narrow_forward 120
plan plastic/wide_forward 120
plan plastic/narrow_layer_forward 120
plan plastic/long_forward 120
plan plastic/branches_forward 120
plan plastic/narrow_hebb_forward 120

# The names of all peers in run.py, to leave them out.
alone=(--without fla --without rwkv --without PyTorch --without ScatterMoE --without SonicMoE --without Liger
    --without transformers --without DeepSpeed)

chosen() {
    local name
    [ ${#wanted[@]} -eq 0 ] && return 0
    for name in "${wanted[@]}"; do
        [ "$name" = "$1" ] && return 0
    done
    return 1
}

for name in "${wanted[@]}"; do
    if [[ " ${names[*]} " != *" $name "* ]]; then
        echo "gpu.sh: no step $name; there are: ${names[*]}" >&2
        exit 2
    fi
done
cd "$ROOT" || exit 2
if $dry; then
    budget=$((45 * 60)) call=1 used=0 sum=0 must=0 wrong=()
    capacity=$(($1 * 60 - 5))
    for i in "${!names[@]}"; do
        chosen "${names[i]}" || continue
        if [ "$i" -eq $later ] && [ $sum -gt 0 ]; then echo 'if time is left:'; fi
        if [ "${limits[i]}" -gt $capacity ]; then wrong+=("${names[i]} takes more than a call of $1 minutes"); fi
        if [ $used -gt 0 ] && [ $((used + limits[i])) -gt $capacity ]; then call=$((call + 1)) used=0; fi
        used=$((used + limits[i])) sum=$((sum + limits[i]))
        if [ "$i" -lt $later ]; then must=$(((call - 1) * $1 * 60 + used)); fi
        printf '%-26s at most %3d s  until %3d min  call %2d  %s\n' "${names[i]}" "${limits[i]}" $(((sum + 59) / 60)) $call \
            "${commands[i]:-run.py --suite ${names[i]%/*} --case ${names[i]#*/} --device cuda}"
    done
    if [ $must -gt $budget ]; then wrong+=("what comes first takes $must s in calls of $1 minutes, more than $budget"); fi
    if [ ${#wrong[@]} -gt 0 ]; then
        printf 'gpu.sh: %s\n' "${wrong[@]}" >&2
        exit 1
    fi
    exit 0
fi

mkdir -p "$out" || exit 2
out=$(cd "$out" && pwd) || exit 2
log=$out/log.txt
temporary=$(mktemp -d) || exit 2
trap 'rm -rf "$temporary"' EXIT
SITE=${SITE:-$temporary/site}
mkdir -p "$SITE" || exit 2
shopt -s nullglob
wheels=("$WHEELS"/*.whl) extensions=("$WHEELS"/*.so)
shopt -u nullglob
if [ ${#extensions[@]} -gt 0 ]; then cp "${extensions[@]}" "$ROOT/cdrmix/" || exit 2; fi
failures=0
if [ ${#wheels[@]} -gt 0 ]; then
    "$PYTHON" -m pip install --quiet --disable-pip-version-check --no-index --no-deps --no-compile --no-cache-dir \
        --upgrade --target "$SITE" "${wheels[@]}" >>"$log" 2>&1 || {
        echo "gpu.sh: the wheels in $WHEELS could not be installed, going on without them: see $log" >&2
        failures=1
    }
fi
# A folder with a link, and not the root, where the folder kernels/ would be taken for the PyPI package of that name.
ln -sfn "$ROOT/cdrmix" "$SITE/cdrmix"
# The second folder is that of the CUTLASS DSL's .pth file, which works only in site-packages.
export OUT=$out PYTHON PYTHONPATH="$SITE:$SITE/nvidia_cutlass_dsl/python_packages" PYTHONUNBUFFERED=1 TRITON_INTERPRET=0 TRITON_CACHE_AUTOTUNING=1
unset CDRMIX_BACKEND
if [ -z "${CDRMIX_COMMIT:-}" ] && [ -f "$WHEELS/commit" ]; then
    CDRMIX_COMMIT=$(cat "$WHEELS/commit")
fi
export CDRMIX_COMMIT=${CDRMIX_COMMIT:-}

if ! "$PYTHON" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' 2>>"$log"; then
    echo "gpu.sh: no GPU found: $PYTHON has no PyTorch, or its PyTorch sees no CUDA device; --dry prints the plan" >&2
    exit 2
fi

rows() { cat "$out/${1%/*}.jsonl" 2>/dev/null | wc -l; }

# step NAME SECONDS COMMAND: runs it within a time limit and sets `outcome`.
step() {
    local begun=$SECONDS before status signal=TERM
    # At SIGINT pytest tells what failed so far. Not for a step with &, whose processes ignore it.
    [[ $1 = *tests ]] && signal=INT
    before=$(rows "$1")
    printf '\n== %s: %s\n' "$1" "$3" >>"$log"
    timeout --signal=$signal --kill-after=10 "$2" bash -c "$3" >>"$log" 2>&1
    status=$?
    case $status in
        0) outcome=passed ;;
        124 | 137) outcome="stopped after $2 s" ;;
        *) outcome="failed with $status" ;;
    esac
    if [ "$status" = 1 ] && [[ $1 = */* ]] && [ "$(rows "$1")" -gt "$before" ]; then
        outcome="target missed"
    fi
    printf '{"step": "%s", "outcome": "%s", "status": %d, "seconds": %d}\n' \
        "$1" "$outcome" "$status" $((SECONDS - begun)) >>"$out/steps.jsonl"
    printf '%-26s %-22s %4d s\n' "$1" "$outcome" $((SECONDS - begun))
    [ "$outcome" = passed ]
}

left_over=()
for i in "${!names[@]}"; do
    name=${names[i]} limit=${limits[i]} command=${commands[i]}
    chosen "$name" || continue
    left=$((end - SECONDS - 5))
    if [ $left -lt 20 ] || [ $left -lt $((limit / 2)) ]; then
        printf '%-26s no time left\n' "$name"
        printf '{"step": "%s", "outcome": "no time left"}\n' "$name" >>"$out/steps.jsonl"
        left_over+=("$name")
        continue
    fi
    if [ "$limit" -gt $left ]; then limit=$left; fi
    if [ -n "$command" ]; then
        if [[ $name = *check ]] && ! command -v compute-sanitizer >/dev/null; then
            printf '%-26s compute-sanitizer is not installed\n' "$name"
            printf '{"step": "%s", "outcome": "compute-sanitizer is not installed"}\n' "$name" >>"$out/steps.jsonl"
            continue
        fi
        step "$name" "$limit" "$command" || failures=1
        continue
    fi
    case_command="\"\$PYTHON\" benchmarks/run.py --suite ${name%/*} --case ${name#*/} --device cuda --blocks 50"
    case_command+=" --results '$out'"
    before=$(rows "$name")
    if ! step "$name" "$limit" "$case_command --seconds $((limit / 2))"; then
        failures=1
        left=$((end - SECONDS - 5))
        if [ "$(rows "$name")" -eq "$before" ] && [ $left -ge 20 ]; then
            step "$name" $((left < 60 ? left : 60)) "$case_command ${alone[*]}" || true
        fi
    fi
done

echo "Log, steps and rows: $out"
if [ ${#left_over[@]} -gt 0 ]; then echo "Left over, the first of them for the next call: gpu.sh $1 $out ${left_over[*]:0:8}"; fi
if [ $failures -ne 0 ]; then tail -n 40 "$log"; fi
exit $failures
