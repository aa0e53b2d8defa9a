#!/usr/bin/env bash
# Makes the environment and runs the whole test suite:
#   bash scripts/test.sh            plain on this machine's devices, then the kernels under Triton's interpreter
#   bash scripts/test.sh --all      also the long grids, then the suite under other transformers versions, and under the oldest
#                                   Python, torch and transformers of setup.cfg (own environments; PYTHON_OLDEST names the Python),
#                                   and the GPU queue under the versions of its machine
#   bash scripts/test.sh --hosts    tests/hosts alone: each trainer that hfpatch works in, in an environment of its own, by pip
#                                   (HFPATCH_HOSTS="lightning ms_swift" names some; HFPATCH_BARE=0 uses the torch that is here)
#   bash scripts/test.sh --dry      tests/dry alone: a CUDA build of torch on a driver that computes nothing (tests/dry/README.md),
#                                   in environments of its own (4 GB each), and an 8B model at 131,072 tokens to watch;
#                                   --dry short: two minutes of it, and a line instead where no CUDA build can be had
#   bash scripts/test.sh --docs     also every command of README and docs/, at tiny size (five minutes; alone: --docs tests/docs)
#   bash scripts/test.sh ARGS...    anything else goes to pytest in the plain run, such as tests/ops -k rope
#   HFPATCH_TEST_WORKERS=1          how many processes share the tests without a GPU (as many as there are cores, up to four)
case ${1:-} in -h | --help) sed -n '2,/^case /{/^case /d;s/^# \{0,1\}//p}' "${BASH_SOURCE[0]}"; exit 0 ;; esac
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/env.sh
# Trainers that hfpatch works in, and Ray, as pip knows them: tests/hosts/test_NAME.py. Their pins choose transformers.
declare -A HOSTS=(
    [trl]=trl [sentence_transformers]="sentence-transformers[train]" [lightning]=lightning [ms_swift]=ms-swift
    [llamafactory]=llamafactory [axolotl]="axolotl[deepspeed]" [verl]=verl [ray]="ray accelerate"
)
if [ "${1:-}" = "--hosts" ]; then
    export HFPATCH_BARE=${HFPATCH_BARE:-1} OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false DS_ACCELERATOR=cpu
    status=0
    for name in ${HFPATCH_HOSTS:-"${!HOSTS[@]}"}; do
        (
            HFPATCH_VENV=$HFPATCH_ROOT/.venv-host-$name
            make_env report &&
                python -m pip install -q -c "$HFPATCH_KEEP" -e "$HFPATCH_ROOT" ${HOSTS[$name]} pytest pytest-timeout || exit 2
            # An index may hold these for CUDA alone, which load beside no torch for CPUs; transformers does without.
            python -c 'import torchvision' 2>/dev/null || python -m pip uninstall -q -y torchvision torchaudio 2>/dev/null
            echo "hfpatch: $name: $(python -m pip list 2>/dev/null | grep -iE "^(${name//_/[-_]}|transformers|trl|peft|torch) " | xargs)"
            python -m pytest -q -W ignore --all "tests/hosts/test_$name.py"
        ) || { status=1 && echo "hfpatch: $name failed, or cannot be installed here" >&2; }
    done
    exit $status
fi
if [ "${1:-}" = "--dry" ]; then
    shift
    short=0
    [ "${1:-}" = short ] && short=1 && shift
    export HFPATCH_BARE=1 HFPATCH_DRY=1 TOKENIZERS_PARALLELISM=false OMP_NUM_THREADS=1
    dry_env() { # dry_env FOLDER TORCH MORE...: an environment with this torch and what the tests train with
        HFPATCH_VENV=$HFPATCH_ROOT/$1 HFPATCH_TORCH=$2
        shift 2
        make_env train &&
            python -m pip install -q -c "$HFPATCH_KEEP" trl liger-kernel numpy pytest pytest-timeout "$@" &&
            python -c 'import sys, torch; sys.exit(not (torch.version.cuda or "").startswith("13."))'
    }
    if [ $short = 1 ]; then
        dry_env .venv-dry 'torch==2.14.1' >"$HFPATCH_ROOT/.venv-dry.log" 2>&1 || {
            echo "hfpatch: the dry device is not tested here: no CUDA 13 build of torch 2.14.1 can be installed (.venv-dry.log)"
            exit 0
        }
        # Three minutes alone; beside the suite, on two cores, up to twice as long.
        exec timeout 540 python -m pytest -q --durations=3 "${@:-tests/dry}"
    fi
    status=0
    (
        dry_env .venv-dry 'torch==2.14.1' || exit 2
        HFPATCH_HOST_MEMORY=$((200 << 30)) PYTORCH_ALLOC_CONF=expandable_segments:True tests/dry/dry.sh \
            python tests/dry/worker.py '{"model": "llama-3.1-8b", "rows": [[1, 131072], [1, 131072]]}'
        python -m pytest -q --all "${@:-tests/dry}"
    ) || status=1
    # The versions of the GPU queue's machine: scripts/gpu/README.md.
    (
        dry_env .venv-dry-queue 'torch==2.11.*' 'triton==3.6.*' 'transformers==5.17.*' || exit 2
        python -m pytest -q "${@:-tests/dry}"
    ) || status=1
    exit $status
fi
make_env test || exit 2
ALL=()
if [ "${1:-}" = "--all" ]; then
    ALL=(--all)
    shift
fi
export TOKENIZERS_PARALLELISM=false DS_ACCELERATOR=${DS_ACCELERATOR:-$(python -c 'import torch; print("cuda" if torch.cuda.is_available() else "cpu")')}
# Tiny tensors: one thread is as fast alone, and far faster beside other processes (the launches of two).
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
had() { # had MODULE PACKAGE: whether it can be imported; what helps but no test needs must not stop them where no index has it
    python -c "import $1" 2>/dev/null || python -m pip install -q -c "$HFPATCH_KEEP" "$2" || {
        echo "hfpatch: $2 is not here, and pip cannot install it: $3"
        return 1
    }
}
had mypy mypy "what a type checker says of the package is not tested"
# Processes that shared a GPU would measure each other's memory.
shared_out() { # sets WORKERS: how pytest shares the tests out in the environment that `python` is now
    local count=1
    [ "$DS_ACCELERATOR" != cpu ] ||
        count=${HFPATCH_TEST_WORKERS:-$(python -c 'import os; print(min(4, len(os.sched_getaffinity(0))))')}
    WORKERS=()
    [ "$count" -gt 1 ] || return 0
    # A plugin named benchmark warns where tests are shared, and a warning is an error here.
    had xdist pytest-xdist "one process runs all tests, which takes longer" && WORKERS=(-n "$count" --dist worksteal -p no:benchmark)
    return 0
}
shared_out
status=0

run() { # run "what" command...: prints the time it took, remembers a failure, goes on
    local began=$SECONDS what=$1
    shift
    echo "hfpatch: $what: $*"
    "$@" || status=1
    echo "hfpatch: $what took $((SECONDS - began)) s"
}

# The interpreter replaces the compiler for the whole process, so its tests run in one of their own.
if [ $# -eq 0 ] && python -c 'import triton' 2>/dev/null; then
    run "kernels under the interpreter" env TRITON_INTERPRET=1 python -m pytest -q "${WORKERS[@]}" tests/ops tests/kernels "${ALL[@]}"
fi
if [ ${#ALL[@]} -gt 0 ]; then
    suite_with() { # suite_with "transformers==..." [ARGS of pytest] in the environment of HFPATCH_VENV
        local version=$1
        shift
        # With all that hfpatch needs in one breath: an older transformers wants older companions.
        make_env test && python -m pip install -q -c "$HFPATCH_KEEP" -e "$HFPATCH_ROOT[test]" "$version" && shared_out &&
            run "$version, $(python --version), $(cat "$HFPATCH_KEEP")" python -m pytest -q "${WORKERS[@]}" --ignore=tests/kernels "$@" &&
            exit $status
    }
    # Those that other trainers pin (docs/start/run.md), beside the newest and the oldest.
    for version in 5.6 5.16 5.19; do
        (HFPATCH_VENV=$HFPATCH_ROOT/.venv-transformers-$version && suite_with "transformers==$version.*") || status=1
    done
    # What the GPU queue was written for, a machine without a network: scripts/gpu/README.md.
    (
        export HFPATCH_BARE=1 HFPATCH_TORCH='torch==2.11.*' HFPATCH_VENV=$HFPATCH_ROOT/.venv-gpu-queue
        make_env test && python -m pip install -q 'triton==3.6.*' && suite_with 'transformers==5.17.*' tests/test_gpu_queue.py --all
    ) || status=1
    PYTHON_OLDEST=${PYTHON_OLDEST:-python3.10}
    if "$PYTHON_OLDEST" --version 2>/dev/null; then
        (
            export PYTHON=$PYTHON_OLDEST HFPATCH_BARE=1 HFPATCH_TORCH='torch==2.11.*' HFPATCH_VENV=$HFPATCH_ROOT/.venv-oldest
            suite_with 'transformers==5.5.*'
        ) || status=1
    else
        echo "hfpatch: python3.10, the oldest that setup.cfg names, is missing. Set PYTHON_OLDEST=/path/to/it." >&2
        status=1
    fi
fi
[ $status -eq 0 ] || echo "hfpatch: something above failed" >&2
python -m pytest "${WORKERS[@]}" "${ALL[@]}" "$@" || status=1 # last, so that the output ends with the suite's closing line
exit $status
