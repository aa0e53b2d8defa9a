#!/usr/bin/env bash
# One command on every machine of a run:  bash scripts/launch_multinode.sh [--launcher accelerate|torchrun] script.py [flags]
#
#   WORLD_SIZE=4 MACHINE_RANK=0 MASTER_ADDR=10.0.0.1 bash scripts/launch_multinode.sh scripts/train.py run.yaml --placement zero3
#
# Environment, as schedulers set it (PyTorchJob's meaning: WORLD_SIZE counts machines):
#   WORLD_SIZE     number of machines (default 1)
#   MACHINE_RANK   this machine, 0 to WORLD_SIZE - 1 (RANK is taken where this is not set; default 0)
#   MASTER_ADDR    address of machine 0; required with more than one machine
#   MASTER_PORT    a free port on machine 0 (default 29500)
#   GPUS           processes on this machine (default: its GPUs, or 1)
#   LAUNCHER       accelerate (default) or torchrun
#   MASTER_WAIT    seconds until MASTER_ADDR must be a known name (default 60: machines start one after the other)
#   CONFIG_FILE    an accelerate YAML such as fsdp_configs/fsdp2.yaml (accelerate only)
# DRY_RUN=1 prints the command and runs nothing.
# Exit code: the launcher's, or 2 where no command could be built.
set -euo pipefail

fail() { echo "hfpatch: $1" >&2; exit 2; }
# number NAME VALUE LEAST MOST: the value without leading zeros, which bash would read as octal.
number() {
    [[ $2 =~ ^0*([0-9]{1,9})$ ]] || fail "$1 must be a whole number, got '$2'. Correct the environment."
    local value=$((10#${BASH_REMATCH[1]}))
    [ "$value" -ge "$3" ] && [ "$value" -le "$4" ] || fail "$1 must be from $3 to $4, got $2. ${5:-Correct the environment}."
    echo "$value"
}

case ${1:-} in -h | --help) sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//p}' "${BASH_SOURCE[0]}"; exit 0 ;; esac
LAUNCHER=${LAUNCHER:-accelerate}
if [ "${1:-}" = --launcher ]; then
    [ $# -ge 2 ] || fail "--launcher must be accelerate or torchrun, got nothing. Name one."
    LAUNCHER=$2
    shift 2
fi
[ $# -ge 1 ] || fail "a script to launch is missing. Name one, for example scripts/train.py run.yaml."
case $LAUNCHER in accelerate | torchrun) ;; *) fail "LAUNCHER must be accelerate or torchrun, got '$LAUNCHER'. Name one." ;; esac

command -v "$LAUNCHER" >/dev/null || fail "$LAUNCHER is not installed here. Run: pip install ${LAUNCHER/torchrun/torch}."

# `|| exit`: what fails inside $(...) has said why, and must end this script too.
machines=$(number WORLD_SIZE "${WORLD_SIZE:-1}" 1 100000) || exit
rank=$(number MACHINE_RANK "${MACHINE_RANK:-${RANK:-0}}" 0 $((machines - 1)) "WORLD_SIZE counts machines") || exit
port=$(number MASTER_PORT "${MASTER_PORT:-29500}" 1 65535) || exit
gpus=${GPUS-$(python -c 'import torch; print(max(1, torch.cuda.device_count()))' 2>/dev/null)} ||
    fail "GPUS: torch could not count this machine's GPUs. Set GPUS."
gpus=$(number GPUS "$gpus" 1 1024) || exit
if [ "$machines" -gt 1 ] && [ -z "${MASTER_ADDR:-}" ]; then
    fail "MASTER_ADDR must be the address of machine 0, got nothing. Set it on every machine."
fi
address=${MASTER_ADDR:-127.0.0.1}

if [ "$LAUNCHER" = torchrun ]; then
    [ -z "${CONFIG_FILE:-}" ] || fail "CONFIG_FILE works with accelerate only. Leave it out, or drop --launcher torchrun."
    command=(torchrun --nnodes "$machines" --node_rank "$rank" --nproc_per_node "$gpus"
        --master_addr "$address" --master_port "$port" "$@")
else
    command=(accelerate launch --num_machines "$machines" --machine_rank "$rank" --num_processes $((machines * gpus))
        --main_process_ip "$address" --main_process_port "$port")
    if [ -n "${CONFIG_FILE:-}" ]; then
        [ -f "$CONFIG_FILE" ] || fail "CONFIG_FILE must be a file, got $CONFIG_FILE. Take one of fsdp_configs/*.yaml."
        command+=(--config_file "$CONFIG_FILE")
    else
        [ $((machines * gpus)) -gt 1 ] && command+=(--multi_gpu)
        command+=(--mixed_precision no --dynamo_backend no) # the script's own flags decide both
    fi
    command+=("$@")
fi
if [ "${DRY_RUN:-0}" != 1 ]; then
    case $1 in -*) ;; *) [ -f "$1" ] || fail "there is no script $1. Check the path." ;; esac
    wait=$(number MASTER_WAIT "${MASTER_WAIT:-60}" 0 86400) || exit
    python - "$address" "$wait" <<'WAIT' || exit 2
import socket, sys, time
address, seconds = sys.argv[1], float(sys.argv[2])
end = time.monotonic() + seconds
while True:
    try:
        socket.getaddrinfo(address, None)
        break
    except (OSError, UnicodeError) as error:
        if time.monotonic() > end:
            print(f"hfpatch: MASTER_ADDR: no host {address} is known after {seconds:.0f} s ({error}). Correct it.", file=sys.stderr)
            sys.exit(2)
        time.sleep(1)
WAIT
    if [ "$rank" -gt 0 ]; then
        echo "hfpatch: machine $rank meets machine 0 at $address:$port; if nothing follows, look whether it runs there and" \
            "whether a firewall closes the port." >&2
    fi
fi
echo "${command[*]}"
[ "${DRY_RUN:-0}" = 1 ] && exit 0
# The launcher gives each process its own RANK and WORLD_SIZE.
unset WORLD_SIZE RANK MACHINE_RANK LOCAL_RANK
exec "${command[@]}"
