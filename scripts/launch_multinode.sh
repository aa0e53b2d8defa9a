#!/usr/bin/env bash
# One command on every machine of a run:  bash scripts/launch_multinode.sh [--launcher accelerate|torchrun] script.py [flags]
#
#   WORLD_SIZE=4 MACHINE_RANK=0 MASTER_ADDR=10.0.0.1 bash scripts/launch_multinode.sh scripts/train.py run.yaml --engine zero3
#
# Environment, as schedulers set it (PyTorchJob's meaning: WORLD_SIZE counts machines):
#   WORLD_SIZE     number of machines (default 1)
#   MACHINE_RANK   this machine, 0 to WORLD_SIZE - 1 (RANK is taken where this is not set; default 0)
#   MASTER_ADDR    address of machine 0; required with more than one machine
#   MASTER_PORT    a free port on machine 0 (default 29500)
#   GPUS           processes on this machine (default: its GPUs, or 1)
#   LAUNCHER       accelerate (default) or torchrun
#   CONFIG_FILE    an accelerate YAML such as fsdp_configs/fsdp2.yaml (accelerate only)
# DRY_RUN=1 prints the command and runs nothing.
set -euo pipefail

fail() { echo "hfpatch: $1" >&2; exit 2; }
number() { [[ $2 =~ ^[0-9]+$ ]] || fail "$1: expected a whole number, came '$2'; correct the environment."; }

LAUNCHER=${LAUNCHER:-accelerate}
if [ "${1:-}" = --launcher ]; then LAUNCHER=${2:-}; shift 2; fi
[ $# -ge 1 ] || fail "expected a script to launch, nothing came; for example scripts/train.py run.yaml."
case $LAUNCHER in accelerate | torchrun) ;; *) fail "launcher: expected accelerate or torchrun, came '$LAUNCHER'." ;; esac

machines=${WORLD_SIZE:-1}
rank=${MACHINE_RANK:-${RANK:-0}}
port=${MASTER_PORT:-29500}
gpus=${GPUS:-$(python -c 'import torch; print(max(1, torch.cuda.device_count()))')}
number WORLD_SIZE "$machines"; number MACHINE_RANK "$rank"; number MASTER_PORT "$port"; number GPUS "$gpus"
[ "$machines" -ge 1 ] || fail "WORLD_SIZE: expected at least one machine, came 0; correct the environment."
[ "$rank" -lt "$machines" ] || fail "MACHINE_RANK: expected 0 to $((machines - 1)), came $rank; WORLD_SIZE counts machines."
if [ "$machines" -gt 1 ] && [ -z "${MASTER_ADDR:-}" ]; then
    fail "MASTER_ADDR: expected the address of machine 0, came nothing; set it on every machine."
fi
address=${MASTER_ADDR:-127.0.0.1}

if [ "$LAUNCHER" = torchrun ]; then
    command=(torchrun --nnodes "$machines" --node_rank "$rank" --nproc_per_node "$gpus"
        --master_addr "$address" --master_port "$port" "$@")
else
    command=(accelerate launch --num_machines "$machines" --machine_rank "$rank" --num_processes $((machines * gpus))
        --main_process_ip "$address" --main_process_port "$port")
    if [ -n "${CONFIG_FILE:-}" ]; then
        [ -f "$CONFIG_FILE" ] || fail "CONFIG_FILE: no file $CONFIG_FILE; take one of fsdp_configs/*.yaml."
        command+=(--config_file "$CONFIG_FILE")
    else
        [ $((machines * gpus)) -gt 1 ] && command+=(--multi_gpu)
        command+=(--mixed_precision no --dynamo_backend no) # the script's own flags decide both
    fi
    command+=("$@")
fi
echo "${command[*]}"
[ "${DRY_RUN:-0}" = 1 ] && exit 0
# The launcher gives each process its own RANK and WORLD_SIZE.
unset WORLD_SIZE RANK MACHINE_RANK LOCAL_RANK
exec "${command[@]}"
