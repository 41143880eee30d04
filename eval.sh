#!/usr/bin/env bash
# Evaluate a model: greedy, all held-out rows in file order; writes validation_results_step0.json, a card and a summary.
# With job.evaluate_bounds=true evaluation.pipelines=all also the baselines, and their table (docs/evaluation.md).
#   bash eval.sh model.path=FOLDER [--config-name NAME] key.path=value ...
#   sbatch --gpus-per-node=1 eval.sh --config-name chatr1_3b_topiocqa model.path=FOLDER
#SBATCH --job-name=chatr1-eval
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=16
#SBATCH --mem=64G
#SBATCH --time=04:00:00
#SBATCH --signal=B:TERM@120
#SBATCH --output=%x-%j.log
set -euo pipefail
CHATR1_STARTED=$(date +%s)
export CHATR1_STARTED
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
# Slurm runs a copy of this file elsewhere; the checkout is where sbatch was called.
if [ ! -f "$here/scripts/setup.sh" ]; then here=${SLURM_SUBMIT_DIR:-$here}; fi
if [ ! -f "$here/scripts/setup.sh" ]; then echo "eval.sh: run sbatch from the folder of the checkout" >&2; exit 2; fi
bash "$here/scripts/setup.sh"
export PYTHONPATH="$here${PYTHONPATH:+:$PYTHONPATH}"
exec "$here/.venv/bin/python" "$here/scripts/job.py" eval "$@"
