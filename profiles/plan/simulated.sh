#!/bin/sh
# The simulated rows of results.csv: one process a row, on a CPU, about ten minutes in all on two cores.
# Neither parameter nor gradient: beyond_gib at the moment of the highest total, most_gib the most at any moment.
# attention: forwards of each layer; matmul: FLOPs as a multiple of what the mathematics needs (6 a weight and token).
set -e
echo "implementation,policy,tokens,beyond_gib,most_gib,host_gib,attention,matmul,total_flops"
row() {  # implementation, tokens, policy fields
    implementation=$1 tokens=$2
    shift 2
    python -W ignore -m hfpatch.commands.simulate --preset llama-3.1-8b --impl "$implementation" --seq-len "$tokens" \
        ${1:+--policy "$@"} --json 2>/dev/null | python -c '
import json, sys
from hfpatch.memory.formula import ModelShape, step_flops
from hfpatch.memory.presets import preset_config
text = sys.stdin.read()
found, tokens = json.loads(text[text.index("{"):]), int(sys.argv[2])
least = step_flops(ModelShape.from_config(preset_config("llama-3.1-8b")), "off", batch=1, tokens=tokens)
flops, gib = found["flops"], [found["beyond_gib"], found["most_beyond_bytes"] / 2**30, found["host_gib"]]
ratios = flops["attention"]["forward"] / least.attention_forward, sum(flops["matmul"].values()) / least.matmul
figures = [f"{x:.2f}" for x in gib] + [f"{ratios[0]:.0f}", f"{ratios[1]:.3f}", "{:.4g}".format(flops["total"])]
print(sys.argv[1], sys.argv[3], sys.argv[2], *figures, sep=",")' "$implementation" "$tokens" "$*"
}
for tokens in 8192 32768 131072; do
    for implementation in hf hf-ckpt trl-offload trl-selective liger-selective liger-tiled-offload hfpatch; do
        row $implementation $tokens
    done
done
row hfpatch 131072 stream_attention=true
row hfpatch 131072 save_attention=false
