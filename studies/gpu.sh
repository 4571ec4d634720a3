#!/usr/bin/env bash
# Everything that wants a GPU in one go, the most important first, cut to the minutes at hand: the tests that need one,
# the benchmark of the engines, and the studies of the papers' tables. The same command goes on with studies that were
# cut off.
#
#     studies/gpu.sh MINUTES [--cpu] [--scale smoke | reduced | paper]
#
# --cpu tries the steps without a GPU. Images: CIFAR10, CIFAR100 and PACS say where they are (data/cifar10,
# data/cifar100, data/pacs64); a study without its images is left out, and the scale smoke needs none. Runs share the
# GPU: PROCESSES of them at once. ENGINE=vectorized trains clients at once. PYTHON names the interpreter, which has the
# extras search (optuna, for DC-PFL at the scale paper), ssl (lightly, for Calibre) and, for the tests, dev.
#
# Left in OUTPUT (runs/gpu): summary.md with all tables, steps.jsonl (step, exit code, seconds), a log of each step, and
# the studies' folders. The tables of docs/results are made from these.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1
if [[ ! -f pyproject.toml || ! -d benchmarks || ! -d tests ]]; then
  echo "studies/gpu.sh: it needs the tests and benchmarks of the repository: call it in a checkout" >&2
  exit 2
fi

minutes='' device=gpu scale=paper
while (($#)); do
  case $1 in
    --cpu) device=cpu ;;
    --scale) scale=${2:?--scale needs a name}; shift ;;
    [0-9]*) minutes=$1 ;;
    *) echo "usage: studies/gpu.sh MINUTES [--cpu] [--scale smoke | reduced | paper]" >&2; exit 2 ;;
  esac
  shift
done
if [[ ! $minutes =~ ^[0-9]+$ ]]; then
  echo "usage: studies/gpu.sh MINUTES [--cpu] [--scale smoke | reduced | paper]" >&2
  exit 2
fi

python=${PYTHON:-python3}
output=${OUTPUT:-runs/gpu}
processes=${PROCESSES:-4}
end=$((SECONDS + 60 * minutes))
mkdir -p "$output/logs"

# ---------------------------------------------------------------------------------------------------------- the steps

left() { echo $((end - SECONDS)); }

# step NAME SECONDS COMMAND...: runs a command for so long at most; notes its exit code and time.
step() {
  local name=$1 most=$2 began=$SECONDS code=0
  shift 2
  if (($(left) < most)); then most=$(left); fi
  if ((most < 10)); then
    note "$name" null 0
    return 1
  fi
  echo "=== $name (at most $most s): $*"
  timeout --signal=TERM --kill-after=90 "$most" "$@" > "$output/logs/$name.log" 2>&1 < /dev/null || code=$?
  tail -n 3 "$output/logs/$name.log"
  note "$name" "$code" $((SECONDS - began))
  summarize
  return "$code"
}

note() { printf '{"step": "%s", "exit_code": %s, "seconds": %s}\n' "$1" "$2" "$3" >> "$output/steps.jsonl"; }

summarize() {
  local log table
  {
    printf '# GPU: %s, scale %s, %s\n\n' "$device" "$scale" "$(date +%F)"
    printf 'Exit code 124: cut off by the clock, and goes on next time; null: no time was left.\n\n```\n'
    cat "$output/steps.jsonl"
    printf '```\n\n## Machine\n\n```\n'
    cat "$output/logs/machine.log"
    printf '```\n'
    for log in "$output"/logs/engines*.log; do # the tables and notes, without what Lightning says
      [[ -f $log ]] && printf '\n## %s\n\n%s\n' "$(basename "$log" .log)" "$(grep -E '^(\||- |[0-9]{4}-)' "$log")"
    done
    log=$output/logs/tests.log
    if [[ -f $log ]]; then printf '\n## tests\n\n```\n%s\n```\n' "$(tail -n 25 "$log")"; fi
    for table in "$output"/studies/*/table.md; do
      [[ -f $table ]] && printf '\n## %s\n\n%s\n' "$(basename "$(dirname "$table")")" "$(cat "$table")"
    done
  } > "$output/summary.md"
}

machine() {
  "$python" - << 'PYTHON'
import platform, lightning, torch
print(platform.platform(), "Python", platform.python_version())
print("torch", torch.__version__, "lightning", lightning.__version__)
print(torch.cuda.get_device_name() if torch.cuda.is_available() else "no CUDA device")
PYTHON
  if command -v nvidia-smi > /dev/null; then nvidia-smi --query-gpu=name,memory.total,driver_version --format=csv; fi
}

# study NAME IMAGES SECONDS: runs a study, or goes on with it, and writes its tables, whatever is done of it.
study() {
  local name=$1 images=$2 most=$3 folder=$output/studies/$1 code=0
  local words=(reproduce "$name" --scale "$scale" --output "$folder")
  local options=(--processes "$processes" --trainer.accelerator "$device" --trainer.devices 1)
  if [[ $scale != smoke ]]; then
    if [[ ! -d $images ]]; then
      echo "=== $name: left out, there is no folder $images"
      note "$name" '"no images"' 0
      return 0
    fi
    options+=(--data "$images")
  fi
  if [[ -n ${ENGINE:-} ]]; then options+=(--engine "$ENGINE"); fi
  step "$name" "$most" "$python" -m pfl_lightning.cli "${words[@]}" "${options[@]}" || code=$?
  if ((code != 0)) && [[ -d $folder ]]; then
    timeout 120 "$python" -m pfl_lightning.cli "${words[@]}" --report-only "${options[@]}" \
      > "$output/logs/$name-report.log" 2>&1 < /dev/null || true
    summarize
  fi
  return "$code"
}

# ------------------------------------------------------------------------------------------------------- what is done

: > "$output/steps.jsonl"
rm -f "$output"/logs/*
machine > "$output/logs/machine.log" 2>&1
cat "$output/logs/machine.log"
if [[ $device == gpu ]] && ! "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
  echo "studies/gpu.sh: there is no CUDA device; --cpu tries the steps without one" >&2
  exit 1
fi

if [[ -d tests ]]; then
  step tests $((60 * minutes / 8 + 60)) "$python" -m pytest -q -n "$processes" -m "" -k cuda -rs tests/engines tests/drop_in/fits || true
fi

if [[ -d benchmarks ]]; then
  engines=("$python" benchmarks/engines.py --accelerator "$device")
  share=$((60 * minutes / 8)) # seconds of a benchmark, which ends by itself within its minutes, give or take a run
  in_minutes=$(awk "BEGIN { print 0.7 * $share / 60 }")
  if [[ $device == gpu ]]; then
    step engines "$share" "${engines[@]}" --minutes "$in_minutes" --clients 20 --precision 32-true 16-mixed bf16-mixed \
      --encoder fedpac_cnn dcpfl resnet18 --cuda-graphs || true
    step engines-memory "$share" "${engines[@]}" --minutes "$in_minutes" --clients 20 50 100 200 --repetitions 1 \
      --precision 32-true bf16-mixed --encoder fedpac_cnn resnet18 || true
  else
    step engines "$share" "${engines[@]}" --minutes "$in_minutes" --clients 2 --samples 50 --epochs 1 --repetitions 1 \
      --precision 32-true bf16-mixed --encoder mlp || true
  fi
fi

cifar10=${CIFAR10:-data/cifar10} cifar100=${CIFAR100:-data/cifar100} pacs=${PACS:-data/pacs64}
studies=(
  "fedpac-table1 $cifar10" "fedpac-table2 $cifar10" "dcpfl-table2 $cifar10" "dcpfl-table1 $cifar10"
  "dualfed-table1 $pacs" "calibre-fig3 $cifar10" "calibre-personalization $cifar10" "fedclassavg-table2 $cifar10"
  "fedclassavg-readings $cifar10" "calibre-x $cifar10" "fedclassavg-table4 $cifar10" "dcpfl-table2-cifar100 $cifar100"
  "dcpfl-table1-cifar100 $cifar100" "fedpac-table1-100-clients $cifar10" "calibre-fig4 $cifar10" "dualfed-table4 $pacs"
  "calibre-fig3-cifar100 $cifar100" "further-methods $cifar10"
)
for pass in 1 2; do # first at most 40 % of what is left for each, 3 minutes at least; then all for those cut off
  for entry in "${studies[@]}"; do
    read -r name images <<< "$entry"
    if [[ $pass == 2 && -f $output/logs/$name.done ]]; then continue; fi
    most=$(left)
    if [[ $pass == 1 ]]; then most=$((most > 450 ? most * 2 / 5 : most < 180 ? most : 180)); fi
    if study "$name" "$images" "$most"; then touch "$output/logs/$name.done"; fi
    if (($(left) < 10)); then break 2; fi
  done
done
summarize
echo "=== $output/summary.md"
