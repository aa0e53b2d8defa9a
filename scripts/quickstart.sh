#!/usr/bin/env bash
# From nothing to a trained model and a picture of the memory: bash scripts/quickstart.sh
#
# Makes .venv, installs, trains a small Llama from scratch on the Python sources of this machine's standard library (nothing
# is downloaded but packages), generates text with it, then records one long step stock, with the fused loss alone and
# patched, and draws their memory. After installation it takes under 3 minutes on 2 CPU cores; a GPU trains where there is one.
# The last line is the picture's path, under runs/quickstart/.
case ${1:-} in -h | --help) sed -n '2,/^case /{/^case /d;s/^# \{0,1\}//p}' "${BASH_SOURCE[0]}"; exit 0 ;; esac
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/env.sh
make_env train,report
OUT=${OUT:-runs/quickstart}
if [ -d "$OUT" ]; then mv "$OUT" "$OUT.$(date +%Y%m%d-%H%M%S)"; fi # an earlier run is kept, beside this one
mkdir -p "$OUT"
STDLIB=$(python -c 'import sysconfig; print(sysconfig.get_path("stdlib"))')
export TOKENIZERS_PARALLELISM=true
# Threads that spin while they wait cost ten times the speed where another process wants a core too.
export OMP_WAIT_POLICY=${OMP_WAIT_POLICY:-passive}

export TQDM_DISABLE=1 TRANSFORMERS_VERBOSITY=error

# Reads the log of a run; prints one line for each entry, and what the run itself says.
progress() {
    python -u -c '
import ast, sys
every, steps, first = int(sys.argv[1]), sys.argv[2], None
for line in sys.stdin:
    if line.startswith("{"):
        entry = ast.literal_eval(line)
        if "loss" in entry:
            first = first or float(entry["epoch"])  # the last entry may come between two of them
            step = round(float(entry["epoch"]) / first * every)
            loss, speed = float(entry["loss"]), float(entry.get("tokens_per_second", 0))
            print(f"hfpatch: step {step} of {steps} at most: loss {loss:.2f} nats a token, {speed:,.0f} tokens/s")
    elif line.startswith("hfpatch: "):
        print(line, end="")
' "$1" "$2"
}

echo "hfpatch: 1/3 training a small Llama on the Python files in $STDLIB: 600 steps, or as many as 60 seconds allow"
python scripts/train.py \
    --model llama-tiny --config_overrides hidden_size=128,intermediate_size=352,num_hidden_layers=4,tie_word_embeddings=true \
    --train_tokenizer 512 --data "$STDLIB" --data_glob '**/*.py' \
    --data_exclude site-packages dist-packages test tests idlelib lib2to3 __pycache__ \
    --validation_split 0.02 --eval_on_start --seq-len 256 --packing \
    --per_device_train_batch_size 8 --max_steps 600 --time_limit 1 \
    --learning_rate 3e-3 --warmup_steps 20 --weight_decay 0.1 --adam_beta2 0.98 \
    --lr_scheduler_type cosine_with_min_lr --lr_scheduler_kwargs '{"min_lr_rate": 0.05}' \
    --logging_steps 25 --save_strategy no --report_to none --disable_tqdm true --output_dir "$OUT/model" 2>"$OUT/train.log" |
    progress 25 600 || { cat "$OUT/train.log" >&2; exit 1; }

echo "hfpatch: 2/3 the saved model in plain transformers"
python - "$OUT/model" <<'PY'
import sys
import torch
from hfpatch.cli.quiet import quiet
quiet()
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
torch.manual_seed(0)
prompt = tokenizer("def ", return_tensors="pt", add_special_tokens=False)
ids = model.generate(**prompt, max_new_tokens=120, do_sample=True, temperature=0.7, top_p=0.95)
print(f"{type(model).__name__}, {model.num_parameters():,} parameters, writes:")
print(tokenizer.decode(ids[0], skip_special_tokens=True))
PY

echo "hfpatch: 3/3 one training step of 8,192 tokens: stock with checkpointing, with the fused loss alone, and patched"
python scripts/step_memory.py "$OUT/memory.png" 2>/dev/null

echo "hfpatch: done; the model is in $OUT/model; the memory over the step:"
echo "$OUT/memory.png"
