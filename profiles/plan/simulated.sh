#!/bin/sh
# The simulated rows of results.csv: one process a row, on a CPU, about ten minutes in all on two cores.
set -e
echo "simulated,implementation,policy,tokens,beyond_gib,host_gib,attention_forward_flops,total_flops"
row() {  # implementation, tokens, policy fields
    implementation=$1 tokens=$2
    shift 2
    python -W ignore -m hfpatch.commands.simulate --preset llama-3.1-8b --impl "$implementation" --seq-len "$tokens" \
        ${1:+--policy "$@"} --json 2>/dev/null | python -c '
import json, sys
found = json.load(sys.stdin)
flops, gib = found["flops"], [found["beyond_gib"], found["host_gib"]]
figures = [f"{x:.2f}" for x in gib] + [f"{x:.4g}" for x in (flops["attention"]["forward"], flops["total"])]
print("yes", sys.argv[1], sys.argv[3], sys.argv[2], *figures, sep=",")' "$implementation" "$tokens" "$*"
}
for tokens in 8192 32768 131072; do
    for implementation in hf hf-ckpt hf-ckpt-chunked liger liger-tiled-offload hfpatch; do
        row $implementation $tokens
    done
done
row hfpatch 131072 stream_attention=true
row hfpatch 131072 save_attention=false
