#!/usr/bin/env bash
# The main job from end to end: compile a mixture-of-experts model, train it on real text with two data-parallel
# processes, and show what came out. PYTHON names the interpreter. Any argument goes to the trainer (--steps 1000).
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
package=build/moe-demo-train
run=runs/demo

echo "== compile the model (an existing run and package of the demo are replaced)"
rm -rf "$run"
"$python" -m mgraph compile moe-demo --for train --target cpu -o "$package" --force

echo "== train it: 2 processes, each with its own batches, gradients summed over the axis dp"
OMP_NUM_THREADS=1 "$python" -m torch.distributed.run --nproc-per-node 2 "$package/train.py" --out "$run" \
  --steps 400 --batch-size 4 --seq-len 128 --lr 3e-3 --warmup 40 --eval-every 100 --log-every 20 "$@"

echo "== look at it"
echo "loss curve:   $run/loss.png"
echo "the text:     $run/sample.txt"
echo "the graph:    $python -m mgraph dump $package"
echo "each pass:    $python -m mgraph explain $package"
