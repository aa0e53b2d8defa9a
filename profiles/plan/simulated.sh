#!/bin/sh
# The simulated rows of results.csv: one process a row, on a CPU, about half an hour in all on two cores.
# layers: fewer than the model's where each kind is there and more of them only repeat; host memory is of that many.
# Neither parameter nor gradient: beyond_gib at the moment of the highest total, most_gib the most at any moment.
# attention: forwards of each layer; matmul: FLOPs as a multiple of what the mathematics needs (6 a weight and token).
#   sh simulated.sh            all rows
#   sh simulated.sh hfpatch    those of hfpatch alone, without the header
row() {  # model, layers, implementation, tokens, policy fields
    model=$1 layers=$2 implementation=$3 tokens=$4
    shift 4
    option=--policy
    [ "$1" != least ] || option=--checkpointing
    python -W ignore "$(dirname "$0")/rivals.py" --model "$model" --layers "$layers" --impl "$implementation" --seq-len "$tokens" \
        ${1:+"$option" "$@"} --json 2>/dev/null | python -c '
import json, sys
from hfpatch.lab.presets import preset_config
from hfpatch.lab.simulate.implementations import build
from hfpatch.trainer.model_flops import Work
text = sys.stdin.read()
found, (model, layers, implementation, tokens, policy) = json.loads(text[text.index("{"):]), sys.argv[1:]
work = Work.of(build(preset_config(model) | {"num_hidden_layers": int(layers)}))
products = 6 * int(tokens) * work.weights
flops, gib = found["flops"], [found["beyond_gib"], found["most_beyond_bytes"] / 2**30, found["host_gib"]]
attended = (work.flops(1, int(tokens)) - products) / 3
ratios = flops["attention"]["forward"] / attended, sum(flops["matmul"].values()) / products
figures = [f"{x:.2f}" for x in gib] + [f"{ratios[0]:.0f}", f"{ratios[1]:.3f}", "{:.4g}".format(flops["total"])]
print(model, layers, implementation, policy, tokens, *figures, sep=",")' "$model" "$layers" "$implementation" "$tokens" "$*"
}
if [ "$1" != hfpatch ]; then
    echo "model,layers,implementation,policy,tokens,beyond_gib,most_gib,host_gib,attention,matmul,total_flops"
    for tokens in 8192 32768 131072; do
        for implementation in hf hf-ckpt trl-offload trl-selective liger-selective liger-tiled-offload; do
            row llama-3.1-8b 32 $implementation $tokens
        done
    done
fi
for tokens in 8192 32768 131072; do row llama-3.1-8b 32 hfpatch $tokens; done
row llama-3.1-8b 32 hfpatch 131072 keep=input
for tokens in 8192 32768 131072; do
    for model in "llama-3.1-8b 32" "Qwen/Qwen3-8B 36" "mistralai/Mistral-7B-v0.3 32" "google/gemma-3-12b 12" "openai/gpt-oss-20b 4" \
        "Qwen/Qwen3-30B-A3B 4"; do
        row $model hfpatch $tokens least
    done
done
