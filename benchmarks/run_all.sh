#!/usr/bin/env bash
# Everything that is measured on one idle GPU, most important first: correctness, tuning, whole steps, routing against the
# alternatives, the 8B mid-training step. Each part is cut off at its share of the time, and keeps what it has.
#
#   benchmarks/run_all.sh OUT [SECONDS]        (default 1200 seconds; parts: PARTS="test tune step routing midtrain")
#
# Parts that a red correctness gate touches print no speed-up; the exit status counts the parts that failed.
set -u
cd "$(dirname "$0")/.."
out=${1:?usage: benchmarks/run_all.sh OUT [SECONDS]}
total=${2:-1200}
parts=${PARTS:-test tune step routing midtrain}
mkdir -p "$out"
export PYTHONPATH="$PWD/src:$PWD/tests${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1

share() { # percent of the whole time, and never beyond its end
  local want=$((total * $1 / 100)) left=$((total - SECONDS - 5))
  echo $((want < left ? want : left))
}

failed=0
part() { # name percent command...
  local name=$1 limit
  limit=$(share "$2")
  shift 2
  [[ " $parts " == *" $name "* ]] || return 0
  ((limit > 10)) || { echo "[$SECONDS s] $name: no time left"; failed=$((failed + 1)); return 0; }
  echo "[$SECONDS s] $name (at most $limit s)"
  timeout --signal=INT --kill-after=10 "$limit" "$@" >"$out/$name.log" 2>&1
  local status=$?
  echo "[$SECONDS s] $name: exit $status"
  tail -n 12 "$out/$name.log"
  ((status == 0)) || failed=$((failed + 1))
}

part test 20 python3 -m pytest -q -p no:cacheprovider -m gpu tests/ops tests/routing tests/training/test_gpu.py tests/analysis
part tune 25 python3 benchmarks/tune.py --norm --shapes 1b 350m 100m 8b-delta --seconds "$(share 22)" --out "$out/tune.json"
part step 20 python3 -m mhar.cli bench step --output "$out/step.json"
part routing 25 python3 -m mhar.cli bench routing --output "$out/routing.json"
part midtrain 15 python3 benchmarks/midtrain_8b_step.py --warmup 1 --steps 3 --output "$out/midtrain-8b.json"
echo "[$SECONDS s] $failed parts failed; results in $out"
exit "$failed"
